"""Reuse without recomputation: load segments, rotate them to their places, concatenate.

With the backbone's own KV this is full reuse, the paper's lower bound for methods that keep
everything; with an extractor's segments it is C2KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from c2kv.composition import Composition
from c2kv.document import Document
from c2kv.methods.base import Materials, Method, Prefilled, Stored
from c2kv.methods.registry import refuse


class Reuse(Stored):
    """Segments of a library behind the prefix; nothing is blended."""

    def prefill(self, prefix: Composition, documents: Sequence[Document]) -> Prefilled:
        got = self.prepare(documents)
        return Prefilled.of(got, replace(prefix, segments=tuple(got.segments)))


def build(name: str, parameters: list[str], materials: Materials) -> Method:
    if parameters:
        raise refuse(name, "reuse")
    return Reuse(name, materials.full)
