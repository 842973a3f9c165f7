"""C2KV: load compressed segments, rotate them to their places, concatenate. No blending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from c2kv.composition import Composition
from c2kv.library import SegmentLibrary
from c2kv.methods.base import Prefilled


class C2KV:
    """Compressed, composable segments from a library (arXiv 2607.17715)."""

    name = "c2kv"

    def __init__(self, library: SegmentLibrary):
        self.library = library
        self.ratio = library.extractor.config.ratio

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
