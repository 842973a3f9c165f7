"""Dev scores: does what is trained read? Answers with their documents, and with wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from c2kv.backbone import Backbone
from c2kv.decode import DecodingOptions, decode
from c2kv.evaluation.metrics import f1
from c2kv.library import SegmentLibrary
from c2kv.methods.recompute import prefill
from c2kv.prompt import PromptTemplate
from c2kv.training.loss import Group
from c2kv.training.subject import Subject

_BATCH = 8


@torch.no_grad()
def dev_scores(
    backbone: Backbone, subject: Subject, template: PromptTemplate, groups: Sequence[Group]
) -> dict[str, float]:
    """Answer NLL in nats a token, with the right documents and with those of the next group, the
    gap between them, and F1 (percent) of greedy answers. Groups hold one question each."""
    totals = {"right": 0.0, "wrong": 0.0}
    tokens = 0
    for own, other in zip(groups, [*groups[1:], groups[0]], strict=True):
        (question,) = own.questions
        order = tuple(range(len(other.documents)))
        wrong = Group(other.documents, (replace(question, documents=order),))
        for name, group in (("right", own), ("wrong", wrong)):
            loss, count = subject.total(group)
            totals[name] += loss.item()
        tokens += count
    right, wrong_nll = (total / tokens for total in totals.values())
    return {
        "dev_nll_right": right,
        "dev_nll_wrong": wrong_nll,
        "dev_gap": wrong_nll - right,
        "dev_f1": _answer_f1(backbone, subject, template, groups),
    }


def _answer_f1(
    backbone: Backbone, subject: Subject, template: PromptTemplate, groups: Sequence[Group]
) -> float:
    library = SegmentLibrary(backbone, subject.maker(), template.digest)
    longest = max(len(group.questions[0].answer) for group in groups)
    options = DecodingOptions.of(backbone, max_new_tokens=longest)
    text = template.tokenizer.decode
    total = 0.0
    for start in range(0, len(groups), _BATCH):
        some = groups[start : start + _BATCH]
        compositions, asked = [], []
        for group in some:
            (question,) = group.questions
            ordered = [group.documents[i] for i in question.documents]
            if library.maker.variant == "anchor":  # as trained: read together
                ordered = [tuple(token for document in ordered for token in document)]
            segments = tuple(library.get(ordered).segments)
            compositions.append(replace(prefill(backbone, question.prefix), segments=segments))
            asked.append(question.question)
        decoded, _ = decode(compositions, asked, options)
        for one, group in zip(decoded, some, strict=True):
            expected = text(group.questions[0].answer, skip_special_tokens=True)
            total += f1(text(one.token_ids, skip_special_tokens=True), [expected])
    return 100 * total / len(groups)
