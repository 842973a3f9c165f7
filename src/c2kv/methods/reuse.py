"""Reuse without recomputation: load segments, rotate them to their places, concatenate.

With an extractor's segments this is C2KV (arXiv 2607.17715); with the backbone's own KV it is
full reuse, the paper's lower bound for methods that keep everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from c2kv.composition import Composition
from c2kv.library import SegmentLibrary
from c2kv.methods.base import Prefilled


class Reuse:
    """Segments of a library behind the prefix; nothing is blended."""

    def __init__(self, name: str, library: SegmentLibrary):
        self.name = name
        self.library = library
        self.ratio = library.maker.ratio

    def prefill(
        self, prefix: Composition, pieces: Sequence[Sequence[int]], labels: Sequence[str]
    ) -> Prefilled:
        got = self.library.get(pieces, labels)
        return Prefilled(
            replace(prefix, segments=tuple(got.segments)),
            from_memory=got.from_memory,
            from_disk=got.from_disk,
            extracted=got.extracted,
            load=got.load_seconds,
            extract=got.extract_seconds,
        )
