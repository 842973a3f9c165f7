"""Question answering over several documents: methods and controls on the same cases."""

from __future__ import annotations

import hashlib
import math
import random
import statistics
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from c2kv.composition import Composition
from c2kv.decode import DecodingOptions, decode
from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.errors import C2KVError, ConfigError
from c2kv.evaluation.batches import Rows, in_halves
from c2kv.evaluation.conditions import Condition
from c2kv.evaluation.controls import controlled
from c2kv.evaluation.metrics import f1
from c2kv.evaluation.run import first_line
from c2kv.methods.base import Prefilled
from c2kv.prompt import render_document
from c2kv.training.loss import Question, answer_logits
from c2kv.training.records import Passage, Record


@dataclass(frozen=True)
class Case:
    """One question: its documents, those of another case, and the accepted answers."""

    id: str
    documents: tuple[Document, ...]
    wrong: tuple[Document, ...]
    question: str
    answers: tuple[str, ...]


def make_cases(
    engine: Engine, records: Sequence[Record], limit: int, documents: int = 4, seed: int = 0
) -> list[Case]:
    """`limit` questions drawn from `records`, each with all its gold documents (every one, where
    these are not known) and distractors (its own, else passages of other groups) up to
    `documents`, shuffled."""
    rng = random.Random(seed)
    order = list(records)
    rng.shuffle(order)
    passages = [(r.group, p) for r in records for p in r.documents]
    drawn = []
    for record in order[:limit]:
        gold = list(record.supporting or range(len(record.documents)))  # all, however many
        chosen = [record.documents[i] for i in gold]
        rest = [p for i, p in enumerate(record.documents) if i not in gold]
        rng.shuffle(rest)
        chosen += rest[: max(0, documents - len(chosen))]
        missing = max(0, documents - len(chosen))
        chosen += _others(rng, passages, record.group, chosen, missing)
        rng.shuffle(chosen)
        drawn.append((record, chosen))
    cases: list[Case] = []
    times = Counter[str]()
    for at, (record, chosen) in enumerate(drawn):
        times[record.id] += 1
        name = record.id if times[record.id] == 1 else f"{record.id}#{times[record.id]}"
        wrong = _next_foreign(drawn, at)
        if wrong is None:
            wrong = _others(rng, passages, record.group, chosen, len(chosen))
        own, other = (tuple(_document(engine, p) for p in some) for some in (chosen, wrong))
        cases.append(Case(name, own, other, record.question, record.answers))
    return cases


def _next_foreign(drawn: Sequence[tuple[Record, list[Passage]]], at: int) -> list[Passage] | None:
    """The documents of the next case that shares none with case `at`, nor its group."""
    record, chosen = drawn[at]
    for other, passages in (*drawn[at + 1 :], *drawn[:at]):
        if other.group != record.group and not set(passages) & set(chosen + list(record.documents)):
            return passages
    return None


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
) -> Iterator[list[dict[str, Any]]]:
    """A list of rows for each batch of cases, a row for each case and condition: prediction, F1,
    answer NLL (sum and tokens), KV entries and how they came about; for conditions besides
    `recompute`, when that is among them, KL and top-1 agreement with it along its own answer.

    A case that a condition cannot answer (its prompt is too long, or memory too small) gets a row
    with its `error`; a batch that memory does not hold is answered in halves."""
    options = DecodingOptions.of(engine.backbone, max_new_tokens=max_new_tokens)
    ordered = sorted(conditions, key=lambda c: c.name != "recompute")
    for start in range(0, len(cases), batch):
        some = cases[start : start + batch]
        rows: list[dict[str, Any]] = []
        references: dict[str, tuple[list[int], Tensor]] = {}
        for condition in ordered:
            answer = partial(_answers, engine, condition, options, references)
            rows += in_halves(answer, some, partial(_failed, condition))
        yield rows


def _failed(condition: Condition, case: Case, error: Exception) -> dict[str, Any]:
    return {"id": case.id, "condition": condition.name, "error": first_line(error)}


@dataclass(frozen=True)
class _Ready:
    case: Case
    prefilled: Prefilled
    question: list[int]
    extract: float


