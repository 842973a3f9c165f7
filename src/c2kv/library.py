"""SegmentLibrary: hands out a document piece's segment from memory, else disk, else extracts it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor

from c2kv.backbone import Backbone
from c2kv.errors import NumericalError
from c2kv.extractor import Extractor, extract
from c2kv.fullkv import full_kv
from c2kv.segment import Segment, SegmentIdentity
from c2kv.store import FolderStore

DEFAULT_MEMORY_BYTES = 2 << 30
# Padded source tokens of one extraction pass: bounds its memory.
BATCH_TOKENS = 2048


@dataclass
class Retrieval:
    """Segments in the order asked for, and where they came from. Times in seconds."""

    segments: list[Segment] = field(default_factory=list)
    from_memory: int = 0
    from_disk: int = 0
    extracted: int = 0
    load_seconds: float = 0.0
    extract_seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def __add__(self, other: Retrieval) -> Retrieval:
        return Retrieval(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class SegmentMaker(Protocol):
    """Turns documents into position-free KV: what a library's segments are made by.

    digest, variant, ratio: as in SegmentIdentity; untrained: its segments mean nothing;
    trained_on: names of the data it learnt from."""

    digest: str
    variant: str
    ratio: int
    untrained: bool
    trained_on: tuple[str, ...]

    def make(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        """One tensor [layers, 2, kv_heads, ceil(n / ratio), head_dim] a document."""
        ...


class Compressed:
    """Segments of an extractor."""

    def __init__(self, backbone: Backbone, extractor: Extractor):
        extractor.check_backbone(backbone)
        self._backbone = backbone
        self._extractor = extractor
        self.untrained = not extractor.trained
        self.trained_on = extractor.config.trained_on
        self.digest = extractor.digest
        self.variant = extractor.config.variant
        self.ratio = extractor.config.ratio

    def make(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        return extract(self._backbone, self._extractor, documents)


class Uncompressed:
    """The backbone's own KV of each document alone."""

    digest, variant, ratio, untrained = "", "full", 1, False
    trained_on: tuple[str, ...] = ()

    def __init__(self, backbone: Backbone):
        self._backbone = backbone

    def make(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        return full_kv(self._backbone, documents)


class SegmentLibrary:
    """Segments of one backbone and maker, for one tenant.

    memory_bytes bounds the segments kept in memory (least recently used go first); what a store
    holds survives the process. `on_extracted` is told, before and after each extraction pass, the
    source tokens done and those to do in all."""

    on_extracted: Callable[[int, int], None] = staticmethod(lambda done, total: None)

    def __init__(
        self,
        backbone: Backbone,
        maker: SegmentMaker,
        template_digest: str,
        store: FolderStore | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        tenant: str = "",
    ):
        self.backbone = backbone
        self.maker = maker
        self.store = store
        self._template = template_digest
        self._tenant = tenant
        self._memory: OrderedDict[str, Segment] = OrderedDict()
        self._memory_limit = memory_bytes
        self._memory_used = 0

    def identity(self, piece: Sequence[int]) -> SegmentIdentity:
        """The identity of the segment of a piece's token ids."""
        return SegmentIdentity(
            backbone=self.backbone.digest,
            extractor=self.maker.digest,
            variant=self.maker.variant,
            ratio=self.maker.ratio,
            dtype=str(self.backbone.dtype).removeprefix("torch."),
            template=self._template,
            token_ids=tuple(piece),
            tenant=self._tenant,
        )

    def get(
        self,
        pieces: Sequence[Sequence[int]],
        labels: Sequence[str] | None = None,
    ) -> Retrieval:
        """The segments of `pieces` (token ids); `labels` name newly stored ones for people."""
        result, start = Retrieval(), self.backbone.now()
        identities = [self.identity(piece) for piece in pieces]
        found: dict[str, Segment] = {}
        missing: dict[str, int] = {}
        for index, identity in enumerate(identities):
            key = identity.key
            if key in found or key in missing:
                continue
            if (segment := self._memory.get(key)) is not None:
                self._memory.move_to_end(key)
                result.from_memory += 1
            elif self.store is not None and (segment := self.store.get(identity)) is not None:
                self._remember(segment)
                result.from_disk += 1
            if segment is None:
                missing[key] = index
            else:
                found[key] = segment
        result.load_seconds = self.backbone.now() - start

        start = self.backbone.now()
        done, total = 0, sum(len(pieces[i]) for i in missing.values())
        if total:
            self.on_extracted(0, total)
        for batch in _batches([(i, len(pieces[i])) for i in missing.values()]):
            for index, segment in zip(
                batch, self._extract([identities[i] for i in batch]), strict=True
            ):
                if self.store is not None:
                    self.store.put(segment, labels[index] if labels else "")
                self._remember(segment)
                found[segment.key] = segment
            result.extracted += len(batch)
            done += sum(len(pieces[i]) for i in batch)
            self.on_extracted(done, total)
        result.extract_seconds = self.backbone.now() - start if missing else 0.0
        result.segments = [found[identity.key] for identity in identities]
        return result

    def forget(self) -> None:
        """Drop what memory holds (not the store): the next request reads from disk."""
        self._memory.clear()
        self._memory_used = 0

    @torch.no_grad()
    def _extract(self, identities: Sequence[SegmentIdentity]) -> list[Segment]:
        kvs = self.maker.make([identity.token_ids for identity in identities])
        if not all(kv.isfinite().all() for kv in kvs):
            raise NumericalError(
                f"extraction in {self.backbone.dtype} gave values that are not finite, and stored "
                "nothing of them; check the model with `c2kv doctor`, or use float32"
            )
        # Segments live in host memory, wherever they came from; the device holds caches.
        if self.backbone.device.type != "cpu":
            kvs = [kv.to("cpu") for kv in kvs]
        elif len(kvs) > 1:  # a view would keep the whole padded batch alive
            kvs = [kv.clone(memory_format=torch.contiguous_format) for kv in kvs]
        return [Segment(*pair) for pair in zip(identities, kvs, strict=True)]

    def _remember(self, segment: Segment) -> None:
        if segment.key in self._memory:
            return
        self._memory[segment.key] = segment
        self._memory_used += segment.nbytes
        while self._memory_used > self._memory_limit and len(self._memory) > 1:
            _, dropped = self._memory.popitem(last=False)
            self._memory_used -= dropped.nbytes


def _batches(lengths: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Group (index, length) pairs of like lengths, each group within BATCH_TOKENS padded."""
    batch: list[int] = []
    for index, length in sorted(lengths, key=lambda pair: pair[1]):
        # Sorted: the newcomer is the longest, and sets the padded width.
        if batch and (len(batch) + 1) * length > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
