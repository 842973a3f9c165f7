"""The parts of a decoder layer that C2Tokens share with the backbone, around their attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from c2kv.backbone import Backbone


def pad_ids(documents: Sequence[Sequence[int]]) -> Tensor:
    """Token ids of documents, right-padded with zeros to the longest [batch, n]."""
    ids = torch.zeros(len(documents), max(map(len, documents)), dtype=torch.long)
    for row, document in zip(ids, documents, strict=True):
        row[: len(document)] = torch.as_tensor(document)
    return ids


def project(
    backbone: Backbone, index: int, heads: Any, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one layer's input [batch, n, hidden] by `heads` (an extractor's, or the layer's
    own attention), each [batch, heads, n, head_dim], before RoPE."""
    layer = backbone.layers[index]
    normed = layer.input_layernorm(hidden)
    shape = (*hidden.shape[:-1], -1, backbone.head_dim)
    queries, keys, values = (
        projection(normed).view(shape) for projection in (heads.q_proj, heads.k_proj, heads.v_proj)
    )
    attention = layer.self_attn
    if hasattr(attention, "q_norm"):
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def finish_layer(backbone: Backbone, index: int, hidden: Tensor, mixed: Tensor) -> Tensor:
    """One layer's output from its input [batch, n, hidden] and what its attention mixed
    [batch, n, heads * head_dim]."""
    layer = backbone.layers[index]
    hidden = hidden + layer.self_attn.o_proj(mixed)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))
