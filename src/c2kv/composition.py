"""Composition: ordered segments at their placements, the prefix a question is decoded against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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

    prefix: ordinary KV, keys rotated [layers, 2, kv_heads, s, head_dim]; prefix_ids: the tokens it
    stands for, at positions from 0 (more than s where a method dropped some); segments: what
    follows, in order; spare: the arena that begins with the prefix, where it has room for a
    question: the first cache opened on the prefix alone takes it, and copies nothing."""

    backbone: Backbone
    prefix: Tensor
    prefix_ids: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    spare: list[Tensor] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        b = self.backbone
        for segment in self.segments:
            layers, two, heads, _, dim = segment.kv.shape
            if (layers, two, heads, dim) != (b.num_layers, 2, b.num_kv_heads, b.head_dim):
                raise ExtractorMismatchError(
                    f"segment {segment.key[:12]} of shape {tuple(segment.kv.shape)} is not of "
                    f"'{b.name}'; extract the document again with this model"
                )
            if segment.kv.dtype != b.dtype:
                raise ExtractorMismatchError(
                    f"segment {segment.key[:12]} is {segment.kv.dtype}, '{b.name}' is {b.dtype}; "
                    "extract the document again in this dtype"
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
        offset, slot = len(self.prefix_ids), self.prefix.shape[3]
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
        return len(self.prefix_ids) + sum(s.span for s in self.segments)

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

    def kv(self) -> Tensor:
        """All entries, keys rotated [layers, 2, kv_heads, entries, head_dim]. Not to be written."""
        return self.open(0).arena[:, :, 0] if self.segments else self.prefix

    def open(self, room: int, batch: int = 1) -> ComposedCache:
        """A cache filled with the composition, with at least `room` more slots in each of `batch`
        rows.

        Every key is rotated and written once, straight to where it stays; further rows are
        copies of the first."""
        return open_together([self] * batch, room)

    def fill(self, arena: Tensor, row: int = 0, start: int = 0) -> None:
        """Write the composition into one row of `arena`
        [layers, 2, batch, kv_heads, capacity, head_dim], from slot `start` on."""
        parts = [
            Part(segment.kv, *angles, start + at.slot)
            for segment, angles, at in zip(
                self.segments, self._angles, self.placements, strict=True
            )
        ]
        place(parts, arena, row)
        prefix = slice(start, start + self.prefix.shape[3])
        arena[:, :, row, :, prefix] = self.prefix

    @cached_property
    def _angles(self) -> list[tuple[Tensor, Tensor]]:
        """cos and sin [entries, head_dim] of each segment's placement."""
        return [self.backbone.tabled_cos_sin(at.positions()) for at in self.placements]


def open_together(compositions: Sequence[Composition], room: int) -> ComposedCache:
    """One cache with a row for each composition, and at least `room` more slots in each.

    Compositions end at the same slot, that of the longest; what stands before a shorter one is
    unset and must be masked. The same composition again is copied, not placed again."""
    b = compositions[0].backbone
    entries = max(c.entries for c in compositions)
    first, *others = compositions
    alone = not (others or first.segments)
    if alone and first.spare and entries + room <= first.spare[0].shape[4]:
        return ComposedCache(first.spare.pop(), entries)
    shape = (b.num_layers, 2, len(compositions), b.num_kv_heads, entries + room, b.head_dim)
    with torch.inference_mode(False):  # questions may be run outside of it
        arena = torch.empty(shape, dtype=b.dtype, device=b.device)
    rows: dict[int, int] = {}
    for row, composition in enumerate(compositions):
        start = entries - composition.entries
        # Masked slots are multiplied by zero, which uninitialised memory may not survive.
        arena[:, :, row, :, :start] = 0
        if (filled := rows.setdefault(id(composition), row)) == row:
            composition.fill(arena, row, start)
        else:
            arena[:, :, row, :, start:entries] = arena[:, :, filled, :, start:entries]
    return ComposedCache(arena, entries)
