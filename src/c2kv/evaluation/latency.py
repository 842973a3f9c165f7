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
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from c2kv.decode import DecodingOptions, decode
from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.errors import ConfigError

_QUESTION_TOKENS, _DECODED = 32, 17


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

    ready: TTFT from memory; load, blend, compose: its parts (medians); cold: TTFT with nothing
    stored, extraction included; disk: TTFT from the store; question: the question's pass, after
    TTFT; peak_bytes: memory above what was held before, through a whole answer (None where it
    cannot be measured); break_even: requests after which preparing once has paid off against full
    recompute (None: never)."""

    method: str
    documents: int
    source_tokens: int
    entries: int
    ready: Spread
    load: float
    blend: float
    compose: float
    cold: float
    disk: Spread | None
    question: float
    decode_tokens_per_second: float
    peak_bytes: int | None
    stored_bytes: int
    loaded_bytes: int
    recomputed: int
    speedup: float = field(default=1.0)
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
    repeats: int = 5,
    progress: Callable[[], object] = lambda: None,
) -> list[Cost]:
    """The cost of each method on the same documents; speedups are against `recompute`, which must
    be among them. Raises ConfigError when it is not, or when tokens are too few."""
    if "recompute" not in methods:
        raise ConfigError("speedups are against full recompute; add recompute to the methods")
    if tokens < count:
        raise ConfigError(f"{tokens} tokens make no {count} documents; use more tokens")
    documents = random_documents(engine, tokens, count)
    cold: dict[str, float] = {}
    for method in methods:
        fresh = random_documents(engine, tokens, count, uuid.uuid4().int)  # never seen before
        cold[method] = _request(engine, fresh, method, "nowhere")["ready"]
        engine.forget()
        progress()
    stored = {method: engine.extract(documents, method).nbytes for method in methods}
    runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method in methods:
            runs[method].append(_request(engine, documents, method, "memory"))
            progress()
    disk: dict[str, list[float]] = {method: [] for method in methods}
    if engine.libraries.store is not None:
        for _ in range(repeats):
            for method in methods:
                engine.forget()
                disk[method].append(_request(engine, documents, method, "disk")["ready"])
                progress()
    costs = {}
    for method in methods:
        parts = {k: Spread.of([run[k] for run in runs[method]]).median for k in _PARTS}
        rate, peak = _answer(engine, documents, method)
        costs[method] = Cost(
            method=method,
            documents=count,
            source_tokens=tokens,
            entries=runs[method][0]["entries"],
            ready=Spread.of([run["ready"] for run in runs[method]]),
            **parts,
            cold=cold[method],
            disk=Spread.of(disk[method]) if disk[method] else None,
            decode_tokens_per_second=rate,
            peak_bytes=peak,
            stored_bytes=stored[method],
            loaded_bytes=runs[method][0]["loaded_bytes"],
            recomputed=runs[method][0]["recomputed"],
        )
        progress()
    full = costs["recompute"].ready.median
    return [_compared(cost, full) for cost in costs.values()]


_PARTS = ("load", "blend", "compose", "question")


def _compared(cost: Cost, full: float) -> Cost:
    """With its speedup, and the requests after which it has paid off."""
    saved = full - cost.ready.median
    once = max(0.0, cost.cold - cost.ready.median)
    values = {name: getattr(cost, name) for name in cost.__dataclass_fields__}
    values |= {
        "speedup": full / cost.ready.median,
        "break_even": once / saved if saved > 0 else None,
    }
    return Cost(**values)


@torch.inference_mode()
def _request(
    engine: Engine, documents: Sequence[Document], method: str, source: str
) -> dict[str, Any]:
    """The parts of one request, up to the first token's logits. Raises ConfigError when what the
    method keeps was not in `source` (memory, disk, or nowhere yet)."""
    backbone = engine.backbone
    gc.collect()
    got = engine.prefill(documents, method)
    wanted = {"memory": got.from_memory, "disk": got.from_disk, "nowhere": got.extracted}
    if wanted[source] < len({p for d in documents for p in d.pieces}) and got.segments:
        raise ConfigError(
            f"method '{method}' should have found its segments in {source}, but {got.from_memory} "
            f"came from memory, {got.from_disk} from disk and {got.extracted} were made; give "
            "segments more --memory"
        )
    start = backbone.now()
    cache = got.composition.open(room=_QUESTION_TOKENS)
    compose = backbone.now() - start
    tokens = torch.zeros(1, _QUESTION_TOKENS, dtype=torch.long, device=backbone.device)
    positions = got.composition.question_position + torch.arange(_QUESTION_TOKENS)[None]
    start = backbone.now()
    backbone.forward(tokens, positions.to(backbone.device), cache)
    return {
        "ready": got.load + got.extract + got.blend + compose,
        "load": got.load,
        "blend": got.blend,
        "compose": compose,
        "question": backbone.now() - start,
        "entries": got.composition.entries,
        "loaded_bytes": got.loaded_bytes,
        "recomputed": got.recomputed,
    }


def _answer(engine: Engine, documents: Sequence[Document], method: str) -> tuple[float, int | None]:
    """Tokens a second of decoding, and the peak of memory from the request on."""
    options = DecodingOptions(max_new_tokens=_DECODED)
    with _peak(engine.backbone.device) as peak:
        got = engine.prefill(documents, method)
        _, times = decode(got.composition, [[0] * _QUESTION_TOKENS], options)
    return times.step_tokens / times.steps, peak()


@contextlib.contextmanager
def _peak(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Bytes of memory above what was held at the start: of the device, or of this process (as
    sampled by psutil, where that is installed)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - held
        return
    try:
        import psutil
    except ImportError:
        yield lambda: None
        return
    process, done, most = psutil.Process(), threading.Event(), [0]
    held = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], process.memory_info().rss - held)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: most[0]
    finally:
        done.set()
        watcher.join()
