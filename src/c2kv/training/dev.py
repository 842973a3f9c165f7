"""Dev scores: does what is trained read? Answers with their documents, and with wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from c2kv.backbone import Backbone
from c2kv.decode import DecodingOptions, decode
from c2kv.errors import ConfigError
from c2kv.evaluation.metrics import f1
from c2kv.library import SegmentLibrary
from c2kv.methods.recompute import prefill
from c2kv.prompt import PromptTemplate
from c2kv.training.loss import Group
from c2kv.training.subject import Subject

_BATCH = 8


@torch.no_grad()
def dev_scores(
    backbone: Backbone,
    subject: Subject,
    template: PromptTemplate,
    groups: Sequence[Group],
    ratios: Sequence[int],
) -> dict[str, float]:
    """Answer NLL in nats a token, with the right documents and with those of another group, and
    the gap between them, at each of `ratios` (named `…_k8` after the first); and F1 (percent) of
    greedy answers at the first, which is the subject's own. Groups hold one question each.

    Raises ConfigError when all groups are over the same documents."""
    scores: dict[str, float] = {}
    for ratio in ratios:
        right = wrong = 0.0
        tokens = 0
        for index, own in enumerate(groups):
            others = [*groups[index + 1 :], *groups[:index]]
            loss, count = subject.total(own, ratio)
            right += loss.item()
            wrong += subject.total(_wrong(own, others), ratio)[0].item()
            tokens += count
        name = "" if ratio == ratios[0] else f"_k{ratio}"
        scores |= {
            f"dev_nll_right{name}": right / tokens,
            f"dev_nll_wrong{name}": wrong / tokens,
            f"dev_gap{name}": (wrong - right) / tokens,
        }
    return {**scores, "dev_f1": _answer_f1(backbone, subject, template, groups)}


def _wrong(own: Group, others: Sequence[Group]) -> Group:
    """A group's question over documents of the next group that are not its own."""
    for other in others:
        foreign = tuple(d for d in other.documents if d not in own.documents)
        if foreign:
            order = tuple(range(len(foreign)))
            return Group(foreign, (replace(own.questions[0], documents=order),))
    raise ConfigError("the dev samples are all over the same documents; use other data, or more")


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
