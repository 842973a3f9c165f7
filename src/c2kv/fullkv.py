"""A document's own uncompressed KV, kept before RoPE: what methods without compression reuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from c2kv.backbone import Backbone


def full_kv(backbone: Backbone, ids: Sequence[int]) -> Tensor:
    """The backbone's KV of one document alone (token ids), keys before RoPE
    [layers, 2, kv_heads, n, head_dim]."""
    hidden = backbone.embed_tokens(torch.tensor([list(ids)], device=backbone.device))
    angles = backbone.cos_sin(torch.arange(len(ids), device=backbone.device)[None])
    kept = []
    for index in range(backbone.num_layers):
        # Projected once more rather than un-rotated, which would square an attention scaling
        # other than 1, or hooked, which another thread's pass would disturb.
        kept.append(torch.cat(backbone.project_kv(index, hidden)))
        hidden, _, _ = backbone.run_layer(index, hidden, angles)
    return torch.stack(kept)
