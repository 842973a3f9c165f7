"""A folder of segments: one checked safetensors file each, and no index beside the files."""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from c2kv.errors import CorruptSegmentError, StoreError
from c2kv.segment import FORMAT_VERSION, Segment, SegmentIdentity
from c2kv.store.format import (
    DTYPES,
    IDENTITY_FIELDS,
    Header,
    check,
    explained,
    load,
    memory_of,
    read_header,
)

_log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")
_FILE, _LEFTOVER = r"[0-9a-f]{64}\.safetensors", r"[0-9a-f]{64}\.[0-9a-f]{32}\.tmp"
_STALE_SECONDS = 3600


@dataclass(frozen=True)
class StoredSegment:
    """What a stored file's header says. nbytes: file size; created: seconds since the epoch."""

    key: str
    label: str
    span: int
    ratio: int
    entries: int
    variant: str
    dtype: str
    backbone: str
    extractor: str
    tenant: str
    nbytes: int
    created: float


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderStore:
    """Segments as `root/<key[:2]>/<key>.safetensors`; threads and processes may share a root.

    The files are the index: a store is whatever its folder holds. Corrupt files are moved to
    `root/quarantine/`, never deleted."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        try:
            with explained("make a segment store at", self.root):
                self.root.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:
            raise StoreError(
                f"cannot make a segment store at {self.root}; choose another store folder"
            ) from error
        for path in self._paths(_LEFTOVER):
            try:
                # A younger one may belong to a writer at work.
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
            except OSError as error:
                _log.warning("leftover %s was not removed (%s)", path, error.strerror)

    def get(self, identity: SegmentIdentity) -> Segment | None:
        """The stored segment after full verification, kv contiguous on CPU; None on a miss.

        A corrupt file is a miss: quarantined and logged. StoreError if it cannot be read."""
        path = self._path(identity.key)
        try:
            segment = load(path)
            for name in (*IDENTITY_FIELDS, "token_ids"):
                same = getattr(segment.identity, name) == getattr(identity, name)
                check(same, f"its {name} differs from the requested one")
        except FileNotFoundError:
            return None
        except CorruptSegmentError as reason:
            self._quarantine(path, reason)
            return None
        return segment

    def put(self, segment: Segment, label: str = "") -> bool:
        """Store durably; False, and nothing written, if a file of the declared size is there.

        StoreError if kv is not of its identity's dtype, or cannot be written: the store is then
        as before."""
        identity, kv, path = segment.identity, segment.kv, self._path(segment.key)
        if kv.dtype != DTYPES.get(identity.dtype, (None, None))[1] or not kv.numel():
            raise StoreError(
                f"cannot store {kv.dtype} kv of shape {tuple(kv.shape)} as {identity.dtype!r}: "
                f"give non-empty kv of the identity's dtype, one of {', '.join(DTYPES)}"
            )
        try:
            read_header(path)
            return False
        except FileNotFoundError:
            pass
        except CorruptSegmentError as reason:
            self._quarantine(path, reason)
        metadata = {name: str(getattr(identity, name)) for name in IDENTITY_FIELDS}
        metadata |= {"format_version": str(FORMAT_VERSION), "created": f"{time.time():.6f}"}
        metadata["label"] = label
        header = Header(metadata, list(kv.shape), identity.span)
        ids = struct.pack(f"<{identity.span}q", *identity.token_ids)
        memory = memory_of(kv.detach().cpu().contiguous())
        metadata["checksum"] = header.checksum(ids, memory)
        self._write(path, header.encode(), ids, memory)
        return True

    def entries(self) -> list[StoredSegment]:
        """What is stored, oldest first, from headers alone; unreadable files are only logged."""
        found = []
        for path in self._paths():
            try:
                header = read_header(path)
            except FileNotFoundError:  # removed since it was listed
                continue
            except StoreError as reason:
                _log.warning("%s is not listed: %s", path, reason)
                continue
            names = ("label", "variant", "dtype", "backbone", "extractor", "tenant")
            stored = StoredSegment(
                **{name: header.metadata[name] for name in names},
                key=path.stem,
                span=header.span,
                ratio=int(header.metadata["ratio"]),
                entries=header.shape[3],
                nbytes=len(header.encode()) + header.data_nbytes,
                created=float(header.metadata["created"]),
            )
            found.append(stored)
        return sorted(found, key=lambda stored: (stored.created, stored.key))

    def find(self, prefix: str) -> str:
        """The one key that starts with prefix, of at least 4 hex digits; StoreError otherwise."""
        if not re.fullmatch(r"[0-9a-f]{4,64}", prefix):
            raise StoreError(f"{prefix!r} is no start of a key: give 4 hex digits or more")
        keys = [path.stem for path in self._paths() if path.stem.startswith(prefix)]
        if not keys:
            raise StoreError(f"no segment in {self.root} starts with {prefix}: list the store")
        if len(keys) > 1:
            raise StoreError(f"{prefix} is ambiguous: give more digits of {' or '.join(keys)}")
        return keys[0]

    def remove(self, key: str) -> None:
        """Delete one segment. StoreError if it is not there or may not be deleted."""
        absent = f"no segment {key!r} in {self.root}: give a full key, as the store lists it"
        if not _KEY.fullmatch(key):
            raise StoreError(absent)
        try:
            with explained("remove", self._path(key)):
                self._path(key).unlink()
        except FileNotFoundError as error:
            raise StoreError(absent) from error

    def verify(self) -> Iterator[tuple[str, str | None]]:
        """(key, None if sound, else the reason) of each file, read in full; moves nothing."""
        for path in self._paths():
            reason = None
            try:
                check(load(path).key == path.stem, "it holds a segment of another key")
            except FileNotFoundError:  # removed since it was listed
                continue
            except StoreError as error:
                reason = str(error)
            except (ValueError, struct.error):
                reason = "its token ids or texts are impossible"
            yield path.stem, reason

    @property
    def nbytes(self) -> int:
        """Bytes of all stored files, the quarantine not counted."""
        total = 0
        for path in self._paths():
            with suppress(FileNotFoundError):  # removed since it was listed
                total += path.stat().st_size
        return total

    def _path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.safetensors"

    def _paths(self, pattern: str = _FILE) -> list[Path]:
        """Files of that name in the folders of keys, sorted; foreign files are left alone."""
        with explained("list", self.root):
            named = [f for f in self.root.iterdir() if re.fullmatch("[0-9a-f]{2}", f.name)]
            folders = [f for f in named if f.is_dir()]
            files = [path for folder in folders for path in folder.iterdir()]
        matching = [path for path in files if re.fullmatch(pattern, path.name)]
        return sorted(path for path in matching if path.name.startswith(path.parent.name))

    def _write(self, path: Path, *parts: bytes | memoryview) -> None:
        """All of it or nothing: readers only ever see a file that is complete and on disk."""
        temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            with suppress(FileExistsError):
                path.parent.mkdir()
                _sync_folder(self.root)
            try:
                with temporary.open("xb") as file:
                    for part in parts:
                        file.write(part)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except OSError as error:
            needed = sum(len(part) for part in parts)
            free = shutil.disk_usage(self.root).free if self.root.exists() else 0
            raise StoreError(
                f"cannot write {path} ({error.strerror}): {needed} bytes needed, {free} free; "
                "free space there or choose another store folder"
            ) from error

    def _quarantine(self, path: Path, reason: CorruptSegmentError) -> None:
        """Move a corrupt file out of the way, under a name no earlier one has."""
        kept = self.root / "quarantine" / f"{path.stem}.{uuid.uuid4().hex}.safetensors"
        try:
            kept.parent.mkdir(exist_ok=True)
            path.replace(kept)
            outcome = f"kept as {kept}"
        except OSError as error:
            outcome = f"not moved: {error.strerror}"
        _log.warning("corrupt segment %s is a miss: %s (%s)", path, reason, outcome)
