"""Controls: what stands in front of a question in place of a method over its own documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.evaluation.conditions import Condition


def controlled(
    engine: Engine, condition: Condition, documents: Sequence[Document], wrong: Sequence[Document]
) -> tuple[Sequence[Document], str]:
    """The documents, and the method that puts them in front, under a condition. wrong: another
    case's documents."""
    if condition.control == "wrongdoc":
        return wrong, condition.method
    if condition.control == "shuffled":
        return documents[::-1], condition.method
    if condition.control == "noctx":
        return (), "recompute"
    if condition.control == "budget":
        ratio = engine.method(condition.method).ratio
        closing = tuple(engine.template.closing_ids())
        return [_cut(document, ratio, closing) for document in documents], "recompute"
    return documents, condition.method


def _cut(document: Document, ratio: int, closing: tuple[int, ...]) -> Document:
    """As many tokens of each piece as an extractor keeps entries, a message's end included."""
    pieces = []
    for piece in document.pieces:
        room = -(-len(piece) // ratio)
        ends = bool(closing) and piece[-len(closing) :] == closing and room > 2 * len(closing)
        pieces.append(piece[: room - len(closing)] + closing if ends else piece[:room])
    return replace(document, pieces=tuple(pieces))
