"""c2kv deviation: how far methods' KV is from full recompute's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from c2kv.cli.common import (
    add_engine_options,
    load_engine,
    method_names,
    plot_file,
    prepare_documents,
    read_documents,
    table,
)


def add_commands(commands: Any) -> None:
    deviation = commands.add_parser(
        "deviation", help="KV deviation from full recompute over how much is recomputed"
    )
    deviation.add_argument(
        "--methods",
        type=method_names,
        help="default: reuse, and sweeps of epic and cacheblend",
    )
    deviation.add_argument(
        "--out", type=Path, metavar="DIR", help="keep the results here, for c2kv report to draw"
    )
    deviation.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="draw it (.png or .svg; needs matplotlib)"
    )
    deviation.add_argument("--json", action="store_true", help="per layer too")
    add_engine_options(deviation, keeps=False)
    deviation.set_defaults(run=run_deviation)


def run_deviation(args: argparse.Namespace) -> int:
    texts = read_documents(args.documents)
    from c2kv.evaluation.run import run_folder

    with run_folder(args.out) as folder:
        return _run(args, texts, folder)


def _run(args: argparse.Namespace, texts: list[tuple[str, str]], folder: Path) -> int:
    from dataclasses import asdict

    from tqdm import tqdm

    from c2kv.evaluation.conditions import Condition
    from c2kv.evaluation.deviation import SWEEP, deviations
    from c2kv.evaluation.run import SUMMARY, Run, manifest, rows_digest, write_json

    engine = load_engine(args)
    documents = prepare_documents(engine, texts)
    methods = args.methods or list(SWEEP)
    settings = {"kind": "deviation", "documents": rows_digest([text for _, text in texts])}
    conditions = [Condition.of(name) for name in methods]
    described = manifest(engine, conditions, settings)
    Run(folder, described)
    with tqdm(total=len(methods), unit="method", file=sys.stderr, leave=False, disable=None) as bar:
        rows = list(deviations(engine, documents, methods, lambda: bar.update(1)))
    result: dict[str, Any] = {
        "manifest": described,
        "documents": len(documents),
        "source_tokens": sum(document.tokens for document in documents),
        "methods": [asdict(row) for row in rows],
    }
    write_json(folder / SUMMARY, result)
    if args.plot is not None:
        from c2kv.evaluation.report import figures

        figures.deviation(result["methods"]).savefig(args.plot, dpi=160)
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    cells = [[r.method, f"{r.recomputed:.1%}", f"{r.deviation:.4f}"] for r in rows]
    print(table(cells, ["method", "recomputed", "deviation"]))
    return 0
