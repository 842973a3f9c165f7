"""Naive compression of reused KV, the paper's contrast: drop entries of each document.

The backbone's own KV was not made to be thinned: what was spread over k tokens is simply lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from c2kv.composition import Composition, Placement
from c2kv.document import Document
from c2kv.extractor.config import check_ratio
from c2kv.library import SegmentLibrary
from c2kv.methods.base import Materials, Method, Prefilled, Stored
from c2kv.methods.registry import refuse
from c2kv.rotary import rotate
from c2kv.segment import Segment


class Naive(Stored):
    """Keeps ceil(n / ratio) of a segment's n entries, at their own positions.

    by: `stride` (the last of each block of `ratio`, where a C2Token would stand) or `norm` (the
    largest values, chosen by layer and head)."""

    def __init__(self, name: str, library: SegmentLibrary, by: str, ratio: int):
        super().__init__(name, library)
        self.by = by
        self.ratio = ratio

    @torch.inference_mode()
    def prefill(self, prefix: Composition, documents: Sequence[Document]) -> Prefilled:
        got = self.prepare(documents)
        start = prefix.backbone.now()
        kept, ids = [prefix.prefix], prefix.prefix_ids
        for segment in got.segments:
            kept.append(self._thin(prefix, segment, len(ids)))
            ids += segment.identity.token_ids
        composition = Composition(prefix.backbone, torch.cat(kept, dim=3), ids)
        return Prefilled.of(got, composition, place=prefix.backbone.now() - start)

    def _thin(self, prefix: Composition, segment: Segment, offset: int) -> Tensor:
        """The kept entries [layers, 2, kv_heads, ceil(n / ratio), head_dim], keys rotated."""
        kv = segment.kv.to(prefix.backbone.device)
        count = -(-segment.span // self.ratio)
        if self.by == "stride":
            at = Placement(0, segment.span, self.ratio, 0, count).positions().to(kv.device)
            at = at.expand(*kv[:, 1].shape[:2], -1)
        else:
            at = kv[:, 1].float().norm(dim=-1).topk(count).indices.sort().values
        index = at[:, None, :, :, None].expand(-1, 2, -1, -1, kv.shape[-1])
        keys, values = kv.gather(3, index).unbind(1)
        cos, sin = prefix.backbone.cos_sin(offset + at)
        return torch.stack((rotate(keys, cos, sin), values), dim=1)


def build(name: str, parameters: list[str], materials: Materials) -> Method:
    match parameters:
        case ["stride" | "norm" as by, given] if given.isdecimal():
            check_ratio(int(given))
            return Naive(name, materials.full, by, int(given))
    raise refuse(name, "naive")
