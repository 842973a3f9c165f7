"""What every method does: turn a prefix and documents into a composition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from c2kv.composition import Composition


@dataclass(frozen=True)
class Prefilled:
    """A composition ready to be asked, how its segments were got, and the seconds spent:
    `load` bringing stored state, `extract` making it now, `blend` computing online."""

    composition: Composition
    from_memory: int = 0
    from_disk: int = 0
    extracted: int = 0
    load: float = 0.0
    extract: float = 0.0
    blend: float = 0.0


class Method(Protocol):
    """name as users write it; ratio: source tokens per entry."""

    name: str
    ratio: int

    def prefill(
        self, prefix: Composition, pieces: Sequence[Sequence[int]], labels: Sequence[str]
    ) -> Prefilled:
        """Put the document pieces (token ids) behind `prefix`, a composition without segments."""
        ...
