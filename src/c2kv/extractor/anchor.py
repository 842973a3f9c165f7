"""Anchor tokens, the paper's contrast (its Figure 6): information flows both ways.

Laid out as C2Tokens are, but source tokens see their own block and the anchors before it instead
of earlier source tokens. So source tokens are no longer the backbone's own, and what anchors hold
depends on everything before them: made for compressing one input, not for composing many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from c2kv.backbone import Backbone
from c2kv.extractor.flow import BlockLayout, attend
from c2kv.extractor.model import Extractor, QKVHeads
from c2kv.extractor.project import finish_layer, pad_ids, project
from c2kv.rotary import rotate


def extract_anchors(
    backbone: Backbone, extractor: Extractor, documents: Sequence[Sequence[int]], ratio: int
) -> list[Tensor]:
    """As `c2kv.extractor.extract`, of anchors. Differentiable in the extractor's parameters; the
    graph runs through the source tokens too."""
    device = backbone.device
    lengths = [len(ids) for ids in documents]
    layout = BlockLayout.of(lengths, ratio, device, backbone.dtype)
    source = backbone.embed_tokens(pad_ids(documents).to(device))
    source_angles = backbone.cos_sin(torch.arange(layout.span, device=device)[None])
    anchor_angles = backbone.cos_sin(layout.positions())
    anchors = extractor.start(layout.block_means(source))
    kept = []
    for index, (heads, layer) in enumerate(zip(extractor.layers, backbone.layers, strict=True)):
        assert isinstance(heads, QKVHeads)
        queries, keys, values = project(backbone, index, heads, anchors)
        kept.append(torch.stack((keys, values), dim=1))
        if index == backbone.num_layers - 1:
            break  # nothing reads hidden states after the last layer's keys and values
        own = project(backbone, index, layer.self_attn, source)
        cos, sin = (t[:, None] for t in anchor_angles)
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        cos, sin = (t[:, None] for t in source_angles)
        own_queries, own_keys = rotate(own[0], cos, sin), rotate(own[1], cos, sin)
        mixed = attend(queries, keys, values, own_keys, own[2], layout, backbone.scaling)
        own_mixed = _attend_source(
            own_queries, own_keys, own[2], keys, values, layout, backbone.scaling
        )
        anchors = finish_layer(backbone, index, anchors, mixed)
        source = finish_layer(backbone, index, source, own_mixed)
    kv = torch.stack(kept, dim=1)  # [batch, layers, 2, kv_heads, m, head_dim]
    return [kv[i, ..., : -(-n // ratio), :] for i, n in enumerate(lengths)]


def _attend_source(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    anchor_keys: Tensor,
    anchor_values: Tensor,
    layout: BlockLayout,
    scaling: float,
) -> Tensor:
    """Attention of the source tokens, all arguments after RoPE: causal in their own block, and
    over the anchors of the blocks before it.

    queries [batch, heads, n, head_dim]; keys, values [batch, kv_heads, n, head_dim]; anchors'
    [batch, kv_heads, m, head_dim]. Returns [batch, n, heads * head_dim]."""
    ratio, entries, span = layout.ratio, layout.entries, queries.shape[2]
    grouped = layout.blocks(queries * scaling).unflatten(1, (keys.shape[1], -1))
    own = torch.einsum("bhgmid,bhmjd->bhgmij", grouped, layout.blocks(keys))
    earlier = torch.einsum("bhgmid,bhnd->bhgmin", grouped, anchor_keys)
    lowest = torch.finfo(own.dtype).min
    future = torch.ones(ratio, ratio, dtype=torch.bool, device=own.device).triu(1)
    later = torch.ones(entries, entries, dtype=torch.bool, device=own.device).triu()
    own = own.masked_fill(future, lowest)
    earlier = earlier.masked_fill(later[:, None], lowest)
    scores = torch.cat((own, earlier), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(own.dtype)
    own, earlier = weights.split((ratio, entries), dim=-1)
    out = torch.einsum("bhgmij,bhmjd->bhgmid", own, layout.blocks(values))
    out = out + torch.einsum("bhgmin,bhnd->bhgmid", earlier, anchor_values)
    return out.flatten(3, 4)[:, :, :, :span].flatten(1, 2).transpose(1, 2).flatten(2)
