"""What a request costs by each method: time to first token and its parts, bytes, memory.

TTFT is the paper's: from the request to the documents' KV complete in a cache, ready for the
question. Cold: nothing was stored; memory, disk: what the method keeps was made before. Methods
take turns, so that a slow moment hits all of them.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import statistics
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from c2kv.decode import DecodingOptions, decode
from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.errors import C2KVError, ConfigError
from c2kv.evaluation.batches import out_of_memory
from c2kv.evaluation.memory import peak_bytes
from c2kv.evaluation.run import first_line

SOURCES = ("nowhere", "memory", "disk")
_QUESTION_TOKENS, _DECODED, _WARM_UP = 32, 17, 512


@dataclass(frozen=True)
class Spread:
    """Median, least and most of several measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Cost:
    """One method on one prompt. Seconds, but for bytes and tokens a second.

    ready: TTFT from memory; load (into host memory), blend, compose (onto the device, rotated,
    copied): its parts (medians); cold: TTFT with nothing
    stored, extraction included; disk: TTFT from the store; question: the question's pass, after
    TTFT, and decode_tokens_per_second what follows (medians); peak_bytes: memory above what was
    held before, through one answer (None where it cannot be measured); break_even: requests after
    which preparing once has paid off against full recompute (None: never, or cold requests were
    not measured); stored_bytes: on disk (of KV alone without a store); speedup: over full recompute
    (None where that failed)."""

    method: str
    documents: int
    source_tokens: int
    entries: int
    ready: Spread
    load: float
    blend: float
    compose: float
    cold: Spread | None
    disk: Spread | None
    question: float
    decode_tokens_per_second: float
    peak_bytes: int | None
    stored_bytes: int
    loaded_bytes: int
    recomputed: int
    speedup: float | None = None
    break_even: float | None = None