def _answers(
    engine: Engine,
    condition: Condition,
    options: DecodingOptions,
    references: dict[str, tuple[list[int], Tensor]],
    cases: Sequence[Case],
) -> Rows:
    """Rows of one condition. `references` (by case: full recompute's answer, and its logits
    along it) is filled by `recompute` and read by the others."""
    rows: Rows = []
    ready: list[_Ready] = []
    for case in cases:
        try:
            ready.append(_prefill(engine, case, condition, options.max_new_tokens))
        except C2KVError as error:
            rows.append(_failed(condition, case, error))
    if not ready:
        return rows
    compositions = [one.prefilled.composition for one in ready]
    asked = [one.question for one in ready]
    decoded, _ = decode(compositions, asked, options)
    nlls = _answer_nll(engine, compositions, asked, [one.case.answers[0] for one in ready])
    fidelity: list[dict[str, float]] = [{} for _ in ready]
    if condition.name == "recompute":
        ids = [d.token_ids or list(options.stop_ids[:1]) for d in decoded]
        along = _logits(engine, compositions, asked, ids)
        references.update(
            (one.case.id, pair)
            for one, pair in zip(ready, zip(ids, along, strict=True), strict=True)
        )
    elif known := [i for i, one in enumerate(ready) if one.case.id in references]:
        pairs = [references[ready[i].case.id] for i in known]
        along = _logits(
            engine,
            [compositions[i] for i in known],
            [asked[i] for i in known],
            [ids for ids, _ in pairs],
        )
        for i, (_, reference), got in zip(known, pairs, along, strict=True):
            fidelity[i] = _fidelity(reference, got)
    decode_text = engine.backbone.tokenizer.decode
    for one, found, (nll, tokens), faithful in zip(ready, decoded, nlls, fidelity, strict=True):
        text = decode_text(found.token_ids, skip_special_tokens=True)
        rows.append(
            {
                "id": one.case.id,
                "condition": condition.name,
                "prompt": _digest(one),
                "prediction": text.strip(),
                "f1": f1(text, one.case.answers),
                "nll": nll,
                "answer_tokens": tokens,
                "finish_reason": found.finish_reason,
                "entries": one.prefilled.composition.entries,
                "batch": len(ready),
                **faithful,
                "cost": {**one.prefilled.cost(), "extract": one.extract},
            }
        )
    return rows


def _prefill(engine: Engine, case: Case, condition: Condition, new_tokens: int) -> _Ready:
    """What the method keeps is made before, as in serving. Raises C2KVError when the case cannot
    be put in front of the model."""
    documents, method = controlled(engine, condition, case.documents, case.wrong)
    (question,), _ = engine.check([case.question], documents, max_new_tokens=new_tokens)
    before = engine.extract(documents, method).extract_seconds
    got = engine.prefill(documents, method)
    return _Ready(case, got, question, before + got.extract)


def _digest(one: _Ready) -> str:
    """SHA-256 (shortened) of the prompt's token ids."""
    ids = [*one.prefilled.composition.token_ids, *one.question]
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()[:16]


def _logits(
    engine: Engine,
    compositions: Sequence[Composition],
    asked: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Logits along given answers [answer tokens, vocab], each."""
    with torch.no_grad():
        rows = [(c.kv(), c.question_position) for c in compositions]
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
        (
            F.cross_entropy(
                one.float(), torch.tensor(i, device=one.device), reduction="sum"
            ).item(),
            len(i),
        )
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
    """Means by condition: F1 (percent), F1 above the same method's from wrong documents, case by
    case (each with its margin, half of a 95 % interval), NLL per answer token, entries, KL and
    top-1 agreement; and how many cases were scored, and failed. Failed ones enter no mean."""
    summary = {}
    by: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by.setdefault(row["condition"], []).append(row)
    for condition, every in by.items():
        some = [row for row in every if "error" not in row]
        means: dict[str, float] = {"scored": len(some), "failed": len(every) - len(some)}
        if some:
            means |= _with_margin("f1", [r["f1"] for r in some])
            means["nll"] = sum(r["nll"] for r in some) / sum(r["answer_tokens"] for r in some)
            means["entries"] = sum(r["entries"] for r in some) / len(some)
        for name in ("kl", "top1"):
            values = [r[name] for r in some if name in r]
            if values:
                means[name] = sum(values) / len(values)
        wrong = {r["id"]: r["f1"] for r in by.get(_wrong(condition), ()) if "error" not in r}
        gaps = [r["f1"] - wrong[r["id"]] for r in some if r["id"] in wrong]
        if gaps:
            means |= _with_margin("over_wrongdoc", gaps)
        summary[condition] = means
    return summary


def _wrong(condition: str) -> str:
    """The condition that asks a method with wrong documents; none for a control."""
    return {"c2kv": "wrongdoc"}.get(condition, f"wrongdoc:{condition}")


def _with_margin(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean in percent, and where there are several, half of its 95 % interval."""
    percent = [100 * value for value in values]
    means = {name: statistics.mean(percent)}
    if len(percent) > 1:
        means[f"{name}_margin"] = 1.96 * statistics.stdev(percent) / math.sqrt(len(percent))
    return means
