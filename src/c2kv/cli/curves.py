"""c2kv curves: training runs side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from c2kv.cli.common import plot_file, table


def add_commands(commands: Any) -> None:
    curves = commands.add_parser("curves", help="training runs side by side, and their plot")
    curves.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of c2kv train")
    curves.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="draw them (.png or .svg; needs matplotlib)"
    )
    curves.add_argument("--json", action="store_true")
    curves.set_defaults(run=run_curves)


def run_curves(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from c2kv.training.curves import plot, read_curve

    curves = [read_curve(folder) for folder in args.runs]
    if args.plot is not None:
        plot(curves, args.plot)
    if args.json:
        print(json.dumps([asdict(curve) for curve in curves], indent=2))
        return 0
    rows = [
        [
            curve.name,
            str(step),
            f"{minutes:.1f}",
            *(f"{scores[n]:.3f}" if n in scores else "-" for n in _SCORES),
        ]
        for curve in curves
        for minutes, step, scores in curve.dev
    ]
    print(table(rows, ["run", "step", "minutes", *(n.removeprefix("dev_") for n in _SCORES)]))
    if args.plot is not None:
        print(f"plot written to {args.plot}")
    return 0


_SCORES = ("dev_nll_right", "dev_nll_wrong", "dev_gap", "dev_f1")
