"""c2kv deviation: how far methods' KV is from full recompute's, as numbers and as a plot."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from c2kv.cli.common import (
    add_engine_options,
    load_engine,
    method_name,
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
        type=lambda text: [method_name(name) for name in text.split(",")],
        help="default: reuse, and sweeps of epic and cacheblend",
    )
    deviation.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="draw it (.png or .svg; needs matplotlib)"
    )
    deviation.add_argument("--json", action="store_true", help="per layer too")
    add_engine_options(deviation)
    deviation.set_defaults(run=run_deviation)


def run_deviation(args: argparse.Namespace) -> int:
    texts = read_documents(args.documents)
    from dataclasses import asdict

    from tqdm import tqdm

    from c2kv.evaluation.deviation import SWEEP, deviations, plot

    engine = load_engine(args)
    documents = prepare_documents(engine, texts)
    methods = args.methods or list(SWEEP)
    with tqdm(total=len(methods), unit="method", file=sys.stderr, leave=False, disable=None) as bar:
        rows = list(deviations(engine, documents, methods, lambda: bar.update(1)))
    tokens = sum(document.tokens for document in documents)
    if args.plot is not None:
        plot(
            rows, args.plot, f"{engine.backbone.name}, {len(documents)} documents, {tokens} tokens"
        )
    if args.json:
        result = {
            "model": engine.backbone.name,
            "backbone_digest": engine.backbone.digest,
            "documents": len(documents),
            "source_tokens": tokens,
            "methods": [asdict(row) for row in rows],
        }
        print(json.dumps(result, indent=2))
        return 0
    cells = [[r.method, f"{r.recomputed:.1%}", f"{r.deviation:.4f}"] for r in rows]
    print(table(cells, ["method", "recomputed", "deviation"]))
    if args.plot is not None:
        print(f"plot written to {args.plot}")
    return 0
