"""Streams training records from files and the hub, and names every record that is not one.

Nothing is read whole: JSONL goes line by line, parquet by row batches, and the official HotpotQA,
2WikiMultiHopQA and SQuAD files, each one big JSON array (SQuAD: of articles, in an object), are
decoded element by element.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from c2kv import extras
from c2kv.errors import DataError
from c2kv.training.formats import FORMATS, UNANSWERABLE, Passage, Record, detect

__all__ = [
    "FORMATS",
    "UNANSWERABLE",
    "BadRecord",
    "Passage",
    "Record",
    "detect_format",
    "read_records",
]


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used. `line` is its line in a JSONL file (unit `line`), elsewhere
    its number (unit `record`): row, array element or, in SQuAD's articles, question; from 1."""

    source: str
    line: int
    reason: str
    unit: str = "line"

    def __str__(self) -> str:
        between = ":" if self.unit == "line" else f": {self.unit} "
        return f"{self.source}{between}{self.line}: {self.reason}"


# A row as stored, or why it could not even be decoded, with its number.
_Row = tuple[int, Any, str | None]

_CHUNK = 1 << 20
_LARGEST_ELEMENT = 1 << 26  # characters; the largest SQuAD article has about 10^6
_BATCH_ROWS = 256
_UNDETECTED_ROWS = 100  # how many undecodable rows may precede the one that tells the format


def read_records(
    source: str | Path,
    format: str = "auto",
    split: str | None = None,
    on_bad: Callable[[BadRecord], None] | None = None,
) -> Iterator[Record]:
    """Yield the records of a .json, .jsonl or .parquet file (JSON may be gzipped) or of
    `hub:owner/name[:config]` (split: `train` unless given).

    on_bad is called for every record that cannot be used, those marked unanswerable included;
    by default the first one raises. Raises DataError, too, when the source cannot be read."""
    if format != "auto" and format not in FORMATS:
        raise DataError(f"format '{format}' is unknown; use auto, {', '.join(FORMATS)}")
    return _read(str(source), format, split, on_bad or _raise)


def detect_format(source: str | Path, split: str | None = None) -> str:
    """The format of a file or hub data set, told by its first record.

    Raises DataError naming the formats if it is none of them."""
    unit, rows = _open(str(source), split)
    with closing(rows):
        return _detect(str(source), unit, rows)[0]


def _read(
    source: str, format: str, split: str | None, on_bad: Callable[[BadRecord], None]
) -> Iterator[Record]:
    unit, rows = _open(source, split)
    with closing(rows):
        first: list[_Row] = []
        if format == "auto":
            format, first = _detect(source, unit, rows)
        parse, number = FORMATS[format], 0
        for number, row, reason in chain(first, rows):
            if reason is None:
                try:
                    record = parse(row)
                except ValueError as error:
                    reason = str(error)
                else:
                    yield record
                    continue
            on_bad(BadRecord(source, number, reason, unit))
    if not number:
        raise DataError(f"'{source}' holds no records; check that it is the right file")


def _raise(bad: BadRecord) -> None:
    raise DataError(f"{bad}; mend or remove it (`c2kv data inspect` counts such records)")


def _detect(source: str, unit: str, rows: Iterator[_Row]) -> tuple[str, list[_Row]]:
    """The format, and the rows that were taken to tell it."""
    taken: list[_Row] = []
    for entry in rows:
        taken.append(entry)
        if entry[2] is None or len(taken) == _UNDETECTED_ROWS:
            break
    if not taken:
        raise DataError(f"'{source}' holds no records; check that it is the right file")
    if taken[-1][2] is not None:
        raise DataError(f"'{source}' has no readable record: {unit} 1 is {taken[0][2]}")
    row = taken[-1][1]
    if (name := detect(row)) is None:
        seen = ", ".join(list(row)[:8]) if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"'{source}' is in no known format (its record holds: {seen}); convert it to one of "
            f"{', '.join(FORMATS)}, or name one if its first record is unusual"
        )
    return name, taken


def _open(source: str, split: str | None) -> tuple[str, Any]:
    """What numbers count (lines or records), and a generator of rows."""
    if source.startswith("hub:"):
        return "record", _hub_rows(source, split or "train")
    if split is not None:
        raise DataError(f"'{source}' is a file, read whole; a split ('{split}') is for hub: names")
    if Path(source).exists() and not Path(source).is_file() and not Path(source).is_dir():
        raise DataError(f"'{source}' is not a regular file; save it to one first")
    with _reading(source), open(source, "rb") as file:
        magic = file.read(4)
    if magic == b"PAR1":
        return "record", _parquet_rows(source)
    packed = magic[:2] == b"\x1f\x8b"
    if source.endswith(".gz") and not packed:
        state = "is not gzip" if magic else "is empty"
        raise DataError(f"'{source}' is named .gz but {state}; rename it or fetch it again")
    with _reading(source), _binary(source, packed) as file:
        head = file.read(4096)
    if not head.strip():
        raise DataError(f"'{source}' is empty; fetch it again or leave it out")
    if b"\0" in head:
        raise DataError(
            f"'{source}' is binary; give JSON, JSONL (plain or gzip) or parquet in UTF-8"
        )
    start = _ARRAY.match(head.decode("utf-8-sig", errors="replace"))
    if start is None or _BARE_MESSAGES.match(head):
        return "line", _line_rows(source, packed)
    return "record", _array_rows(source, packed, start[0])


