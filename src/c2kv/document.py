"""Document: a text as a backbone reads it, cut into the pieces that become segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A document as a backbone (its digest) reads it: its message's token ids, in pieces."""

    name: str
    pieces: tuple[tuple[int, ...], ...]
    backbone: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def labels(self) -> list[str]:
        """What people know its pieces by."""
        count = len(self.pieces)
        if count == 1:
            return [self.name]
        return [f"{self.name} {i}/{count}" for i in range(1, count + 1)]


def token_ids(documents: Sequence[Document]) -> list[int]:
    """All tokens of documents in order."""
    return [token for document in documents for piece in document.pieces for token in piece]
