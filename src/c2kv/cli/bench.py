"""c2kv bench: what a request costs by each method, on this machine and model."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from c2kv.cli.common import (
    add_engine_options,
    distinct,
    human_bytes,
    human_seconds,
    load_engine,
    method_names,
    table,
    whole_number,
)
from c2kv.errors import ConfigError

_METHODS = "recompute,reuse,epic-32,cacheblend-0.15,c2kv"


def add_commands(commands: Any) -> None:
    bench = commands.add_parser(
        "bench", help="TTFT and its parts, decode rate, memory and bytes of each method"
    )
    bench.add_argument(
        "--methods",
        type=method_names,
        default=_METHODS,
        help="default: %(default)s",
    )
    bench.add_argument(
        "--tokens",
        type=_numbers,
        default="1024,4096",
        help="source tokens of a prompt, in documents of random tokens (default %(default)s)",
    )
    bench.add_argument("--counts", type=_numbers, default="8", help="documents (default 8)")
    bench.add_argument(
        "--repeats", type=whole_number(1), default=3, help="of every request (default 3)"
    )
    bench.add_argument(
        "--no-cold", action="store_true", help="leave out requests of documents never seen"
    )
    bench.add_argument("--out", type=Path, metavar="DIR", help="keep the results here")
    bench.add_argument("--json", action="store_true")
    add_engine_options(bench, documents=None, keeps=False)
    bench.set_defaults(run=run_bench)


def _numbers(text: str) -> list[int]:
    return distinct([whole_number(1)(part) for part in text.split(",")])


def run_bench(args: argparse.Namespace) -> int:
    from c2kv.evaluation.run import run_folder

    if args.store is not None and not Path(args.store).is_dir():
        raise ConfigError(f"--store '{args.store}' is no folder; name one on the disk to measure")
    # A store of its own: cold requests must find nothing, and leave nothing.
    with tempfile.TemporaryDirectory(dir=args.store) as store, run_folder(args.out) as folder:
        given, args.store = args.store, store
        return _run(args, folder, given)


def _run(args: argparse.Namespace, folder: Path, store: str | None) -> int:
    """store: where the user wants it to be, of all the disks there are."""
    from dataclasses import asdict

    from tqdm import tqdm

    from c2kv.errors import C2KVError
    from c2kv.evaluation.conditions import Condition
    from c2kv.evaluation.latency import measure
    from c2kv.evaluation.report.kinds import failure
    from c2kv.evaluation.run import SUMMARY, Run, manifest, read_json, write_json

    if "recompute" not in args.methods:
        raise ConfigError("speedups are against full recompute; add recompute to --methods")
    engine = load_engine(args)
    if engine.backbone.device.type != "cuda" and find_spec("psutil") is None:
        print("c2kv: peak memory needs psutil; run: pip install 'c2kv[eval]'", file=sys.stderr)
    points = [(tokens, count) for tokens in args.tokens for count in args.counts]
    work = len(args.methods) * ((3 - args.no_cold) * args.repeats + 1)
    conditions = [Condition.of(name) for name in args.methods]
    names = ("repeats", "tokens", "counts", "no_cold")
    settings = {"kind": "bench", **{name: getattr(args, name) for name in names}, "store": store}
    described = manifest(engine, conditions, settings)
    result: dict[str, Any] = {"manifest": described, "costs": [], "failed": []}
    Run(folder, described)
    if (folder / SUMMARY).exists():
        result = read_json(folder / SUMMARY)
    costs, failed = (_by_point(result[name], points) for name in ("costs", "failed"))
    left = [point for point in points if len(costs[point]) < len(args.methods)]
    with tqdm(
        total=work * len(points),
        initial=work * (len(points) - len(left)),
        unit="request",
        file=sys.stderr,
        leave=False,
        disable=None,
    ) as bar:
        for tokens, count in left:
            try:
                found, reasons = measure(
                    engine,
                    args.methods,
                    tokens,
                    count,
                    args.repeats,
                    not args.no_cold,
                    lambda: bar.update(1),
                )
            except C2KVError as error:
                found, reasons = [], {"all methods": str(error)}
            at = {"source_tokens": tokens, "documents": count}
            failures = [{**at, "method": m, "error": e} for m, e in reasons.items()]
            if len(found) >= len(costs[tokens, count]):  # trying again loses nothing
                costs[tokens, count] = [asdict(cost) for cost in found]
                failed[tokens, count] = failures
            engine.forget()
            for one in failures:
                tqdm.write(failure(one), sys.stderr)
            result["costs"] = [cost for point in points for cost in costs[point]]
            result["failed"] = [one for point in points for one in failed[point]]
            write_json(folder / SUMMARY, result)  # what comes later loses nothing of it
    print(json.dumps(result, indent=2) if args.json else _table(result["costs"]))
    return 1 if result["failed"] else 0


def _by_point(
    rows: list[dict[str, Any]], points: list[tuple[int, int]]
) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = {point: [] for point in points}
    for row in rows:
        found[row["source_tokens"], row["documents"]].append(row)
    return found


def _table(costs: list[dict[str, Any]]) -> str:
    from c2kv.evaluation.report.kinds import paid

    rows = [
        [
            c["method"],
            str(c["source_tokens"]),
            str(c["documents"]),
            str(c["entries"]),
            human_seconds(c["ready"]["median"]),
            f"{human_seconds(c['ready']['least'])}-{human_seconds(c['ready']['most'])}",
            f"{c['speedup']:.1f}×" if c["speedup"] else "-",
            human_seconds(c["disk"]["median"]) if c["disk"] else "-",
            human_seconds(c["cold"]["median"]) if c["cold"] else "-",
            human_seconds(c["question"]),
            f"{c['decode_tokens_per_second']:.1f}",
            "-" if c["peak_bytes"] is None else human_bytes(c["peak_bytes"]),
            human_bytes(c["stored_bytes"]),
            human_bytes(c["loaded_bytes"]),
            paid(c),
        ]
        for c in costs
    ]
    header = ["method", "tokens", "docs", "entries", "TTFT", "spread", "faster", "disk", "cold"]
    header += ["question", "tok/s", "peak", "stored", "loaded", "pays after"]
    return table(rows, header) + "\n" + _LEGEND


_LEGEND = (
    "TTFT: from the request to the documents' KV ready, kept state in memory (disk: in the store;\n"
    "cold: nothing kept). stored: bytes on disk; loaded: KV bytes. pays after: requests until\n"
    "preparing once beats full recompute."
)
