"""Segment: the position-free KV of one document piece, and the identity that names it."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

# Raised whenever the meaning of stored bytes changes: older segments are then misses.
FORMAT_VERSION = 1


@dataclass(frozen=True)
class SegmentIdentity:
    """Everything that decides a segment's values. Two segments are the same iff all of it is.

    backbone, extractor, template: digests (extractor is empty for uncompressed KV);
    variant: `plain`, `residual` or `full` (the backbone's own KV, ratio 1); dtype: as
    `float32`; tenant: whose it is, empty for everyone's."""

    backbone: str
    extractor: str
    variant: str
    ratio: int
    dtype: str
    template: str
    token_ids: tuple[int, ...]
    tenant: str = ""

    @cached_property
    def key(self) -> str:
        """SHA-256 over length-prefixed canonical bytes of every field and the format version."""
        ids = struct.pack(f"<{len(self.token_ids)}I", *self.token_ids)
        texts = (self.backbone, self.extractor, self.variant, self.dtype, self.template)
        fields = [str(FORMAT_VERSION), str(self.ratio), self.tenant, *texts]
        total = hashlib.sha256(b"c2kv-segment")
        for raw in (*(field.encode() for field in fields), ids):
            total.update(struct.pack("<Q", len(raw)) + raw)
        return total.hexdigest()

    @property
    def span(self) -> int:
        """Source tokens it stands for."""
        return len(self.token_ids)

    @property
    def entries(self) -> int:
        """KV entries kept: ceil(span / ratio)."""
        return -(-self.span // self.ratio)


@dataclass(frozen=True, eq=False)
class Segment:
    """kv [layers, 2, kv_heads, entries, head_dim]: keys before RoPE, then values; read only."""

    identity: SegmentIdentity
    kv: Tensor

    def __post_init__(self) -> None:
        if self.kv.dim() != 5 or self.kv.shape[3] != self.identity.entries:
            raise ValueError(
                f"kv of shape {tuple(self.kv.shape)} does not hold the {self.identity.entries} "
                f"entries of {self.identity.span} tokens at ratio {self.identity.ratio}"
            )

    @property
    def key(self) -> str:
        return self.identity.key

    @property
    def span(self) -> int:
        return self.identity.span

    @property
    def ratio(self) -> int:
        return self.identity.ratio

    @property
    def entries(self) -> int:
        return self.identity.entries

    @property
    def nbytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()
