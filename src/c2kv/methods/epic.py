"""EPIC's LegoLink-k (arXiv 2410.15332): reuse, with each document's first k tokens recomputed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from c2kv.composition import Composition
from c2kv.document import Document
from c2kv.library import SegmentLibrary
from c2kv.methods.base import Materials, Method, Prefilled, Stored
from c2kv.methods.blend import ReusedKV
from c2kv.methods.registry import refuse


class Epic(Stored):
    """Documents computed apart each take their first tokens for an attention sink; recomputed
    in place, these lose that role. `tokens` (k) of every segment are, the first one's too."""

    def __init__(self, name: str, library: SegmentLibrary, tokens: int):
        super().__init__(name, library)
        self.tokens = tokens

    @torch.inference_mode()
    def prefill(self, prefix: Composition, documents: Sequence[Document]) -> Prefilled:
        got = self.prepare(documents)
        reused = ReusedKV(prefix, documents, got)
        start = prefix.backbone.now()
        first = reused.start
        chosen: list[int] = []
        for segment in got.segments:
            chosen += range(first, first + min(self.tokens, segment.span))
            first += segment.span
        at = torch.tensor(chosen, dtype=torch.long, device=prefix.backbone.device)
        reused.recompute(at, reused.embed(at), range(prefix.backbone.num_layers))
        blend = prefix.backbone.now() - start
        return Prefilled.of(got, reused.composition(), reused.recomputed, reused.place, blend)


def build(name: str, parameters: list[str], materials: Materials) -> Method:
    if len(parameters) != 1 or not parameters[0].isdecimal():
        raise refuse(name, "epic")
    return Epic(name, materials.full, int(parameters[0]))