def random_documents(engine: Engine, tokens: int, count: int, seed: int = 0) -> list[Document]:
    """`count` documents of random tokens, `tokens` in all, cut into segments. Calls that differ
    in anything share no segment."""
    mixed = hashlib.sha256(f"{tokens}/{count}/{seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "big"))
    vocabulary = engine.backbone.embed_tokens.weight.shape[0]
    documents = []
    for index in range(count):
        length = tokens * (index + 1) // count - tokens * index // count
        ids = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        step = engine.segment_tokens
        pieces = tuple(tuple(ids[at : at + step]) for at in range(0, length, step))
        documents.append(Document(f"random {seed}.{index}", pieces, engine.backbone.digest))
    return documents


def measure(
    engine: Engine,
    methods: Sequence[str],
    tokens: int,
    count: int,
    repeats: int = 3,
    cold: bool = True,
    progress: Callable[[], object] = lambda: None,
) -> tuple[list[Cost], dict[str, str]]:
    """The cost of each method on the same documents, and why others failed, by name; speedups are
    against `recompute`, which must be among them. cold: also request what was never stored, which
    takes longest.

    Raises ConfigError without `recompute`, or when tokens are too few."""
    if "recompute" not in methods:
        raise ConfigError("speedups are against full recompute; add recompute to the methods")
    if tokens < count:
        raise ConfigError(f"{tokens} tokens make no {count} documents; use more tokens")
    documents = random_documents(engine, tokens, count)
    failed: dict[str, str] = {}

    @contextlib.contextmanager
    def attempting(method: str) -> Iterator[None]:
        """A method that fails has no more turns; the others go on."""
        try:
            yield
        except (C2KVError, RuntimeError) as error:
            if not (isinstance(error, C2KVError) or out_of_memory(error)):
                raise
            failed[method] = first_line(error)

    for method in methods:  # unmeasured: what a first pass sets up
        small = random_documents(engine, max(count, min(tokens, _WARM_UP)), count, _unseen())
        with attempting(method):
            _request(engine, small, method, "nowhere")
    runs = {(source, m): list[dict[str, Any]]() for source in SOURCES for m in methods}

    store = engine.libraries.store
    before = set() if store is None else {entry.key for entry in store.entries()}

    def turn(source: str, method: str) -> None:
        asked = documents
        if source == "nowhere":
            asked = random_documents(engine, tokens, count, _unseen())
        if source != "memory":
            engine.forget()
        with attempting(method):
            runs[source, method].append(_request(engine, asked, method, source))
        if source == "nowhere" and store is not None:  # nothing reads it again
            for entry in store.entries():
                if entry.key not in before:
                    store.remove(entry.key)

    def take_turns(source: str, methods: Sequence[str] = methods) -> None:
        for _ in range(repeats):
            for method in methods:
                if method not in failed:
                    turn(source, method)
                progress()

    if cold:
        take_turns("nowhere")
    engine.forget()
    stored = dict.fromkeys(methods, 0)
    for method in methods:
        if method in failed:
            continue
        with attempting(method):
            stored[method] = _stored_bytes(engine, documents, method)
    take_turns("memory")
    if store is not None:
        take_turns("disk", [method for method in methods if stored[method]])
        for method in methods:
            if not stored[method]:  # nothing is read: as from memory
                runs["disk", method] = runs["memory", method]
                for _ in range(repeats):
                    progress()
    costs = {}
    for method in methods:
        peak = None
        if method not in failed:
            with attempting(method):
                peak = _peak_bytes(engine, documents, method)
        progress()
        if method in failed:
            continue
        warm = runs["memory", method]
        parts = {name: Spread.of([run[name] for run in warm]).median for name in _PARTS}
        ready = {
            source: Spread.of([run["ready"] for run in some])
            for source in SOURCES
            if (some := runs[source, method])
        }
        costs[method] = Cost(
            method=method,
            documents=count,
            source_tokens=tokens,
            entries=warm[0]["entries"],
            ready=ready["memory"],
            **parts,
            cold=ready.get("nowhere"),
            disk=ready.get("disk"),
            peak_bytes=peak,
            stored_bytes=stored[method],
            loaded_bytes=warm[0]["loaded_bytes"],
            recomputed=warm[0]["recomputed"],
        )
    if "recompute" in costs:
        full = costs["recompute"].ready.median
        costs = {method: _compared(cost, full) for method, cost in costs.items()}
    return list(costs.values()), failed


def _unseen() -> int:
    """A seed of documents never seen before."""
    return uuid.uuid4().int


_PARTS = ("load", "blend", "compose", "question", "decode_tokens_per_second")


def _compared(cost: Cost, full: float) -> Cost:
    """With its speedup, and the requests after which it has paid off."""
    saved = full - cost.ready.median
    once = max(0.0, cost.cold.median - cost.ready.median) if cost.cold else None
    paid = once / saved if once is not None and saved > 0 else None
    return replace(cost, speedup=full / cost.ready.median, break_even=paid)


def _request(
    engine: Engine, documents: Sequence[Document], method: str, source: str
) -> dict[str, Any]:
    """The parts of one request. Raises ConfigError when what the method keeps was not in `source`
    (memory, disk, or nowhere yet)."""
    gc.collect()
    got = engine.prefill(documents, method)
    came = {"memory": got.from_memory, "disk": got.from_disk, "nowhere": got.extracted}
    if sum(came.values()) != came[source]:
        raise ConfigError(
            f"method '{method}' should have found its segments in {source}, but {got.from_memory} "
            f"came from memory, {got.from_disk} from disk and {got.extracted} were made; give "
            "segments more --memory"
        )
    options = DecodingOptions(max_new_tokens=_DECODED)
    _, times = decode(got.composition, [[0] * _QUESTION_TOKENS], options)
    return {
        "ready": got.seconds + times.compose,
        "load": got.load,
        "blend": got.blend,
        "compose": got.place + times.compose,
        "question": times.question,
        "decode_tokens_per_second": times.step_tokens / times.steps,
        "entries": got.composition.entries,
        "loaded_bytes": got.loaded_bytes,
        "recomputed": got.recomputed,
    }


def _stored_bytes(engine: Engine, documents: Sequence[Document], method: str) -> int:
    """Bytes of what the method keeps of the documents, which is made if it is not there yet."""
    kept, store = engine.extract(documents, method), engine.libraries.store
    if store is None:
        return kept.nbytes
    keys = {segment.key for segment in kept.segments}
    return sum(entry.nbytes for entry in store.entries() if entry.key in keys)


def _peak_bytes(engine: Engine, documents: Sequence[Document], method: str) -> int | None:
    """The most memory that an answer takes, from the request on, with what the method keeps in
    memory before."""
    engine.extract(documents, method)
    with peak_bytes(engine.backbone.device) as peak:
        got = engine.prefill(documents, method)
        decode(got.composition, [[0] * _QUESTION_TOKENS], DecodingOptions(max_new_tokens=2))
    return peak()
