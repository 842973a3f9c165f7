"""A document's own uncompressed KV, kept before RoPE: what methods without compression reuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from c2kv.backbone import Backbone


@torch.no_grad()
def full_kv(backbone: Backbone, ids: Sequence[int]) -> Tensor:
    """The backbone's KV of one document alone (token ids), keys before RoPE
    [layers, 2, kv_heads, n, head_dim]."""
    hidden = backbone.embed_tokens(torch.tensor([list(ids)], device=backbone.device))
    angles = backbone.cos_sin(torch.arange(len(ids), device=backbone.device)[None])
    kept = []
    for index, layer in enumerate(backbone.layers):
        with _unrotated_keys(layer.self_attn) as seen:
            hidden, _, values = backbone.run_layer(index, hidden, angles)
        keys = seen[0].view(len(ids), backbone.num_kv_heads, backbone.head_dim)
        kept.append(torch.stack((keys.transpose(0, 1), values[0])))
    return torch.stack(kept)


@contextmanager
def _unrotated_keys(attention: Any) -> Iterator[list[Tensor]]:
    # Un-rotating would square an attention scaling other than 1, so they are read before RoPE.
    seen: list[Tensor] = []
    source = attention.k_norm if hasattr(attention, "k_norm") else attention.k_proj
    hook = source.register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        yield seen
    finally:
        hook.remove()
