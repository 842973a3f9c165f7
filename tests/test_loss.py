"""The training loss agrees with the dense oracle, in value and gradient, and grouping is exact."""

import pytest
import torch

from c2kv.training.loss import Group, Question, group_loss
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


def test_another_ratio_than_the_extractors_own(llama):
    extractor = noisy_extractor(llama, 4)
    at_eight, _ = group_loss(llama, extractor, GROUP, ratio=8)
    at_four, _ = group_loss(llama, extractor, GROUP)
    assert not torch.isclose(at_eight, at_four)
