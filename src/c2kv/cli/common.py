"""What commands share: model and extractor options, reading documents, tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from c2kv import extras
from c2kv.errors import ConfigError, DocumentError, MissingPackageError
from c2kv.methods.registry import check
from c2kv.paths import cache_dir

if TYPE_CHECKING:
    from c2kv.document import Document
    from c2kv.engine import Engine

T = TypeVar("T")

VARIANTS = ("plain", "residual", "anchor")
SUFFIXES = (".txt", ".md", ".rst")


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type for whole numbers within bounds."""

    def parse(text: str) -> int:
        bounds = f"from {low} to {high}" if high else f"of at least {low}"
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number {bounds}")
        return value

    return parse


def plot_file(text: str) -> Path:
    """An argparse type for the file of a plot."""
    if not text.endswith((".png", ".svg")):
        raise argparse.ArgumentTypeError(f"'{text}' is neither .png nor .svg; name one of these")
    try:
        extras.need("matplotlib", "c2kv[plot]")  # now, not after the work
    except MissingPackageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def method_name(text: str) -> str:
    """An argparse type for names of methods."""
    try:
        return check(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def method_names(text: str) -> list[str]:
    """An argparse type for lists of methods."""
    return distinct([method_name(name) for name in text.split(",")])


def distinct(values: list[T]) -> list[T]:
    """Of an argparse type: refuses a list that names something twice."""
    for value in values:
        if values.count(value) > 1:
            raise argparse.ArgumentTypeError(f"'{getattr(value, 'name', value)}' is named twice")
    return values


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        "--model",
        default="smollm2-135m",
        help="hub id, folder, .gguf file or the embedded smollm2-135m (default)",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 …")


def add_engine_options(
    parser: argparse.ArgumentParser,
    documents: str | None = "text files, folders of them, or - (stdin)",
    keeps: bool = True,
) -> None:
    """keeps: whether segments are kept in the user's store, where none is named."""
    add_model_options(parser)
    parser.add_argument(
        "-x",
        "--extractor",
        action="append",
        help="folder, name in the box (`c2kv info`) or hub id; default: the box's for this model; "
        "again for another variant, which methods may name (c2kv-plain)",
    )
    parser.add_argument(
        "--untrained",
        action="store_true",
        help="use a fresh extractor: figures are real, compressed answers mean nothing",
    )
    parser.add_argument(
        "-k",
        "--ratio",
        type=whole_number(1, 64),
        help="source tokens per entry, 1 to 64, as the extractor was trained for",
    )
    parser.add_argument("--variant", choices=VARIANTS, help="of the extractor")
    if keeps:
        add_store_option(parser)
    else:  # what is measured once is not worth disk
        parser.add_argument(
            "--store",
            metavar="DIR",
            help="the store to use (default: memory alone); bench makes a temporary one in it",
        )
    parser.add_argument(
        "--segment-tokens",
        type=whole_number(1),
        default=512,
        metavar="N",
        help="cut documents into segments of at most N tokens (default 512)",
    )
    parser.add_argument(
        "--memory",
        type=whole_number(1),
        default=2,
        metavar="GIB",
        help="most memory for segments, of each kind in use (default 2)",
    )
    if documents is not None:
        parser.add_argument("documents", nargs="+", metavar="DOCUMENT", help=documents)


def add_store_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        default=str(cache_dir() / "segments"),
        metavar="DIR",
        help="where segments are kept (default: %(default)s)",
    )


def load_engine(args: argparse.Namespace) -> Engine:
    """The engine of `add_engine_options`' arguments."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    from c2kv.engine import Engine

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    return Engine.load(
        args.model,
        args.extractor or None,
        untrained=args.untrained,
        ratio=args.ratio,
        variant=args.variant,
        store=args.store,
        dtype=args.dtype,
        device=args.device,
        segment_tokens=args.segment_tokens,
        memory_bytes=args.memory << 30,
    )


def read_documents(sources: Sequence[str]) -> list[tuple[str, str]]:
    """(name, text) of every file named, every text file in folders named, and stdin for `-`.

    Raises DocumentError naming what cannot be read, before any model is loaded."""
    found = []
    for source in sources:
        if source == "-":
            found.append(("stdin", _decode("stdin", sys.stdin.buffer.read())))
            continue
        if not source:
            raise DocumentError("a document's name is empty; name a file or a folder")
        path = Path(source)
        if path.is_dir():
            files = _text_files(path)
            if not files:
                raise DocumentError(
                    f"folder '{source}' holds no {', '.join(SUFFIXES)} files; name files"
                )
        else:
            files = [path]
        found += [(file.name if file is not path else source, _read(file)) for file in files]
    return found


def _text_files(folder: Path) -> list[Path]:
    """The text files of a folder and its subfolders (links to folders are not followed)."""

    def fail(error: OSError) -> None:
        raise DocumentError(
            f"cannot read folder '{error.filename}': {error.strerror}; check its permissions"
        ) from error

    found = [
        Path(where, name)
        for where, _, names in os.walk(folder, onerror=fail)
        for name in names
        if Path(name).suffix.lower() in SUFFIXES
    ]
    return sorted(path for path in found if path.is_file())


def _read(path: Path) -> str:
    try:
        return _decode(str(path), path.read_bytes())
    except OSError as error:
        raise DocumentError(
            f"cannot read document '{path}': {error.strerror}; check the path and its permissions"
        ) from error


def _decode(name: str, raw: bytes) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"document '{name}' is not UTF-8 text (byte {error.start}); convert it to text first"
        ) from error
    if "\0" in text:
        raise DocumentError(f"document '{name}' is binary; convert it to text first")
    if not any(map(str.isalnum, text)):
        why = "holds no letter or digit to read" if text.strip() else "is empty"
        raise DocumentError(f"document '{name}' {why}; leave it out")
    return text


def prepare_documents(engine: Engine, texts: Sequence[tuple[str, str]]) -> list[Document]:
    return [engine.document(text, name=name) for name, text in texts]


@contextmanager
def extraction_progress(engine: Engine) -> Iterator[None]:
    """A bar on stderr over the tokens extracted, while there is something to extract."""
    from tqdm import tqdm

    bars: list[Any] = []

    def advance(done: int, total: int) -> None:
        if not done:
            bars.append(tqdm(total=total, unit="tok", desc="extracting", disable=None, leave=False))
        bars[-1].update(done - bars[-1].n)
        if done == total:
            bars[-1].close()  # before anything else is printed

    engine.libraries.on_extracted = advance
    try:
        yield
    finally:
        del engine.libraries.on_extracted
        for bar in bars:
            bar.close()


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns padded to their widest cell; all but the first are right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        text.append("  ".join(cells).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def human_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
