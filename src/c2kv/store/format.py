"""The file format of a stored segment: safetensors with a canonical header and a checksum."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from c2kv.errors import CorruptSegmentError, StoreError
from c2kv.segment import FORMAT_VERSION, Segment, SegmentIdentity

DTYPES = {
    "float32": ("F32", torch.float32),
    "bfloat16": ("BF16", torch.bfloat16),
    "float16": ("F16", torch.float16),
}
IDENTITY_FIELDS = ("backbone", "extractor", "variant", "ratio", "dtype", "template", "tenant")
_METADATA = {*IDENTITY_FIELDS, "format_version", "label", "created", "checksum"}


def check(sound: bool, reason: str) -> None:
    if not sound:
        raise CorruptSegmentError(reason)


@dataclass(frozen=True)
class Header:
    """metadata: a text for each name of `_METADATA`; shape: of kv; span: token ids in the file."""

    metadata: dict[str, str]
    shape: list[int]
    span: int

    @property
    def data_nbytes(self) -> int:
        return 8 * self.span + math.prod(self.shape) * DTYPES[self.metadata["dtype"]][1].itemsize

    def encode(self) -> bytes:
        """The only bytes this header can have in a file: safetensors, length included."""
        code, ids_end = DTYPES[self.metadata["dtype"]][0], 8 * self.span
        offsets = [ids_end, self.data_nbytes]
        header: dict[str, Any] = {
            "__metadata__": self.metadata,
            "kv": {"dtype": code, "shape": self.shape, "data_offsets": offsets},
            "token_ids": {"dtype": "I64", "shape": [self.span], "data_offsets": [0, ids_end]},
        }
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def checksum(self, ids: bytes, kv: memoryview) -> str:
        """Over kv, the token ids, and this header without its checksum."""
        rest = {name: text for name, text in self.metadata.items() if name != "checksum"}
        digest = xxhash.xxh3_128(kv)
        digest.update(ids)
        digest.update(Header(rest, self.shape, self.span).encode())
        return digest.hexdigest()

    @classmethod
    def read(cls, file: BinaryIO) -> Header:
        """CorruptSegmentError unless sound, unaltered, and declaring exactly the file's size."""
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        check(len(start) == 8 and length <= size - 8, "no header fits in it")
        raw = file.read(length)
        try:
            fields = json.loads(raw.decode("ascii"))
            metadata, shape = fields["__metadata__"], fields["kv"]["shape"]
            (span,) = fields["token_ids"]["shape"]
            version = metadata["format_version"]
            check(version == str(FORMAT_VERSION), f"it has format version {version!r}")
            check(metadata.keys() == _METADATA, "metadata is missing or unknown")
            check(all(isinstance(text, str) for text in metadata.values()), "metadata is no text")
            check(metadata["dtype"] in DTYPES, "its dtype is unknown")
            check(math.isfinite(float(metadata["created"])), "its time is unknown")
            check(all(type(n) is int and n > 0 for n in (span, *shape)), "its shapes are invalid")
            entries = -(-span // int(metadata["ratio"]))
            check(len(shape) == 5 and shape[3] == entries, "its entries do not fit its ratio")
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise CorruptSegmentError("its header cannot be parsed") from error
        header = cls(metadata, shape, span)
        check(size - 8 - length == header.data_nbytes, "its size is not the declared one")
        check(start + raw == header.encode(), "its header was altered")
        return header


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """OSErrors as StoreError, save FileNotFoundError: that one callers answer."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        advice = "check the folder and its permissions, or choose another store folder"
        raise StoreError(f"cannot {action} {path} ({error.strerror}): {advice}") from error


def read_header(path: Path) -> Header:
    with explained("read", path), path.open("rb") as file:
        return Header.read(file)


def load(path: Path) -> Segment:
    """One read straight into the segment's own memory and one checksum pass.

    Not through safetensors: its `load` copies once more (twice the time), its `load_file` maps
    the file, and a map dies with SIGBUS when the file is truncated later."""
    with explained("read", path), path.open("rb") as file:
        header = Header.read(file)  # compares sizes before anything large is allocated
        metadata = header.metadata
        ids = file.read(8 * header.span)
        kv = torch.empty(header.shape, dtype=DTYPES[metadata["dtype"]][1])
        memory = memory_of(kv)
        check(file.readinto(memory) == memory.nbytes, "it ends early")
    check(header.checksum(ids, memory) == metadata["checksum"], "its checksum differs")
    fields: dict[str, Any] = {name: metadata[name] for name in IDENTITY_FIELDS}
    fields |= {"ratio": int(metadata["ratio"])}
    return Segment(SegmentIdentity(token_ids=struct.unpack(f"<{header.span}q", ids), **fields), kv)


def memory_of(kv: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not a copy."""
    return kv.view(-1).view(torch.uint8).numpy().data
