"""Composition: ordered segments at their placements, the prefix a question is decoded against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from c2kv.backbone import Backbone
from c2kv.cache import ComposedCache
from c2kv.errors import ContextOverflowError, ExtractorMismatchError
from c2kv.rotary import Part, place
from c2kv.segment import Segment


def check_positions(backbone: Backbone, documents_end: int, tokens: int) -> None:
    """Raises ContextOverflowError if `tokens` of question and answer, after prefix and documents
    that end at position `documents_end`, pass the model's limit."""
    if (needed := documents_end + tokens) > backbone.max_positions:
        raise ContextOverflowError(
            f"documents ({documents_end} positions) and {tokens} tokens of question and answer "
            f"need {needed} positions, '{backbone.name}' has {backbone.max_positions}; ask about "
            "fewer documents or for fewer new tokens"
        )


@dataclass(frozen=True)
class Placement:
    """offset: position of the segment's first source token; slot: index of its first entry."""

    offset: int
    span: int
    ratio: int
    slot: int
    entries: int

    def positions(self) -> Tensor:
        """Position of each entry: the last source token of its block [entries]."""
        ends = torch.arange(1, self.entries + 1) * self.ratio
        return self.offset + ends.clamp(max=self.span) - 1


@dataclass(frozen=True, eq=False)
class Composition:
    """Immutable: every question opens its own cache and owns its tail.

    prefix: ordinary KV, keys rotated, at positions 0..s-1 [layers, 2, kv_heads, s, head_dim];
    prefix_ids: the tokens it was computed from; segments: in order."""

    backbone: Backbone
    prefix: Tensor
    prefix_ids: tuple[int, ...]
    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        b = self.backbone
        for segment in self.segments:
            layers, two, heads, _, dim = segment.kv.shape
            if (layers, two, heads, dim) != (b.num_layers, 2, b.num_kv_heads, b.head_dim):
                raise ExtractorMismatchError(
                    f"segment {segment.key[:12]} of shape {tuple(segment.kv.shape)} is not of "
                    f"'{b.name}'; extract the document again with this model"
                )
            if segment.identity.backbone != b.digest:
                raise ExtractorMismatchError(
                    f"segment {segment.key[:12]} was made by weights "
                    f"{segment.identity.backbone[:16]}, '{b.name}' has {b.digest[:16]}; extract "
                    "the document again with this model"
                )

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Where each segment stands. Offsets accumulate source spans, slots count entries."""
        placed = []
        offset = slot = self.prefix.shape[3]
        for s in self.segments:
            placed.append(Placement(offset, s.span, s.ratio, slot, s.entries))
            offset, slot = offset + s.span, slot + s.entries
        return tuple(placed)

    @property
    def entries(self) -> int:
        """KV entries a question attends to."""
        return self.prefix.shape[3] + sum(s.entries for s in self.segments)

    @property
    def question_position(self) -> int:
        """Position of the question's first token: the prefix and all source spans precede it."""
        return self.prefix.shape[3] + sum(s.span for s in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes of the prefix and the segments."""
        return self.prefix.numel() * self.prefix.element_size() + sum(
            s.nbytes for s in self.segments
        )

    @property
    def token_ids(self) -> list[int]:
        """The source tokens it stands for, in order."""
        ids = list(self.prefix_ids)
        for segment in self.segments:
            ids += segment.identity.token_ids
        return ids

    def open(self, room: int, batch: int = 1) -> ComposedCache:
        """A cache filled with the composition, with `room` more slots in each of `batch` rows.

        Every key is rotated and written once, straight to where it stays; further rows are
        copies of the first."""
        b = self.backbone
        shape = (b.num_layers, 2, batch, b.num_kv_heads, self.entries + room, b.head_dim)
        arena = torch.empty(shape, dtype=b.dtype, device=b.device)
        self.fill(arena)
        return ComposedCache(arena, self.entries)

    def fill(self, arena: Tensor) -> None:
        """Write the composition into every row of `arena`
        [layers, 2, batch, kv_heads, capacity, head_dim]."""
        parts = [
            Part(segment.kv, *angles, at.slot)
            for segment, angles, at in zip(
                self.segments, self._angles, self.placements, strict=True
            )
        ]
        place(parts, arena)
        first = arena[:, :, 0]
        first[:, :, :, : self.prefix.shape[3]] = self.prefix
        if arena.shape[2] > 1:
            arena[:, :, 1:, :, : self.entries] = first[:, :, None, :, : self.entries]

    @cached_property
    def _angles(self) -> list[tuple[Tensor, Tensor]]:
        """cos and sin [entries, head_dim] of each segment's placement."""
        return [self.backbone.tabled_cos_sin(at.positions()) for at in self.placements]
