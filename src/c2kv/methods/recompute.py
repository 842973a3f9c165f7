"""Full recompute: one causal prefill of everything, the reference for every other method."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from c2kv.backbone import Backbone
from c2kv.cache import ComposedCache
from c2kv.composition import Composition, check_positions
from c2kv.document import Document, token_ids
from c2kv.library import Retrieval, SegmentMaker
from c2kv.methods.base import Materials, Method, Prefilled
from c2kv.methods.registry import refuse

# Entries kept free behind what is computed online, for a question and its answer.
SPARE_ROOM = 1024


class Recompute:
    """Nothing is stored; the whole prompt is computed on every request."""

    name = "recompute"
    ratio = 1
    maker: SegmentMaker | None = None

    def prepare(self, documents: Sequence[Document]) -> Retrieval:
        return Retrieval()

    def prefill(self, prefix: Composition, documents: Sequence[Document]) -> Prefilled:
        start = prefix.backbone.now()
        ids = [*prefix.prefix_ids, *token_ids(documents)]
        composition = prefill(prefix.backbone, ids, SPARE_ROOM)
        recomputed = len(ids) * prefix.backbone.num_layers
        return Prefilled(composition, recomputed=recomputed, blend=prefix.backbone.now() - start)


@torch.inference_mode()
def prefill(backbone: Backbone, ids: Sequence[int], room: int = 0) -> Composition:
    """A composition of ordinary KV only: `ids` at positions 0.. in one causal pass. The first
    question takes over its memory if `room` entries are enough for it."""
    slots = len(ids) + room
    shape = (backbone.num_layers, 2, 1, backbone.num_kv_heads, slots, backbone.head_dim)
    with torch.inference_mode(False):  # questions may be run outside of it
        arena = torch.empty(shape, dtype=backbone.dtype, device=backbone.device)
    kv = arena[:, :, 0, :, : len(ids)]
    composition = Composition(backbone, kv, tuple(ids), spare=[arena] if room else [])
    if ids:
        check_positions(backbone, len(ids), 0)
        tokens = torch.tensor([list(ids)], device=backbone.device)
        positions = torch.arange(len(ids), device=backbone.device)[None]
        backbone.forward(tokens, positions, ComposedCache(arena, 0))
    return composition


def build(name: str, parameters: list[str], materials: Materials) -> Method:
    if parameters:
        raise refuse(name, "recompute")
    return Recompute()
