"""What every method does: get ready ahead of time, then put documents behind a prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from c2kv.backbone import Backbone
from c2kv.composition import Composition
from c2kv.document import Document
from c2kv.library import Retrieval, SegmentLibrary, SegmentMaker


@dataclass(frozen=True)
class Prefilled:
    """A composition ready to be asked, what of it came from where, and the seconds spent: `load`
    bringing stored state into host memory, `extract` making it now, `place` rotating and copying
    before a cache is opened, `blend` computing online. (Most is placed when a cache is opened.)

    loaded_bytes: stored state it was made from; recomputed: token·layer products of `blend`
    (every layer over every token is what full recompute does)."""

    composition: Composition
    segments: int = 0
    from_memory: int = 0
    from_disk: int = 0
    extracted: int = 0
    loaded_bytes: int = 0
    recomputed: int = 0
    load: float = 0.0
    extract: float = 0.0
    place: float = 0.0
    blend: float = 0.0

    @classmethod
    def of(
        cls,
        got: Retrieval,
        composition: Composition,
        recomputed: int = 0,
        place: float = 0.0,
        blend: float = 0.0,
    ) -> Prefilled:
        """A composition made from retrieved segments."""
        return cls(
            composition,
            segments=len(got.segments),
            from_memory=got.from_memory,
            from_disk=got.from_disk,
            extracted=got.extracted,
            loaded_bytes=got.nbytes,
            recomputed=recomputed,
            load=got.load_seconds,
            extract=got.extract_seconds,
            place=place,
            blend=blend,
        )

    @property
    def seconds(self) -> float:
        """All parts: what stands before the opening of a cache."""
        return self.load + self.extract + self.place + self.blend

    def cost(self) -> dict[str, Any]:
        """All but the composition."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "composition"}


class Method(Protocol):
    """name as users write it; ratio: source tokens per entry; maker: of the segments it reuses."""

    name: str
    ratio: int
    maker: SegmentMaker | None

    def prepare(self, documents: Sequence[Document]) -> Retrieval:
        """Ahead of time: make and store what `prefill` will load (its bytes in the result)."""
        ...

    def prefill(self, prefix: Composition, documents: Sequence[Document]) -> Prefilled:
        """On request: put the documents behind `prefix`, a composition without segments. The
        question is computed afterwards, by the same code for every method."""
        ...


@dataclass(frozen=True)
class Materials:
    """What methods are built from: the backbone, the library of its own uncompressed KV, and
    the library of an extractor by variant (`plain`, `residual`; None: the engine's extractor;
    `random`: an untrained one)."""

    backbone: Backbone
    full: SegmentLibrary
    compressed: Callable[[str | None], SegmentLibrary]


class Stored:
    """A method that keeps a library's segments of the documents; subclasses say how to use them."""

    def __init__(self, name: str, library: SegmentLibrary):
        self.name = name
        self.library = library
        self.maker: SegmentMaker | None = library.maker
        self.ratio = library.maker.ratio

    def prepare(self, documents: Sequence[Document]) -> Retrieval:
        return get_segments(self.library, documents)


def get_segments(library: SegmentLibrary, documents: Sequence[Document]) -> Retrieval:
    """The segments of documents' pieces, in order."""
    pieces = [piece for document in documents for piece in document.pieces]
    return library.get(pieces, [label for document in documents for label in document.labels])
