"""c2kv report: runs as one HTML file, or as Markdown with its figures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from c2kv import extras
from c2kv.errors import DataError


def add_commands(commands: Any) -> None:
    report = commands.add_parser("report", help="runs of eval, bench and deviation as one report")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders given as --out")
    report.add_argument(
        "-o",
        "--output",
        type=_report_file,
        default=Path("report.html"),
        metavar="FILE",
        help="report.html (default), all in one file; or a .md, with its figures beside it",
    )
    report.add_argument("--title", default="c2kv report")
    report.set_defaults(run=run_report)


def _report_file(text: str) -> Path:
    if not text.endswith((".html", ".md")):
        raise argparse.ArgumentTypeError(f"'{text}' is neither .html nor .md; name one of these")
    return Path(text)


def run_report(args: argparse.Namespace) -> int:
    from c2kv.evaluation.report.parts import Figure
    from c2kv.evaluation.report.render import to_html, to_markdown
    from c2kv.evaluation.report.sections import read_sections
    from c2kv.evaluation.run import is_run

    extras.need("matplotlib", "c2kv[plot]")
    runs = [path for path in args.runs if not path.exists() or is_run(path)]
    if other := [str(path) for path in args.runs if path not in runs]:  # of `runs/*`, say
        print(f"c2kv: passed over, as no runs: {', '.join(other)}", file=sys.stderr)
    if not runs:
        raise DataError("none of these is a run; name folders given as --out")
    sections = read_sections(runs)
    output: Path = args.output
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".html":
        output.write_text(to_html(args.title, sections), encoding="utf-8")
    else:
        drawn = [p for section in sections for p in section.parts if isinstance(p, Figure)]
        files = [f"{output.stem}-{number}.svg" for number in range(1, len(drawn) + 1)]
        for file, figure in zip(files, drawn, strict=True):
            (output.parent / file).write_text(figure.svg, encoding="utf-8")
        output.write_text(to_markdown(args.title, sections, files), encoding="utf-8")
    print(f"report of {len(runs)} runs written to {output}")
    return 0
