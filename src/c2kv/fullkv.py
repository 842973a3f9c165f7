"""Documents' own uncompressed KV, kept before RoPE: what methods without compression reuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from c2kv.backbone import Backbone
from c2kv.extractor.project import pad_ids


def full_kv(backbone: Backbone, documents: Sequence[Sequence[int]]) -> list[Tensor]:
    """The backbone's KV of each document (token ids) as if it stood alone, keys before RoPE: one
    tensor [layers, 2, kv_heads, n, head_dim] a document."""
    # Padded on the right, where no token of a document sees it.
    hidden = backbone.embed_tokens(pad_ids(documents).to(backbone.device))
    angles = backbone.cos_sin(torch.arange(hidden.shape[1], device=backbone.device)[None])
    kept = []
    for index in range(backbone.num_layers):
        # Projected once more rather than un-rotated, which would square an attention scaling
        # other than 1, or hooked, which another thread's pass would disturb.
        kept.append(torch.stack(backbone.project_kv(index, hidden), dim=1))
        if index < backbone.num_layers - 1:  # nothing reads what the last one makes of them
            hidden, _, _ = backbone.run_layer(index, hidden, angles)
    kv = torch.stack(kept, dim=1)  # [batch, layers, 2, kv_heads, n, head_dim]
    return [kv[i, ..., : len(ids), :] for i, ids in enumerate(documents)]
