"""KV deviation: how far a method's KV is from full recompute's for the same tokens.

Relative norm of the difference over the documents' tokens, keys (rotated) and values together,
by layer and over all layers (the paper's Figure 2). Only methods with an entry for every token
have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.errors import ConfigError
from c2kv.evaluation.batches import out_of_memory

SWEEP = (
    "reuse",
    *(f"epic-{k}" for k in (1, 2, 4, 8, 16, 32, 64)),
    *(f"cacheblend-{share}" for share in (0.05, 0.1, 0.15, 0.2, 0.4, 0.7, 1.0)),
)


@dataclass(frozen=True)
class Deviation:
    """recomputed: share of the documents' token·layer products that were computed online."""

    method: str
    recomputed: float
    deviation: float
    by_layer: list[float]


def deviations(
    engine: Engine,
    documents: Sequence[Document],
    methods: Sequence[str] = SWEEP,
    progress: Callable[[], object] = lambda: None,
) -> Iterator[Deviation]:
    """The deviation of each method on one prompt of these documents. Raises ConfigError for a
    method that keeps fewer entries than tokens, or when memory is too small."""
    exact = _document_kv(engine, documents, "recompute")[0]
    size = _square(exact, None)
    products = sum(d.tokens for d in documents) * engine.backbone.num_layers
    for method in methods:
        kv, recomputed = _document_kv(engine, documents, method)
        if kv.shape != exact.shape:
            raise ConfigError(
                f"method '{method}' keeps {kv.shape[3]} entries of {exact.shape[3]} tokens: its KV "
                "cannot be set beside full recompute's; leave it out"
            )
        off = _square(kv, exact)
        by_layer = (off / size).sqrt().tolist()
        whole = (off.sum() / size.sum()).sqrt().item()
        yield Deviation(method, min(1.0, recomputed / products), whole, by_layer)
        progress()


def _document_kv(engine: Engine, documents: Sequence[Document], method: str) -> tuple[Tensor, int]:
    """KV of the documents' entries [layers, 2, kv_heads, entries, head_dim], and the token·layer
    products it took online."""
    try:
        got = engine.prefill(documents, method)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(
            f"memory does not hold the KV of {sum(d.tokens for d in documents)} tokens by "
            f"'{method}' beside full recompute's; use fewer documents"
        ) from error
    prefix = got.composition.question_position - sum(d.tokens for d in documents)
    with torch.no_grad():
        kv = got.composition.kv()[:, :, :, prefix:]
    return kv, got.recomputed


def _square(kv: Tensor, other: Tensor | None) -> Tensor:
    """The squared norm of each layer's KV, or of its difference to the other's [layers]. In
    float32, a layer at a time: all of it may be as large as the device's memory."""
    off = (kv[i].float() - (0 if other is None else other[i].float()) for i in range(len(kv)))
    return torch.stack([layer.square().sum() for layer in off])