# A top-level array, or SQuAD's object around one.
_ARRAY = re.compile(r'\s*(?:\{\s*(?:"[^"]*"\s*:\s*(?:"[^"]*"|[\w.+-]+)\s*,\s*)*"data"\s*:\s*)?\[')
# A line that is a list of chat messages, not the start of an array of records.
_BARE_MESSAGES = re.compile(rb'(?:\xef\xbb\xbf)?\s*\[\s*\{\s*"(?:role|content|from|value)"\s*:')


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Turns what reading a damaged or missing file raises into one line with a remedy."""
    try:
        yield
    except IsADirectoryError:
        raise DataError(f"'{source}' is a folder; name the files in it") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"'{source}' is damaged or cut short ({error}); fetch or compress it again"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"'{source}' is not UTF-8 text; convert it first") from error
    except OSError as error:
        raise DataError(
            f"cannot read '{source}': {error.strerror or error}; check the path and permissions"
        ) from error


def _binary(source: str, packed: bool) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(source, "rb") if packed else open(source, "rb"))


def _line_rows(source: str, packed: bool) -> Iterator[_Row]:
    with _reading(source), _binary(source, packed) as file:
        for number, raw in enumerate(file, 1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text) if text else None
            except UnicodeDecodeError:
                yield number, None, "not UTF-8 text"
            except (ValueError, RecursionError) as error:
                yield number, None, f"not JSON ({error})"
            else:
                if text:
                    yield number, row, None


def _array_rows(source: str, packed: bool, opening: str) -> Iterator[_Row]:
    number = 0
    with _reading(source), _binary(source, packed) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig")
        text.read(len(opening))
        for element in _elements(text, source, opening):
            for row in _questions(element):
                number += 1
                yield number, row, None


def _elements(text: IO[str], source: str, opening: str) -> Iterator[Any]:
    """Decode the elements of the JSON array that `text` stands in, one at a time."""
    decoder = json.JSONDecoder()
    buffer, at, number = "", 0, 0

    def fill() -> bool:
        nonlocal buffer, at
        more = text.read(max(_CHUNK, len(buffer)))
        buffer, at = buffer[at:] + more, 0
        return bool(more)

    def token() -> str:
        """The next character that is not space; empty at the end of the file."""
        nonlocal at
        while True:
            at = _SPACE.match(buffer, at).end()  # type: ignore[union-attr]
            if at < len(buffer) or not fill():
                return buffer[at : at + 1]

    broken = f"'{source}' is damaged or cut short"
    while (mark := token()) != "]":
        if number:
            if mark != ",":
                raise DataError(f"{broken} after record {number}; fetch it again")
            at += 1
            token()
        number += 1
        while True:
            try:
                element, at = decoder.raw_decode(buffer, at)
                break
            except (ValueError, RecursionError) as error:
                if len(buffer) - at > _LARGEST_ELEMENT or not fill():
                    raise DataError(
                        f"{broken}: no JSON in record {number} ({error}); fetch it again"
                    ) from error
        yield element
    rest = buffer[at:] + text.read()
    try:  # what surrounds the elements must be one JSON value: two arrays are not one
        json.loads(opening + rest)
    except ValueError as error:
        raise DataError(
            f"'{source}' has more after its {number} records; split it, or make it JSONL"
        ) from error


_SPACE = re.compile(r"\s*")


def _questions(element: Any) -> Iterator[Any]:
    """A SQuAD article as one row a question, anything else as it is."""
    paragraphs = element.get("paragraphs") if isinstance(element, dict) else None
    nested = (
        isinstance(paragraphs, list)
        and bool(paragraphs)
        and all(
            isinstance(p, dict)
            and isinstance(p.get("qas"), list)
            and all(isinstance(qa, dict) for qa in p["qas"])
            for p in paragraphs
        )
    )
    if not nested:
        yield element
        return
    for paragraph in element["paragraphs"]:
        for qa in paragraph["qas"]:
            yield {**qa, "title": element.get("title"), "context": paragraph.get("context")}


def _parquet_rows(source: str) -> Iterator[_Row]:
    parquet = extras.load("pyarrow.parquet", "c2kv[train]")
    number = 0
    with _reading(source):
        try:
            with parquet.ParquetFile(source) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row, None
        except importlib.import_module("pyarrow").ArrowException as error:
            raise DataError(
                f"'{source}' is damaged or not parquet ({error}); fetch it again"
            ) from error


def _hub_rows(source: str, split: str) -> Iterator[_Row]:
    name, _, config = source.removeprefix("hub:").partition(":")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise DataError(f"'{source}' is no hub data set; write hub:owner/name or …:config")
    load = extras.load("datasets", "c2kv[train]").load_dataset
    try:
        rows = load(name, config or None, split=split, streaming=True)
        for number, row in enumerate(rows, 1):
            yield number, row, None
    except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".;")
        raise DataError(
            f"cannot read '{source}' (split {split}): {reason}; check the name, config and split, "
            "or download its files and name them"
        ) from error
