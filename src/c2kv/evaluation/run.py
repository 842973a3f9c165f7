"""A run: a manifest of all that decides it, a line for every sample, and resuming."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from c2kv.errors import ConfigError, DataError
from c2kv.evaluation.conditions import Condition

if TYPE_CHECKING:
    from c2kv.engine import Engine

_log = logging.getLogger(__name__)

MANIFEST, SUMMARY = "manifest.json", "summary.json"
FORMAT = 1  # of manifests, samples and summaries: raised when what they hold changes


def manifest(
    engine: Engine,
    conditions: Sequence[Condition],
    settings: dict[str, Any],
    data: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Versions, machine, model, extractors, data (digests by name) and settings of a run. (Not the
    `batch` of one in float32: there no number depends on it.)"""
    import torch

    from c2kv.methods.block import CONFIG_KEY

    if engine.backbone.dtype == torch.float32:
        settings = {name: value for name, value in settings.items() if name != "batch"}
    makers = {c.name: engine.method(c.method).maker for c in conditions if c.control != "noctx"}
    return {
        "format": FORMAT,
        "versions": {name: _version(name) for name in _PACKAGES},
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": _device(engine.backbone.device),
        },
        "model": engine.backbone.name,
        "backbone_digest": engine.backbone.digest,
        "dtype": str(engine.backbone.dtype).removeprefix("torch."),
        "template_digest": engine.template.digest,
        "tokenizer_digest": _tokenizer_digest(engine.template.tokenizer),
        "segment_tokens": engine.segment_tokens,
        "extractors": {
            name: {
                "digest": maker.digest,
                "variant": maker.variant,
                "ratio": maker.ratio,
                "trained_on": list(maker.trained_on),
            }
            for name, maker in makers.items()
            if maker is not None and maker.digest
        },
        "fine_tuned": getattr(engine.backbone.config, CONFIG_KEY, None),
        "untrained": sorted(n for n, m in makers.items() if m is not None and m.untrained),
        "conditions": [c.name for c in conditions],
        "data": data or {},
        **settings,
    }


_PACKAGES = ("c2kv", "torch", "transformers", "tokenizers", "numpy", "numba", "rouge")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # of one that only some tasks need
        return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _device(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return str(device)
    has = torch.cuda.get_device_properties(device)
    return f"cuda ({has.name}, {has.total_memory / 2**30:.0f} GiB)"


def _tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of its vocabulary, and of how it cuts a text. (Not of its file, which saving a
    model writes anew.)"""
    ids = tokenizer(
        "The mill's 1,743 naïve\n\tmillers – 12.5 %", add_special_tokens=False
    ).input_ids
    return rows_digest([sorted(tokenizer.get_vocab().items()), ids])


def rows_digest(rows: Sequence[Any]) -> str:
    """SHA-256 of samples, wherever they were read from."""
    total = hashlib.sha256()
    for row in rows:
        total.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\0")
    return total.hexdigest()


def is_run(path: Path) -> bool:
    """Whether a run was begun (or brought) there."""
    return (path / MANIFEST).exists() or (path / SUMMARY).exists()


@contextlib.contextmanager
def run_folder(given: Path | None) -> Iterator[Path]:
    """The folder of a run, held against other processes where the system has such locks (Windows
    has not); a temporary one where none is given.

    Raises ConfigError when another process is at work there."""
    if given is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
        return
    given.mkdir(parents=True, exist_ok=True)
    with (given / ".lock").open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is at work in '{given}'; wait for it, or choose another --out"
            ) from error
        yield given


class Run:
    """A folder: `manifest.json`, `NAME.jsonl` for each set, `summary.json` at the end."""

    def __init__(self, folder: Path, described: dict[str, Any]):
        """Start a run, or go on with the one that is there. Raises ConfigError when that one was
        made otherwise."""
        self.folder = folder
        path = folder / MANIFEST
        if path.exists():
            _check_same(folder, read_json(path), described)
        else:
            write_json(path, described)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The samples of a set so far. What an interrupted write left is dropped."""
        return read_rows(self.folder / f"{name}.jsonl")

    def resume(self, name: str, conditions: Sequence[Condition]) -> set[str]:
        """Ids of the set's cases that have a scored sample under every condition. The samples of
        others are forgotten: they are about to be answered again."""
        scored: dict[str, set[str]] = {}
        for row in self.rows(name):
            if "error" not in row:
                scored.setdefault(row["id"], set()).add(row["condition"])
        wanted = {condition.name for condition in conditions}
        done = {case for case, have in scored.items() if wanted <= have}
        kept = [row for row in self.rows(name) if row["id"] in done]
        _write(self.folder / f"{name}.jsonl", "".join(map(_line, kept)))
        return done

    def append(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        with (self.folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, rows)))


def _check_same(folder: Path, there: dict[str, Any], described: dict[str, Any]) -> None:
    """Raises ConfigError for a run that was made otherwise. Another machine with the same device is
    told, and refused only where times are compared."""
    began, here = there.get("machine", {}), described.get("machine", {})
    if described["kind"] in ("qa", "probes") and began.get("device") == here.get("device"):
        if began != here:
            _log.warning("run %s was begun on another machine (%s)", folder, began)
        there = {**there, "machine": here}
    for key in sorted(set(described) | set(there)):
        was, now = there.get(key), described.get(key)
        if was != now:
            if isinstance(was, dict) and isinstance(now, dict):
                part = next(n for n in {**was, **now} if was.get(n) != now.get(n))
                key, was, now = f"{key}: {part}", was.get(part), now.get(part)
            raise ConfigError(
                f"run '{folder}' was made with another {key.replace('_', ' ')} "
                f"({was!r:.80}, now {now!r:.80}); choose another --out, or remove it"
            )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a samples file; a last line cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # the cut may go through a character
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise DataError(f"samples '{path}' are damaged ({error}); remove the file") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read '{path}' ({error}); is it a run's folder?") from error


def first_line(error: Exception) -> str:
    """What a failed sample's row says."""
    return str(error).partition("\n")[0]


def write_json(path: Path, value: Any) -> None:
    _write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    """All of it or, when interrupted, nothing: what was there stays."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
