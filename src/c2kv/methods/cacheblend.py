"""CacheBlend (arXiv 2405.16444): reuse, with the tokens recomputed whose values deviate most."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from c2kv.composition import Composition
from c2kv.document import Document
from c2kv.errors import ConfigError
from c2kv.library import SegmentLibrary
from c2kv.methods.base import Materials, Method, Prefilled, Stored
from c2kv.methods.blend import ReusedKV
from c2kv.methods.recompute import prefill
from c2kv.methods.registry import refuse
from c2kv.rotary import rotate


class CacheBlend(Stored):
    """Layers before the check layer run for every document token; there, fresh values are
    compared with the reused ones, and only the tokens that deviate most go on.

    shares: of the document tokens that go on from the check layer, from the layer after it, and
    so on; the last holds for the rest."""

    def __init__(
        self, name: str, library: SegmentLibrary, shares: Sequence[float], check_layer: int
    ):
        super().__init__(name, library)
        self.shares = tuple(shares)
        self.check_layer = check_layer

    @torch.inference_mode()
    def prefill(self, prefix: Composition, documents: Sequence[Document]) -> Prefilled:
        got = self.prepare(documents)
        reused = ReusedKV(prefix, documents, got)
        start = prefix.backbone.now()
        backbone = prefix.backbone
        total = len(reused.ids) - reused.start
        at = torch.arange(reused.start, len(reused.ids), device=backbone.device)
        check = self.check_layer
        hidden = reused.recompute(at, reused.embed(at), range(check))
        last = check + len(self.shares) - 1
        for layer, share in zip(range(check, backbone.num_layers), self.shares, strict=False):
            chosen = self._select(reused, layer, at, hidden, round(share * total))
            at, hidden = at[chosen], hidden[:, chosen]
            stop = backbone.num_layers if layer == last else layer + 1
            hidden = reused.recompute(at, hidden, range(layer, stop))
        blend = prefix.backbone.now() - start
        return Prefilled.of(got, reused.composition(), reused.recomputed, reused.place, blend)

    def _select(
        self, reused: ReusedKV, layer: int, at: Tensor, hidden: Tensor, count: int
    ) -> Tensor:
        """Which `count` of the tokens at `at` deviate most [count], ascending. The fresh keys and
        values of all of them stay at this layer."""
        if not len(at):
            return at
        backbone, (old_keys, old_values) = reused.backbone, reused.kv[layer]
        keys, values = (t[0] for t in backbone.project_kv(layer, hidden))
        cos, sin = backbone.cos_sin(at)
        deviation = (values - old_values[:, at]).float().square().sum(dim=(0, 2))
        old_keys[:, at], old_values[:, at] = rotate(keys, cos, sin), values
        return deviation.topk(min(count, len(at))).indices.sort().values


class OracleCacheBlend(Stored):
    """A yardstick, not a method to serve: the tokens are chosen by their values' deviation from a
    full recompute, over all layers, and recomputed in every layer. Its TTFT includes that full
    recompute, and is not comparable; its `recomputed` does not, and is the share chosen."""

    def __init__(self, name: str, library: SegmentLibrary, share: float):
        super().__init__(name, library)
        self.share = share

    @torch.inference_mode()
    def prefill(self, prefix: Composition, documents: Sequence[Document]) -> Prefilled:
        got = self.prepare(documents)
        reused = ReusedKV(prefix, documents, got)
        start = prefix.backbone.now()
        exact = prefill(prefix.backbone, reused.ids).prefix
        off = (exact[:, 1] - reused.kv[:, 1])[:, :, reused.start :].float().square()
        deviation = off.sum(dim=(0, 1, 3))
        count = round(self.share * len(deviation))
        at = reused.start + deviation.topk(count).indices.sort().values
        layers = range(prefix.backbone.num_layers)
        reused.recompute(at, reused.embed(at), layers)
        blend = prefix.backbone.now() - start
        return Prefilled.of(got, reused.composition(), reused.recomputed, reused.place, blend)


def build(name: str, parameters: list[str], materials: Materials) -> Method:
    """`cacheblend-0.15`; `-layer2`: the check layer, 1 unless given; `-gradual`: a larger share
    first, shrinking to it by layer; `-oracle`: chosen by a full recompute."""
    form = r"cacheblend-([\d.]+)(?:-layer(\d+))?(?:-(gradual|oracle))?"
    match = re.fullmatch(form, name)
    if match is None or (match[2] and match[3] == "oracle"):
        raise refuse(name, "cacheblend")
    try:
        share, check = float(match[1]), int(match[2] or 1)
    except ValueError:
        raise refuse(name, "cacheblend") from None
    if not 0 <= share <= 1:
        raise ConfigError(f"method '{name}': {share} is no share of the tokens; use 0 to 1")
    if not 1 <= check < (layers := materials.backbone.num_layers):
        raise ConfigError(f"method '{name}': the check layer is one of 1 to {layers - 1}")
    if match[3] == "oracle":
        return OracleCacheBlend(name, materials.full, share)
    larger = [min(1.0, factor * share) for factor in (2.0, 1.5)] if match[3] else []
    return CacheBlend(name, materials.full, [*larger, share], check)
