"""Question answering over several documents: methods and controls on the same cases."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from c2kv.composition import Composition
from c2kv.decode import DecodingOptions, decode
from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.errors import ConfigError
from c2kv.evaluation.conditions import Condition
from c2kv.evaluation.metrics import f1
from c2kv.prompt import render_document, render_question
from c2kv.training.loss import Question, answer_logits
from c2kv.training.records import Passage, Record


@dataclass(frozen=True)
class Case:
    """One question: its documents, another case's, and the accepted answers."""

    id: str
    documents: tuple[Document, ...]
    wrong: tuple[Document, ...]
    question: str
    answers: tuple[str, ...]


def make_cases(
    engine: Engine, records: Sequence[Record], limit: int, documents: int = 4, seed: int = 0
) -> list[Case]:
    """`limit` questions drawn from `records`, each with its gold documents and distractors (its
    own, else passages of other groups) up to `documents`, shuffled."""
    rng = random.Random(seed)
    order = list(records)
    rng.shuffle(order)
    passages = [(r.group, p) for r in records for p in r.documents]
    cases = []
    for record in order[:limit]:
        gold = list(record.supporting or range(len(record.documents)))[:documents]
        chosen = [record.documents[i] for i in gold]
        rest = [p for i, p in enumerate(record.documents) if i not in gold]
        rng.shuffle(rest)
        chosen += rest[: documents - len(chosen)]
        chosen += _others(rng, passages, record.group, chosen, documents - len(chosen))
        rng.shuffle(chosen)
        wrong = _others(rng, passages, record.group, chosen, len(chosen))
        own, other = (tuple(_document(engine, p) for p in some) for some in (chosen, wrong))
        cases.append(Case(record.id, own, other, record.question, record.answers))
    return cases


def _others(
    rng: random.Random,
    passages: Sequence[tuple[str, Passage]],
    group: str,
    taken: Sequence[Passage],
    count: int,
) -> list[Passage]:
    """`count` passages of other groups, none of them taken, none twice."""
    found: list[Passage] = []
    for _ in range(50 * count + 1):
        if len(found) == count:
            return found
        other, passage = rng.choice(passages)
        if other != group and passage not in taken and passage not in found:
            found.append(passage)
    raise ConfigError(
        f"the records hold too few passages of other groups than '{group}' to draw {count}; "
        "use more records or fewer documents a question"
    )


def _document(engine: Engine, passage: Passage) -> Document:
    return engine.document(render_document(passage.text, passage.title), passage.title or "")


def evaluate(
    engine: Engine,
    cases: Sequence[Case],
    conditions: Sequence[Condition],
    max_new_tokens: int = 32,
    batch: int = 8,
    progress: Callable[[int], None] = lambda cases: None,
) -> Iterator[dict[str, Any]]:
    """One dict a case and condition: prediction, F1, answer NLL (sum and tokens), KV entries; for
    conditions besides `recompute`, when that is among them, KL and top-1 agreement with it along
    its own answer."""
    options = DecodingOptions.of(engine.backbone, max_new_tokens=max_new_tokens)
    for start in range(0, len(cases), batch):
        some = cases[start : start + batch]
        asked = [engine.template.question_ids(render_question(c.question)) for c in some]
        reference: list[tuple[list[int], Tensor]] | None = None
        for condition in sorted(conditions, key=lambda c: c.name != "recompute"):
            compositions = [_compose(engine, case, condition) for case in some]
            decoded, _ = decode(compositions, asked, options)
            nlls = _answer_nll(engine, compositions, asked, [c.answers[0] for c in some])
            fidelity: list[dict[str, float]] = [{} for _ in some]
            if condition.name == "recompute":
                ids = [d.token_ids or list(options.stop_ids[:1]) for d in decoded]
                reference = list(zip(ids, _logits(engine, compositions, asked, ids), strict=True))
            elif reference is not None:
                logits = _logits(engine, compositions, asked, [ids for ids, _ in reference])
                fidelity = [_fidelity(r, g) for (_, r), g in zip(reference, logits, strict=True)]
            for case, composition, answer, (nll, tokens), faithful in zip(
                some, compositions, decoded, nlls, fidelity, strict=True
            ):
                text = engine.backbone.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
                yield {
                    "id": case.id,
                    "condition": condition.name,
                    "prediction": text.strip(),
                    "f1": f1(text, case.answers),
                    "nll": nll,
                    "answer_tokens": tokens,
                    "entries": composition.entries,
                    **faithful,
                }
        progress(len(some))


def _compose(engine: Engine, case: Case, condition: Condition) -> Composition:
    documents, method = case.documents, condition.method
    if condition.control == "wrongdoc":
        documents = case.wrong
    elif condition.control == "shuffled":
        documents = documents[::-1]
    elif condition.control == "budget":
        ratio, method = engine.method(method).ratio, "recompute"
        documents = tuple(_cut(document, ratio) for document in documents)
    elif condition.control == "noctx":
        documents, method = (), "recompute"
    return engine.prefill(documents, method).composition


def _cut(document: Document, ratio: int) -> Document:
    """As many tokens of each piece as an extractor keeps entries."""
    return replace(document, pieces=tuple(p[: -(-len(p) // ratio)] for p in document.pieces))


def _logits(
    engine: Engine,
    compositions: Sequence[Composition],
    asked: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Logits along given answers [answer tokens, vocab], each."""
    with torch.no_grad():
        rows = [(c.open(0).arena[:, :, 0], c.question_position) for c in compositions]
        questions = [
            Question((), (), tuple(q), tuple(a)) for q, a in zip(asked, answers, strict=True)
        ]
        logits, _ = answer_logits(engine.backbone, rows, questions)
    return list(logits.split([len(answer) for answer in answers]))


def _answer_nll(
    engine: Engine,
    compositions: Sequence[Composition],
    asked: Sequence[Sequence[int]],
    answers: Sequence[str],
) -> list[tuple[float, int]]:
    """Negative log likelihood of each answer and its end token (nats, summed), and its tokens."""
    tokenizer = engine.backbone.tokenizer
    ids = [
        [*tokenizer(a, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for a in answers
    ]
    logits = _logits(engine, compositions, asked, ids)
    return [
        (F.cross_entropy(one.float(), torch.tensor(i), reduction="sum").item(), len(i))
        for one, i in zip(logits, ids, strict=True)
    ]


def _fidelity(reference: Tensor, got: Tensor) -> dict[str, float]:
    """KL(full recompute || method) in nats a token, and how often their likeliest tokens agree."""
    p, q = (t.float().log_softmax(-1) for t in (reference, got))
    return {
        "kl": F.kl_div(q, p, log_target=True, reduction="batchmean").item(),
        "top1": (p.argmax(-1) == q.argmax(-1)).float().mean().item(),
    }


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means by condition: F1 (percent), NLL per answer token, entries, KL and top-1 agreement."""
    summary = {}
    for condition in dict.fromkeys(row["condition"] for row in rows):
        some = [row for row in rows if row["condition"] == condition]
        means = {
            "f1": 100 * sum(r["f1"] for r in some) / len(some),
            "nll": sum(r["nll"] for r in some) / sum(r["answer_tokens"] for r in some),
            "entries": sum(r["entries"] for r in some) / len(some),
        }
        for name in ("kl", "top1"):
            values = [r[name] for r in some if name in r]
            if values:
                means[name] = sum(values) / len(values)
        summary[condition] = means
    return summary
