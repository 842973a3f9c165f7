"""c2kv eval probes: exact strings planted in texts of yours, and asked for."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from c2kv.cli.common import (
    add_engine_options,
    load_engine,
    read_documents,
    table,
    whole_number,
)
from c2kv.errors import ConfigError
from c2kv.evaluation.conditions import Condition

_CONDITIONS = "recompute,reuse,c2kv,wrongdoc,budget,noctx,random"


def add_command(
    kinds: Any,
    conditions: Callable[[str], list[Condition]],
    add_out_options: Callable[[argparse.ArgumentParser], None],
) -> None:
    probes = kinds.add_parser(
        "probes", help="codes, numbers and names planted in texts: found to the letter?"
    )
    probes.add_argument(
        "-n",
        "--each",
        type=whole_number(1),
        default=4,
        help="probes of each kind, place and, for compressing methods, end of block (default 4)",
    )
    probes.add_argument("--per-question", type=whole_number(2), default=4, metavar="DOCUMENTS")
    probes.add_argument("--conditions", type=conditions, default=_CONDITIONS)
    probes.add_argument("--seed", type=int, default=0)
    add_out_options(probes)
    add_engine_options(probes, keeps=False)
    probes.set_defaults(run=run_probes)


def run_probes(args: argparse.Namespace) -> int:
    texts = read_documents(args.documents)
    from c2kv.evaluation.run import run_folder

    with run_folder(args.out) as folder:
        return _run(args, load_engine(args), texts, folder)


def _run(args: argparse.Namespace, engine: Any, texts: list[tuple[str, str]], folder: Path) -> int:
    from tqdm import tqdm

    from c2kv.evaluation.probes import make_probes, tabulate
    from c2kv.evaluation.qa import evaluate
    from c2kv.evaluation.run import SUMMARY, Run, manifest, rows_digest, write_json

    ratios = {engine.method(c.method).ratio for c in args.conditions if c.control != "noctx"} - {1}
    if len(ratios) > 1:
        raise ConfigError(f"methods of ratios {sorted(ratios)} have other block ends; probe apart")
    ratio = max(ratios, default=1)
    some = [text for _, text in texts]
    probes = make_probes(engine, some, args.each, ratio, args.per_question, args.seed)
    names = ("each", "per_question", "seed")
    settings = {"kind": "probes", **{name: getattr(args, name) for name in names}}
    settings |= {"texts": rows_digest(some)}
    described = manifest(engine, args.conditions, settings)
    run = Run(folder, described)
    done = run.resume("probes", args.conditions)
    left = [probe.case for probe in probes if probe.case.id not in done]
    with tqdm(total=len(left), unit="probe", file=sys.stderr, leave=False, disable=None) as bar:
        for rows in evaluate(engine, left, args.conditions, max_new_tokens=24):
            run.append("probes", rows)
            bar.update(len({row["id"] for row in rows}))
    rows = run.rows("probes")
    scores = tabulate(probes, rows)
    failed = dict(Counter(row["condition"] for row in rows if "error" in row))
    result = {"manifest": described, "found": scores, "failed": failed}
    write_json(folder / SUMMARY, result)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        groups = list(dict.fromkeys(group for by in scores.values() for group in by))
        cells = [
            [name, *(f"{by[g]:.0f} %" if g in by else "-" for g in groups)]
            for name, by in scores.items()
        ]
        print(table(cells, ["found by", *groups]))
    if failed:
        print(
            f"c2kv: {sum(failed.values())} samples failed; see 'error' in the samples",
            file=sys.stderr,
        )
    return 1 if failed else 0
