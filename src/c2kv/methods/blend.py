"""Blending: recompute chosen tokens against a prompt's reused KV, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from c2kv.backbone import Backbone
from c2kv.composition import Composition
from c2kv.document import Document, token_ids
from c2kv.errors import ConfigError
from c2kv.library import Retrieval
from c2kv.methods.recompute import SPARE_ROOM


class ReusedKV:
    """A prompt's KV as reuse places it, of which tokens can be recomputed.

    kv [layers, 2, kv_heads, n, head_dim], keys rotated; ids: the tokens; start: the first that
    is a document's; place: seconds that placing them took; recomputed: token·layer products so
    far."""

    def __init__(self, prefix: Composition, documents: Sequence[Document], got: Retrieval):
        placed = Composition(prefix.backbone, prefix.prefix, prefix.prefix_ids, tuple(got.segments))
        self.backbone: Backbone = prefix.backbone
        kernel = self.backbone.config._attn_implementation
        if kernel != "sdpa":
            raise ConfigError(
                f"recomputing chosen tokens needs a mask by position, which '{kernel}' does not "
                "take; load the model with sdpa"
            )
        start = self.backbone.now()
        self._arena = placed.open(room=SPARE_ROOM).arena
        self.kv: Tensor = self._arena[:, :, 0, :, : placed.entries]
        self.place = self.backbone.now() - start
        self.ids = (*prefix.prefix_ids, *token_ids(documents))
        self.start = len(prefix.prefix_ids)
        self.recomputed = 0

    def composition(self) -> Composition:
        return Composition(self.backbone, self.kv, self.ids, spare=[self._arena])

    def embed(self, at: Tensor) -> Tensor:
        """Embeddings of the tokens at positions `at` [s]: hidden states [1, s, hidden]."""
        device = self.backbone.device
        return self.backbone.embed_tokens(torch.tensor(self.ids, device=device)[at][None])

    def recompute(self, at: Tensor, hidden: Tensor, layers: range) -> Tensor:
        """Run the tokens at positions `at` [s] (ascending) with hidden states [1, s, hidden]
        through `layers`. Each sees every key up to its own position; its keys and values replace
        the reused ones. Returns their hidden states after the last of the layers."""
        if len(at):
            angles = self.backbone.cos_sin(at[None])
            seen = torch.arange(len(self.ids), device=at.device) <= at[:, None]
            for layer in layers:
                kv = self.kv[layer]
                hidden = self.backbone.recompute_layer(layer, hidden, angles, kv, at, seen)
        self.recomputed += len(at) * len(layers)
        return hidden
