"""Libraries and methods of one backbone, made as they are asked for; choosing an extractor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from c2kv.backbone import Backbone
from c2kv.errors import ConfigError, MissingExtractorError
from c2kv.extractor import Extractor
from c2kv.extractor.box import box, find
from c2kv.extractor.config import VARIANTS
from c2kv.library import Compressed, SegmentLibrary, SegmentMaker, Uncompressed
from c2kv.methods.base import Materials, Method
from c2kv.methods.registry import build
from c2kv.store import FolderStore


def choose_extractor(
    backbone: Backbone,
    source: str | Path | None,
    untrained: bool = False,
    ratio: int | None = None,
    variant: str | None = None,
) -> Extractor | None:
    """The extractor of a source (folder, name in the box, hub id); a fresh one, where `untrained`
    is asked for; else the first in the box that is for this backbone, ratio and variant, or None
    if none is and neither ratio nor variant was asked for.

    Raises MissingExtractorError, ConfigError and what `Extractor.from_pretrained` raises."""
    if untrained:
        if source is not None:
            raise ConfigError("an extractor is given and a fresh one asked for; choose one")
        return Extractor.from_backbone(backbone, ratio or 4, variant or VARIANTS[0])
    if source is None:
        source = find(backbone.digest, ratio, variant)
    if source is None:
        if ratio is None and variant is None:
            return None
        asked = " and ".join(str(v) for v in (ratio and f"ratio {ratio}", variant) if v)
        raise MissingExtractorError(
            f"no extractor in the box ({', '.join(box()) or 'it is empty'}) is for "
            f"'{backbone.name}' and {asked}; pass one (--extractor)"
        )
    made = Extractor.from_pretrained(source, backbone)
    if variant not in (None, made.config.variant):
        raise ConfigError(f"extractor '{source}' is {made.config.variant}, not {variant}")
    if ratio is not None:
        made.use_ratio(ratio)
    return made


class Libraries:
    """`on_extracted` is told, before and after each extraction pass, the source tokens done and
    those to do in all."""

    on_extracted: Callable[[int, int], None] = staticmethod(lambda done, total: None)

    def __init__(
        self,
        backbone: Backbone,
        extractors: Sequence[Extractor],
        template_digest: str,
        store: FolderStore | None,
        memory_bytes: int,
    ):
        """extractors: the first is the one that methods use unless they name a variant;
        memory_bytes: of segments kept in memory, by each library."""
        self.backbone = backbone
        self._extractors = tuple(extractors)
        self.store = store
        self._template = template_digest
        self._memory_bytes = memory_bytes
        self._made: dict[str, SegmentLibrary] = {}
        self._methods: dict[str, Method] = {}

    def full(self) -> SegmentLibrary:
        """The documents' uncompressed KV."""
        return self._library("full", lambda: Uncompressed(self.backbone))

    def compressed(self, variant: str | None = None) -> SegmentLibrary:
        """The segments of the first extractor (None), of the first of a variant (of those in the
        box, where none given is), or of an untrained one (`random`). Raises MissingExtractorError
        if none is."""
        fit = [one for one in self._extractors if variant in (None, one.config.variant)]
        if fit:
            number = self._extractors.index(fit[0])
            return self._library(f"given {number}", lambda: Compressed(self.backbone, fit[0]))
        if variant is None:
            raise MissingExtractorError(
                f"no extractor is given for '{self.backbone.name}', and none of those in the box "
                "is for it; pass one (--extractor), or ask for a fresh one (--untrained), whose "
                "compressed answers mean nothing"
            )
        like = self._extractors[0].config if self._extractors else None
        ratio = like.ratio if like else None
        if variant == "random":
            kind = like.variant if like else None
            return self._library(variant, lambda: self._maker(True, ratio, kind))
        return self._library(variant, lambda: self._maker(False, ratio, variant))

    def _maker(self, untrained: bool, ratio: int | None, variant: str | None) -> SegmentMaker:
        made = choose_extractor(self.backbone, None, untrained, ratio, variant)
        assert made is not None  # a variant is asked for: it is found, or that has raised
        return Compressed(self.backbone, made)

    def _library(self, name: str, maker: Callable[[], SegmentMaker]) -> SegmentLibrary:
        if name not in self._made:
            library = SegmentLibrary(
                self.backbone, maker(), self._template, self.store, self._memory_bytes
            )
            library.on_extracted = lambda done, total: self.on_extracted(done, total)
            self._made[name] = library
        return self._made[name]

    def method(self, name: str) -> Method:
        """A method of `c2kv.methods.registry` by name. Raises ConfigError for unknown ones."""
        if name not in self._methods:
            materials = Materials(self.backbone, self.full(), self.compressed)
            self._methods[name] = build(name, materials)
        return self._methods[name]

    def forget(self) -> None:
        """Drop all segments that memory holds (not the store)."""
        for library in self._made.values():
            library.forget()
