"""The training loss agrees with the dense oracle, in value and gradient, and grouping is exact."""

import pytest
import torch

from c2kv.extractor import extract
from c2kv.training import loss as loss_module
from c2kv.training.loss import Group, Question, group_loss, recomputed_logits
from conftest import noisy_extractor, random_ids
from oracle import loss_dense

DOCUMENTS = tuple(tuple(random_ids(n, seed=n)) for n in (13, 6, 21))
PREFIX = tuple(random_ids(4, seed=70))
QUESTIONS = tuple(
    Question(PREFIX, order, tuple(random_ids(q, seed=q)), tuple(random_ids(a, seed=50 + a)))
    for order, q, a in (((0, 1, 2), 5, 3), ((2, 0), 9, 1), ((1,), 2, 6))
)
GROUP = Group(DOCUMENTS, QUESTIONS)


def gradients(extractor, loss):
    extractor.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in extractor.named_parameters() if p.requires_grad}


def dense(backbone, extractor, question, residual):
    return loss_dense(
        backbone.model,
        extractor,
        list(question.prefix),
        [list(DOCUMENTS[i]) for i in question.documents],
        list(question.question),
        list(question.answer),
        extractor.config.ratio,
        residual,
    ) * len(question.answer)


@pytest.mark.parametrize("variant", ["plain", "residual"])
def test_loss_and_gradients_equal_the_oracles(backbone, variant):
    extractor = noisy_extractor(backbone, 4, variant)
    loss, tokens = group_loss(backbone, extractor, GROUP)
    expected = sum(dense(backbone, extractor, q, variant == "residual") for q in QUESTIONS)
    assert tokens == 10
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    got, wanted = gradients(extractor, loss), gradients(extractor, expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-3, rtol=1e-3, msg=name)
    assert all(p.grad is None for p in backbone.model.parameters())


def test_grouped_questions_equal_one_at_a_time(llama):
    extractor = noisy_extractor(llama, 3, "residual")
    together, tokens = group_loss(llama, extractor, GROUP)
    grouped = gradients(extractor, together)
    alone = [group_loss(llama, extractor, Group(DOCUMENTS, (q,))) for q in QUESTIONS]
    assert tokens == sum(count for _, count in alone)
    separate = sum(loss for loss, _ in alone)
    torch.testing.assert_close(together, separate, atol=1e-4, rtol=1e-5)
    for name, gradient in gradients(extractor, separate).items():
        torch.testing.assert_close(grouped[name], gradient, atol=1e-4, rtol=1e-3, msg=name)


def test_full_recomputes_logits_are_the_models_own(backbone):
    got, _ = recomputed_logits(backbone, GROUP)
    expected = []
    for q in QUESTIONS:
        ids = [*q.prefix, *(t for i in q.documents for t in DOCUMENTS[i]), *q.question, *q.answer]
        logits = backbone.model(torch.tensor([ids])).logits[0]
        expected.append(logits[-len(q.answer) - 1 : -1])
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_distillation_moves_the_loss_from_the_answer_to_full_recompute(llama):
    extractor = noisy_extractor(llama, 4)
    with torch.no_grad():
        answer, kl, mixed = (
            group_loss(llama, extractor, GROUP, distill=share)[0] for share in (0.0, 1.0, 0.25)
        )
    assert kl > 0 and mixed.item() == pytest.approx(0.75 * answer.item() + 0.25 * kl.item())
    with torch.no_grad():
        kvs = dict(enumerate(extract(llama, extractor, DOCUMENTS, 4)))
        prefix = loss_module.prefix_kv(llama, PREFIX)
        rows = [loss_module.compose(llama, prefix, kvs, GROUP, q, 4) for q in QUESTIONS]
        student = loss_module.answer_logits(llama, rows, QUESTIONS)[0].softmax(-1)
        teacher = loss_module.recomputed_logits(llama, GROUP)[0].softmax(-1)
    # Of the teacher's distribution: where it is sure, the student is to be.
    expected = (teacher * (teacher.log() - student.log())).sum()
    assert kl.item() == pytest.approx(expected.item(), rel=1e-3)
    assert abs(kl - (student * (student.log() - teacher.log())).sum()) > 0.01 * kl


def test_distilling_from_an_exact_copy_costs_nothing(llama, monkeypatch):
    extractor = noisy_extractor(llama, 4)
    with torch.no_grad():
        kvs = dict(enumerate(extract(llama, extractor, DOCUMENTS, 4)))
        prefix = loss_module.prefix_kv(llama, PREFIX)
        rows = [loss_module.compose(llama, prefix, kvs, GROUP, q, 4) for q in QUESTIONS]
        own = loss_module.answer_logits(llama, rows, QUESTIONS)[0]
        monkeypatch.setattr(loss_module, "recomputed_logits", lambda *_: (own, None))
        assert group_loss(llama, extractor, GROUP, distill=1.0)[0] == pytest.approx(0, abs=1e-5)


def test_another_ratio_than_the_extractors_own(llama):
    extractor = noisy_extractor(llama, 4)
    at_eight, _ = group_loss(llama, extractor, GROUP, ratio=8)
    at_four, _ = group_loss(llama, extractor, GROUP)
    assert not torch.isclose(at_eight, at_four)


@pytest.mark.parametrize(("padding", "batches"), [(1.0, 4), (1.25, 2), (float("inf"), 1)])
def test_documents_are_batched_by_like_lengths(llama, monkeypatch, padding, batches):
    documents = [random_ids(n, seed=n) for n in (30, 9, 28, 8)]
    group = Group(tuple(map(tuple, documents)), QUESTIONS[:1])
    extractor = noisy_extractor(llama, 4)
    passes = []
    monkeypatch.setattr(
        loss_module, "extract", lambda *given: passes.append(given[2]) or extract(*given)
    )
    with torch.no_grad():
        got, _ = group_loss(llama, extractor, group, padding=padding)
        alone = group_loss(llama, extractor, group, padding=1.0)[0]
    assert len(passes) == batches + 4
    torch.testing.assert_close(got, alone, atol=1e-4, rtol=1e-4)


def test_anchors_are_trained_on_documents_read_together(llama):
    extractor = noisy_extractor(llama, 4, "anchor")
    with torch.no_grad():
        got, _ = group_loss(llama, extractor, GROUP)
        whole = []
        for q in QUESTIONS:
            ids = tuple(t for i in q.documents for t in DOCUMENTS[i])
            one = Question(q.prefix, (0,), q.question, q.answer)
            whole.append(group_loss(llama, extractor, Group((ids,), (one,)))[0])
        (apart,) = extract(llama, extractor, [DOCUMENTS[2]])
        together = extract(llama, extractor, [(*DOCUMENTS[0][:12], *DOCUMENTS[2])])[0][..., 3:, :]
    torch.testing.assert_close(got, sum(whole), atol=1e-3, rtol=1e-4)
    assert not torch.allclose(apart, together, atol=1e-2)  # they hold what came before them
