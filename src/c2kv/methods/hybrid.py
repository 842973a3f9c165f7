"""Hybrid: documents that matter most at full KV, the rest compressed, in one composition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from c2kv.composition import Composition
from c2kv.document import Document
from c2kv.library import Retrieval, SegmentLibrary
from c2kv.methods.base import Materials, Method, Prefilled, Stored, get_segments
from c2kv.methods.c2kv import composable
from c2kv.methods.registry import refuse


class Hybrid(Stored):
    """The first `count` documents (None: all) as the backbone's own KV. Order documents by
    relevance, as a retriever does."""

    def __init__(
        self, name: str, full: SegmentLibrary, compressed: SegmentLibrary, count: int | None
    ):
        super().__init__(name, compressed)
        self.full = full
        self.count = count

    def prepare(self, documents: Sequence[Document]) -> Retrieval:
        count = len(documents[: self.count])
        whole = get_segments(self.full, documents[:count])
        return whole + get_segments(self.library, documents[count:])

    def prefill(self, prefix: Composition, documents: Sequence[Document]) -> Prefilled:
        got = self.prepare(documents)
        return Prefilled.of(got, replace(prefix, segments=tuple(got.segments)))


def build(name: str, parameters: list[str], materials: Materials) -> Method:
    (given,) = parameters if len(parameters) == 1 else ("",)
    if given != "all" and not given.isdecimal():
        raise refuse(name, "hybrid")
    count = None if given == "all" else int(given)
    return Hybrid(name, materials.full, composable(name, materials.compressed(None)), count)
