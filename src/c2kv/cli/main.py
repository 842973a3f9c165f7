"""Entry point: parses arguments without torch, runs a command, turns our errors into one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from c2kv.cli import answer, data, evaluate, health, segments, train
from c2kv.errors import C2KVError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="c2kv",
        description="Compressed, composable KV cache reuse for frozen LLMs.",
        epilog="Each command explains itself: c2kv COMMAND --help",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in (answer, segments, data, train, evaluate, health):
        group.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, or 1 after an error; argparse exits 2 on bad arguments."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
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


if __name__ == "__main__":
    sys.exit(main())
