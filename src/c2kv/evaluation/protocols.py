"""How a LongBench sample is put in front of a model, by one of two protocols, never mixed.

`official`: the published prompt in one piece, cut in the middle when it is too long; only full
recompute makes sense of it. `paper`: the context split into documents that methods may reuse, the
task asked in a message of its own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from c2kv.composition import check_positions
from c2kv.decode import DecodingOptions, decode
from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.errors import C2KVError, ConfigError, DocumentError
from c2kv.evaluation.batches import Rows, in_halves
from c2kv.evaluation.conditions import Condition
from c2kv.evaluation.controls import controlled
from c2kv.evaluation.longbench import (
    group_texts,
    official_prompt,
    score,
    split_documents,
    task,
)
from c2kv.evaluation.run import first_line
from c2kv.methods.base import Prefilled
from c2kv.methods.recompute import prefill

PROTOCOLS = ("official", "paper")


def check_protocol(protocol: str, methods: Sequence[str]) -> None:
    """Raises ConfigError for methods that a protocol has no place for."""
    if protocol not in PROTOCOLS:
        raise ConfigError(f"protocol '{protocol}' is unknown; use {' or '.join(PROTOCOLS)}")
    if protocol == "official" and set(methods) != {"recompute"}:
        raise ConfigError(
            "the official protocol is one prompt without documents to reuse: only recompute; use "
            "--protocol paper to compare methods"
        )


@dataclass(frozen=True)
class _Asked:
    """A sample in front of the model: only its answer is missing. extract: seconds before the
    request, for what the method keeps."""

    record: dict[str, Any]
    prefilled: Prefilled
    question: Sequence[int]
    cut_tokens: int
    extract: float = 0.0


def answer_official(
    engine: Engine, name: str, records: Sequence[dict[str, Any]], max_length: int | None = None
) -> Rows:
    """Rows of full recompute on the official prompts, answered as one batch. max_length: the most
    tokens of a prompt before the chat template (default: what the model's positions leave).

    A sample that fails has a row with its `error`; the others are answered all the same."""
    ask = partial(_official, engine, name, max_length=max_length)
    return _answers(engine, name, "recompute", [(one, partial(ask, one)) for one in records])


def _official(engine: Engine, name: str, record: dict[str, Any], max_length: int | None) -> _Asked:
    this, backbone, tokenizer = task(name), engine.backbone, engine.backbone.tokenizer
    if max_length is None:
        max_length = backbone.max_positions - this.max_new_tokens - _TEMPLATE_TOKENS
    prompt, cut = middle_cut(tokenizer, official_prompt(name, record), max_length)
    if this.few_shot or not getattr(tokenizer, "chat_template", None):
        ids = tokenizer(prompt).input_ids
    else:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        ids = tokenizer(text, add_special_tokens=False).input_ids
    start = backbone.now()
    composition = prefill(backbone, ids[:-1], room=1 + this.max_new_tokens)
    work = composition.entries * backbone.num_layers
    got = Prefilled(composition, recomputed=work, blend=backbone.now() - start)
    return _Asked(record, got, ids[-1:], cut)


# Kept free for what chat templates put around one message.
_TEMPLATE_TOKENS = 64


def middle_cut(tokenizer: Any, prompt: str, max_length: int) -> tuple[str, int]:
    """The first and last half of `max_length` tokens of a longer prompt, as the official script
    cuts it, and how many tokens that left out."""
    ids = tokenizer(prompt).input_ids
    if len(ids) <= max_length:
        return prompt, 0
    half = max_length // 2
    ends = (ids[:half], ids[-half:])
    text = "".join(tokenizer.decode(end, skip_special_tokens=True) for end in ends)
    return text, len(ids) - 2 * half


def paper_documents(engine: Engine, name: str, record: dict[str, Any]) -> list[Document]:
    """A sample's context as documents: at its passages, or at paragraphs grouped to the size of
    a segment. Raises DocumentError when there is nothing to read in it."""
    texts = split_documents(name, record["context"])
    if not texts:
        raise DocumentError(f"sample '{record['_id']}' of {name} has an empty context")
    if task(name).split is None or task(name).metric == "classification":
        tokenize = partial(engine.backbone.tokenizer, add_special_tokens=False)
        ids = tokenize(texts).input_ids
        framing = len(engine.template.document_ids("x")) - 1
        joint = len(tokenize("x\n\nx").input_ids) - 2 * len(tokenize("x").input_ids)
        room = engine.segment_tokens - framing
        texts = group_texts(texts, [len(i) for i in ids], room, joint)
    return [engine.document(text, f"{name} {i}") for i, text in enumerate(texts, 1)]


@dataclass(frozen=True)
class _Sample:
    """A record as documents, of at most `room` tokens. other: the record whose documents are the
    wrong ones, where a control asks for them."""

    record: dict[str, Any]
    other: dict[str, Any] | None
    documents: Sequence[Document]
    room: int
    question: Sequence[int]
    cut_tokens: int


def answer_paper(
    engine: Engine,
    name: str,
    records: Sequence[dict[str, Any]],
    conditions: Sequence[Condition],
    others: Sequence[dict[str, Any]] = (),
) -> Rows:
    """A row for each condition and record, the records answered as one batch. What a method keeps
    of the documents is made before, as in serving. others: for each record, the one whose
    documents are its wrong ones.

    A sample that fails under a condition (its KV does not fit, say) has a row with its `error`;
    all else is answered all the same. Raises ConfigError when a control lacks `others`."""
    has_wrongdoc = any(condition.control == "wrongdoc" for condition in conditions)
    if has_wrongdoc and not others:
        raise ConfigError(f"wrongdoc needs two samples of {name}; use a larger --limit")
    rows, samples = [], []
    for record, other in zip(
        records, others if has_wrongdoc else [None] * len(records), strict=True
    ):
        try:
            samples.append(_sample(engine, name, record, other))
        except C2KVError as error:
            rows += [_failed(record, condition.name, error) for condition in conditions]
    for condition in conditions:
        asking = [(one.record, partial(_reused, engine, name, condition, one)) for one in samples]
        rows += _answers(engine, name, condition.name, asking)
    return rows


def _sample(
    engine: Engine, name: str, record: dict[str, Any], other: dict[str, Any] | None
) -> _Sample:
    """Raises DocumentError for a record without documents."""
    content = task(name).question.format(input=record["input"])
    question = engine.template.question_ids(content)
    room = engine.backbone.max_positions - len(question) - task(name).max_new_tokens
    room -= len(engine.template.prefix_ids())
    documents, cut = fit(paper_documents(engine, name, record), room)
    return _Sample(record, other, documents, room, question, cut)


def _reused(engine: Engine, name: str, condition: Condition, sample: _Sample) -> _Asked:
    """Raises ConfigError when memory does not hold what was made, DocumentError for another
    sample without documents."""
    wrong: Sequence[Document] = ()
    if condition.control == "wrongdoc" and sample.other is not None:
        wrong, _ = fit(paper_documents(engine, name, sample.other), sample.room)
    documents, method = controlled(engine, condition, sample.documents, wrong)
    prepared = engine.extract(documents, method)
    got = engine.prefill(documents, method)
    if got.extracted or got.from_disk:
        raise ConfigError(
            f"method '{method}' keeps more of these documents than memory may hold; give "
            "segments more --memory"
        )
    seconds = prepared.extract_seconds
    return _Asked(sample.record, got, sample.question, sample.cut_tokens, seconds)


def fit(documents: Sequence[Document], room: int) -> tuple[list[Document], int]:
    """Documents of at most `room` tokens, whole pieces left out in the middle, and how many
    tokens that were. Raises DocumentError when that leaves nothing."""
    total = sum(document.tokens for document in documents)
    if total <= room:
        return list(documents), 0
    pieces = [(d, piece) for d in documents for piece in d.pieces]
    start, stop, front, back = 0, len(pieces), 0, 0
    while start < stop:  # the shorter end grows, while it can
        first, last = len(pieces[start][1]), len(pieces[stop - 1][1])
        if front + back + min(first, last) > room:
            break
        if front + back + first <= room and (front <= back or front + back + last > room):
            front, start = front + first, start + 1
        else:
            back, stop = back + last, stop - 1
    kept = pieces[:start] + pieces[stop:]
    if not kept:
        raise DocumentError(
            f"no piece of the documents fits into {room} tokens; use a lower --segment-tokens"
        )
    used = front + back
    whole = [(d, [piece for _, piece in some]) for d, some in groupby(kept, key=lambda one: one[0])]
    return [replace(d, pieces=tuple(some)) for d, some in whole], total - used


def _answers(
    engine: Engine,
    name: str,
    condition: str,
    asking: Sequence[tuple[dict[str, Any], Callable[[], _Asked]]],
) -> Rows:
    """A row for each record, put in front of the model by the function beside it."""

    def answer(some: Sequence[tuple[dict[str, Any], Callable[[], _Asked]]]) -> Rows:
        rows: Rows = []
        asked: list[_Asked] = []
        for record, ask in some:
            try:
                one = ask()
                end = len(one.question) + task(name).max_new_tokens
                check_positions(engine.backbone, one.prefilled.composition.question_position, end)
                asked.append(one)
            except C2KVError as error:
                rows.append(_failed(record, condition, error))
        return rows + (_decode(engine, name, condition, asked) if asked else [])

    return in_halves(answer, asking, lambda one, error: _failed(one[0], condition, error))


def _failed(record: dict[str, Any], condition: str, error: Exception) -> dict[str, Any]:
    return {"id": record["_id"], "condition": condition, "error": first_line(error)}


def _decode(engine: Engine, name: str, condition: str, asked: Sequence[_Asked]) -> Rows:
    """Answer greedily and score. `ttft` and `question` are of each sample alone, whatever the
    batch: up to the question, and the question's pass."""
    tokenizer, this = engine.backbone.tokenizer, task(name)
    options = DecodingOptions.of(engine.backbone, max_new_tokens=this.max_new_tokens)
    if name == "samsum":  # the official script ends it at a newline, after a token at least
        newline = tokenizer("\n", add_special_tokens=False).input_ids[-1]
        stop = (*options.stop_ids, newline)
        options = replace(options, stop_ids=stop, min_new_tokens=1)
    compositions = [one.prefilled.composition for one in asked]
    questions = [one.question for one in asked]
    if len(asked) == 1:
        decoded, took_alone = decode(compositions, questions, options)
        times = [took_alone]
    else:
        first = replace(options, max_new_tokens=1)
        times = [decode(c, [q], first)[1] for c, q in zip(compositions, questions, strict=True)]
        decoded, _ = decode(compositions, questions, options)
    rows = []
    for one, found, took in zip(asked, decoded, times, strict=True):
        text = tokenizer.decode(found.token_ids, skip_special_tokens=True)
        composition = one.prefilled.composition
        ids = [*composition.token_ids, *one.question]
        rows.append(
            {
                "id": one.record["_id"],
                "condition": condition,
                "prompt": hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()[:16],
                "prediction": text,
                "score": score(name, text, one.record),
                "finish_reason": found.finish_reason,
                "source_tokens": composition.question_position,
                "entries": composition.entries,
                "cut_tokens": one.cut_tokens,
                "batch": len(asked),
                "cost": {**one.prefilled.cost(), "extract": one.extract},
                "ttft": one.prefilled.seconds + took.compose,
                "question": took.question,
            }
        )
    return rows
