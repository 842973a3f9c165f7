"""Entry point: parses arguments without torch, runs a command, turns our errors into one line."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from c2kv.cli import (
    answer,
    bench,
    curves,
    data,
    deviation,
    evaluate,
    health,
    methods,
    report,
    segments,
    train,
)
from c2kv.errors import C2KVError

_GROUPS = (
    *(answer, segments, methods, data, train, curves),
    *(evaluate, bench, deviation, report, health),
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="c2kv",
        description="Compressed, composable KV cache reuse for frozen LLMs.",
        epilog="Each command explains itself: c2kv COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"c2kv {metadata.version('c2kv')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in _GROUPS:
        group.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, or 1 after an error; argparse exits 2 on bad arguments."""
    args = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names of files may not be valid text
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except C2KVError as error:
        print(f"c2kv: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("c2kv: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (a pager, head) has what it wanted; stdout must not be flushed again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # not of ours: those name what they touched
        print(f"c2kv: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
