"""Controls: what stands in front of a question in place of a method over its own documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.evaluation.conditions import Condition
from c2kv.methods.hybrid import Hybrid


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
        method = engine.method(condition.method)
        whole = method.whole if isinstance(method, Hybrid) else ()
        closing = tuple(engine.template.closing_ids())
        cut = [
            document if number in whole else _cut(document, method.ratio, closing)
            for number, document in enumerate(documents, 1)
        ]
        return cut, "recompute"
    return documents, condition.method


def _cut(document: Document, ratio: int, closing: tuple[int, ...]) -> Document:
    """As many tokens of each piece as an extractor keeps entries, a message's end included."""
    pieces = []
    for piece in document.pieces:
        room = -(-len(piece) // ratio)
        ends = bool(closing) and piece[-len(closing) :] == closing and room > 2 * len(closing)
        pieces.append(piece[: room - len(closing)] + closing if ends else piece[:room])
    return replace(document, pieces=tuple(pieces))
