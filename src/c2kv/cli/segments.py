"""c2kv segments: list, show, remove and verify what the store holds."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from c2kv.cli.common import add_store_option, human_bytes, table
from c2kv.errors import StoreError

if TYPE_CHECKING:
    from c2kv.store import FolderStore


def add_commands(commands: Any) -> None:
    group = commands.add_parser("segments", help="list, show, remove, verify stored segments")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, about in (
        ("ls", run_ls, "every segment, oldest first"),
        ("show", run_show, "all that is known of one segment"),
        ("rm", run_rm, "remove segments"),
        ("verify", run_verify, "read and check every segment; exit 1 if one is damaged"),
    ):
        action = actions.add_parser(name, help=about)
        if name in ("show", "rm"):
            action.add_argument(
                "keys",
                nargs=1 if name == "show" else "+",
                metavar="KEY",
                help="a key, or its first characters (at least 4)",
            )
        else:
            action.add_argument("--json", action="store_true")
        add_store_option(action)
        action.set_defaults(run=run)


def _open(args: argparse.Namespace) -> FolderStore:
    from pathlib import Path

    from c2kv.store import FolderStore

    if not Path(args.store).is_dir():
        raise StoreError(f"there is no store at '{args.store}'; name one with --store")
    return FolderStore(args.store)


def run_ls(args: argparse.Namespace) -> int:
    found = _open(args).entries()
    if args.json:
        print(json.dumps([asdict(segment) for segment in found], indent=2))
        return 0
    rows = [
        [
            s.key[:12],
            s.label or "-",
            str(s.span),
            str(s.entries),
            f"{s.ratio} {s.variant}",
            s.dtype,
            human_bytes(s.nbytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(s.created)),
        ]
        for s in found
    ]
    if rows:
        print(table(rows, ["key", "label", "span", "entries", "ratio", "dtype", "size", "created"]))
    print(f"{len(found)} segments, {human_bytes(sum(s.nbytes for s in found))} in {args.store}")
    return 0


def run_show(args: argparse.Namespace) -> int:
    store = _open(args)
    key = store.find(args.keys[0])
    found = [s for s in store.entries() if s.key == key]
    if not found:
        raise StoreError(f"segment {key[:12]} cannot be read; see `c2kv segments verify`")
    print(json.dumps(asdict(found[0]), indent=2))
    return 0


def run_rm(args: argparse.Namespace) -> int:
    store = _open(args)
    keys = [store.find(prefix) for prefix in args.keys]
    for key in dict.fromkeys(keys):
        store.remove(key)
        print(f"removed {key[:12]}")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    results = dict(tqdm(_open(args).verify(), unit="segment", leave=False, disable=None))
    damaged = {key: reason for key, reason in results.items() if reason is not None}
    if args.json:
        print(json.dumps({"verified": len(results), "damaged": damaged}, indent=2))
    else:
        for key, reason in damaged.items():
            print(f"{key[:12]}  {reason}")
        print(
            f"{len(results)} segments read: {len(results) - len(damaged)} sound, "
            f"{len(damaged)} damaged"
        )
    return 1 if damaged else 0
