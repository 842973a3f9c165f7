"""The training loss: answers read from independently extracted, concatenated documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from c2kv.backbone import Backbone
from c2kv.composition import Placement
from c2kv.extractor import Extractor, extract
from c2kv.methods.recompute import prefill
from c2kv.rotary import rotate

PADDING = 1.25


@dataclass(frozen=True)
class Question:
    """One question over some of a group's documents, in this order. Token ids throughout."""

    prefix: tuple[int, ...]
    documents: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Questions that share documents: these are extracted once, with one backward through."""

    documents: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]


def group_loss(
    backbone: Backbone,
    extractor: Extractor,
    group: Group,
    ratio: int | None = None,
    distill: float = 0.0,
    gradient_checkpointing: bool = False,
    padding: float = PADDING,
) -> tuple[Tensor, int]:
    """Sum over answer tokens of next-token cross-entropy (scalar), and their number.

    Documents are extracted alone and concatenated behind each question's prefix (anchors: each
    question's documents together); gradients reach the extractor only. The same as the questions
    one at a time. `distill` (0 to 1) is the share of the loss that is KL(full recompute || C2KV)
    on the same tokens instead. `gradient_checkpointing` is that of `extract`; its batches hold at
    most `padding` padded tokens per real one."""
    ratio = extractor.config.ratio if ratio is None else ratio
    if extractor.config.variant == "anchor":
        group = _joined(group)
    kvs: dict[int, Tensor] = {}
    for batch in _batches(group.documents, padding):
        some = [group.documents[i] for i in batch]
        got = extract(backbone, extractor, some, ratio, gradient_checkpointing)
        kvs.update(zip(batch, got, strict=True))
    rows = []
    for q in group.questions:
        rows.append(compose(backbone, prefix_kv(backbone, q.prefix), kvs, group, q, ratio))
    logits, targets = answer_logits(backbone, rows, group.questions)
    loss = F.cross_entropy(logits.float(), targets, reduction="sum")
    if distill:
        with torch.no_grad():
            teacher = recomputed_logits(backbone, group)[0].float().log_softmax(-1)
        student = logits.float().log_softmax(-1)
        kl = F.kl_div(student, teacher, log_target=True, reduction="sum")
        loss = (1 - distill) * loss + distill * kl
    return loss, len(targets)


def recomputed_logits(backbone: Backbone, group: Group) -> tuple[Tensor, Tensor]:
    """Full recompute's logits that predict each answer token [answer tokens, vocab], and those
    tokens."""
    empty = torch.empty(
        backbone.num_layers,
        2,
        backbone.num_kv_heads,
        0,
        backbone.head_dim,
        dtype=backbone.dtype,
        device=backbone.device,
    )
    whole = []
    for q in group.questions:
        source = (token for index in q.documents for token in group.documents[index])
        whole.append(replace(q, question=(*q.prefix, *source, *q.question)))
    return answer_logits(backbone, [(empty, 0)] * len(whole), whole)


def _joined(group: Group) -> Group:
    """Each question over one document, all of its own in a row: an anchor compresses an input."""
    whole, questions = [], []
    for number, q in enumerate(group.questions):
        whole.append(tuple(token for index in q.documents for token in group.documents[index]))
        questions.append(replace(q, documents=(number,)))
    return Group(tuple(whole), tuple(questions))


def _batches(documents: Sequence[Sequence[int]], padding: float) -> list[list[int]]:
    """Indices of documents of like lengths, so that little is padded."""
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(documents)), key=lambda i: len(documents[i])):
        batch, longest = batches[-1], len(documents[index])
        real = sum(len(documents[i]) for i in batch) + longest
        if batch and longest * (len(batch) + 1) > padding * real:
            batches.append([index])
        else:
            batch.append(index)
    return batches


@lru_cache(maxsize=16)  # the prefixes are a small pool
def prefix_kv(backbone: Backbone, ids: tuple[int, ...]) -> Tensor:
    """KV of a prompt's prefix [layers, 2, kv_heads, n, head_dim], kept for the next question."""
    return prefill(backbone, ids).prefix.clone()  # out of inference mode


def compose(
    backbone: Backbone,
    prefix: Tensor,
    kvs: Mapping[int, Tensor],
    group: Group,
    question: Question,
    ratio: int,
) -> tuple[Tensor, int]:
    """A question's documents (`kvs` before RoPE, by number) behind a rotated prefix: KV
    [layers, 2, kv_heads, entries, head_dim], and the question's position. Differentiable."""
    parts, offset = [prefix], len(question.prefix)
    for index in question.documents:
        span = len(group.documents[index])
        parts.append(placed(backbone, kvs[index], offset, span, ratio))
        offset += span
    return torch.cat(parts, dim=3), offset


def placed(backbone: Backbone, kv: Tensor, offset: int, span: int, ratio: int) -> Tensor:
    """A document's KV with its keys rotated to where it stands. Differentiable."""
    at = Placement(offset, span, ratio, 0, kv.shape[3])
    cos, sin = backbone.cos_sin(at.positions())
    return torch.stack((rotate(kv[:, 0], cos, sin), kv[:, 1]), dim=1)


def answer_logits(
    backbone: Backbone, rows: Sequence[tuple[Tensor, int]], questions: Sequence[Question]
) -> tuple[Tensor, Tensor]:
    """Logits that predict each answer token [answer tokens, vocab], and those tokens, for rows
    of (KV, question position) run as one batch: KV padded on the left, tokens on the right."""
    device = backbone.device
    entries = max(kv.shape[3] for kv, _ in rows)
    tails = [(*q.question, *q.answer) for q in questions]
    width = max(map(len, tails)) - 1  # the last answer token predicts nothing
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.ones(len(rows), entries + width, dtype=torch.long)
    where: list[tuple[int, int]] = []
    targets: list[int] = []
    padded = []
    for row, ((kv, position), q, tail) in enumerate(zip(rows, questions, tails, strict=True)):
        tokens[row, : len(tail) - 1] = torch.tensor(tail[:-1])
        positions[row] = position + torch.arange(width)
        missing = entries - kv.shape[3]
        mask[row, :missing] = 0
        padded.append(F.pad(kv, (0, 0, missing, 0)))
        first = len(q.question) - 1
        where += [(row, column) for column in range(first, first + len(q.answer))]
        targets += q.answer
    cache = DynamicCache(config=backbone.config)
    for index, layer in enumerate(torch.stack(padded, dim=2)):
        cache.update(layer[0], layer[1], index)
    hidden = backbone.hidden(tokens.to(device), positions.to(device), cache, mask.to(device))
    at = torch.tensor(where, device=device)
    logits = backbone.model.lm_head(hidden[at[:, 0], at[:, 1]])
    return logits, torch.tensor(targets, device=device)
