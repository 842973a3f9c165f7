"""The layer-by-layer pass: source tokens through the frozen backbone, C2Tokens beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from c2kv.backbone import Backbone
from c2kv.errors import DocumentError
from c2kv.extractor.anchor import extract_anchors
from c2kv.extractor.config import check_ratio
from c2kv.extractor.flow import BlockLayout, attend
from c2kv.extractor.model import Extractor, QKVHeads
from c2kv.extractor.project import finish_layer, pad_ids, project
from c2kv.rotary import rotate


def extract(
    backbone: Backbone,
    extractor: Extractor,
    documents: Sequence[Sequence[int]],
    ratio: int | None = None,
    gradient_checkpointing: bool = False,
) -> list[Tensor]:
    """Position-free KV of each document (token ids), as if it stood alone.

    Returns one tensor [layers, 2, kv_heads, ceil(n / ratio), head_dim] a document: keys after
    k_norm and before RoPE, then values. `ratio` overrides the extractor's own. With gradients
    enabled the result is differentiable in the extractor's parameters; source tokens never carry
    a graph; `gradient_checkpointing` keeps only hidden states for the backward pass, and computes
    each layer's C2Tokens again. Raises DocumentError for an empty document."""
    lengths = [len(ids) for ids in documents]
    if not documents or min(lengths) < 1:
        raise DocumentError("a document without tokens has nothing to extract; leave it out")
    device = backbone.device
    ratio = extractor.config.ratio if ratio is None else ratio
    check_ratio(ratio)
    if extractor.config.variant == "anchor":
        return extract_anchors(backbone, extractor, documents, ratio)
    layout = BlockLayout.of(lengths, ratio, device, backbone.dtype)
    with torch.no_grad():
        source = backbone.embed_tokens(pad_ids(documents).to(device))
        source_angles = backbone.cos_sin(torch.arange(layout.span, device=device)[None])
        carry_angles = backbone.cos_sin(layout.positions())
        means = layout.block_means(source)
    carry = extractor.start(means)
    # Attention is always computed again in the backward pass: its m * m weights would be the only
    # thing kept there that grows faster than the document.
    again = partial(checkpoint, use_reentrant=False) if torch.is_grad_enabled() else _call
    flow = attend if gradient_checkpointing else partial(again, attend)
    step = again if gradient_checkpointing else _call
    kept = []
    for index, heads in enumerate(extractor.layers):
        assert isinstance(heads, QKVHeads)
        if index == backbone.num_layers - 1:
            # Nothing reads C2Tokens' hidden states after the last layer's keys and values,
            _, keys, values = project(backbone, index, heads, carry)
        else:
            with torch.no_grad():
                if index == backbone.num_layers - 2:  # nor source tokens after these keys, values
                    source_keys, source_values = backbone.project_kv(index, source)
                    source_keys = rotate(source_keys, *(t[:, None] for t in source_angles))
                else:
                    source, source_keys, source_values = backbone.run_layer(
                        index, source, source_angles
                    )
            seen = (source_keys, source_values, carry_angles)
            carry, keys, values = step(_step, backbone, index, heads, layout, flow, carry, *seen)
        kept.append(torch.stack((keys, values), dim=1))
    kv = torch.stack(kept, dim=1)  # [batch, layers, 2, kv_heads, m, head_dim]
    return [kv[i, ..., : -(-n // ratio), :] for i, n in enumerate(lengths)]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _step(
    backbone: Backbone,
    index: int,
    heads: QKVHeads,
    layout: BlockLayout,
    flow: Callable[..., Tensor],
    carry: Tensor,
    source_keys: Tensor,
    source_values: Tensor,
    angles: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of the C2Tokens: their new hidden states [batch, m, hidden], and their keys
    before RoPE and values [batch, kv_heads, m, head_dim]."""
    queries, keys, values = project(backbone, index, heads, carry)
    cos, sin = (t[:, None] for t in angles)
    mixed = flow(
        rotate(queries, cos, sin),
        rotate(keys, cos, sin),
        values,
        source_keys,
        source_values,
        layout,
        backbone.scaling,
    )
    return finish_layer(backbone, index, carry, mixed), keys, values
