"""What a report is made of, free of any markup."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """The first column holds names, the others numbers as text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """svg: the drawing; alt: what it shows, for who cannot see it."""

    svg: str
    alt: str


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    parts: tuple[Table | Figure, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
