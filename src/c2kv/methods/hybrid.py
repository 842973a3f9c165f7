"""Hybrid: documents that matter most at full KV, the rest compressed, in one composition."""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import groupby

from c2kv.composition import Composition
from c2kv.document import Document
from c2kv.library import Retrieval, SegmentLibrary
from c2kv.methods.base import Materials, Method, Prefilled, Stored, get_segments
from c2kv.methods.c2kv import composable
from c2kv.methods.registry import refuse


class Hybrid(Stored):
    """Some documents as the backbone's own KV. whole: their numbers from 1; those that a prompt
    does not have are passed over."""

    def __init__(
        self, name: str, full: SegmentLibrary, compressed: SegmentLibrary, whole: Container[int]
    ):
        super().__init__(name, compressed)
        self.full = full
        self.whole = whole

    def prepare(self, documents: Sequence[Document]) -> Retrieval:
        got = Retrieval()
        numbered = enumerate(documents, 1)
        for whole, some in groupby(numbered, key=lambda one: one[0] in self.whole):
            library = self.full if whole else self.library
            got = got + get_segments(library, [document for _, document in some])
        return got

    def prefill(self, prefix: Composition, documents: Sequence[Document]) -> Prefilled:
        got = self.prepare(documents)
        return Prefilled.of(got, replace(prefix, segments=tuple(got.segments)))


def build(name: str, parameters: list[str], materials: Materials) -> Method:
    """`hybrid-2`: the first two documents; `hybrid-at-1-3`: the first and the third;
    `hybrid-all`."""
    match = re.fullmatch(r"hybrid-(?:all|(\d+)|at((?:-[1-9]\d*)+))", name)
    if match is None:
        raise refuse(name, "hybrid")
    whole: Container[int] = range(1, 1 + int(match[1] or sys.maxsize - 1))
    if match[2]:
        whole = frozenset(map(int, match[2][1:].split("-")))
    return Hybrid(name, materials.full, composable(name, materials.compressed(None)), whole)
