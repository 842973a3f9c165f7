"""c2kv eval: measure methods on question answering over documents."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from c2kv.cli.common import add_engine_options, load_engine, table, whole_number
from c2kv.errors import ConfigError, DocumentError
from c2kv.evaluation.conditions import DEFAULT, Condition


def add_commands(commands: Any) -> None:
    group = commands.add_parser("eval", help="measure methods on question answering")
    kinds = group.add_subparsers(dest="kind", required=True, metavar="KIND")
    qa = kinds.add_parser("qa", help="records of any training format, with controls")
    qa.add_argument("-n", "--limit", type=whole_number(1), default=100, help="questions a file")
    qa.add_argument("--per-question", type=whole_number(1), default=4, metavar="DOCUMENTS")
    qa.add_argument(
        "--conditions",
        type=conditions,
        default=",".join(DEFAULT),
        help="methods (`c2kv methods`) and controls, as wrongdoc or wrongdoc:reuse; default: "
        "%(default)s",
    )
    qa.add_argument("--max-new-tokens", type=whole_number(1), default=32, metavar="N")
    qa.add_argument("--batch", type=whole_number(1), default=8)
    qa.add_argument("--seed", type=int, default=0)
    qa.add_argument("--out", type=Path, metavar="DIR", help="write samples and summary here")
    qa.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_engine_options(qa, documents="record files")
    qa.set_defaults(run=run_qa)


def conditions(text: str) -> list[Condition]:
    """An argparse type for a list of conditions."""
    try:
        return [Condition.of(name) for name in text.split(",")]
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_qa(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from c2kv.evaluation.qa import evaluate, make_cases, summarize
    from c2kv.training.records import read_records

    sets = {}
    for source in args.documents:
        name = Path(source).name.split(".")[0]
        if name in sets:
            raise DocumentError(f"two files are called '{name}'; rename one of them")
        sets[name] = list(read_records(source))
    engine = load_engine(args)
    summaries = {}
    for name, records in sets.items():
        cases = make_cases(engine, records, args.limit, args.per_question, args.seed)
        rows = []
        with tqdm(total=len(cases), desc=name, unit="case", file=sys.stderr, leave=False) as bar:
            for row in evaluate(
                engine,
                cases,
                args.conditions,
                args.max_new_tokens,
                args.batch,
                progress=bar.update,  # type: ignore[arg-type]
            ):
                rows.append(row)
        summaries[name] = summarize(rows)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(row, ensure_ascii=False) for row in rows]
            (args.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    result = {
        "model": args.model,
        "backbone_digest": engine.backbone.digest,
        "extractor_digest": engine.library.maker.digest,
        "untrained": engine.untrained,
        "ratio": engine.library.maker.ratio,
        "questions": args.limit,
        "documents": args.per_question,
        "seed": args.seed,
        "sets": summaries,
        "mean": _mean(summaries),
    }
    if args.out is not None:
        text = json.dumps(result, indent=2) + "\n"
        (args.out / "summary.json").write_text(text, encoding="utf-8")
    print(json.dumps(result, indent=2) if args.json else _tables(result))
    return 0


def _mean(summaries: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Unweighted means over the sets."""
    first = next(iter(summaries.values()))
    return {
        condition: {
            name: sum(s[condition][name] for s in summaries.values()) / len(summaries)
            for name in scores
        }
        for condition, scores in first.items()
    }


def _tables(result: dict[str, Any]) -> str:
    text = []
    for name, summary in {**result["sets"], "mean of the sets": result["mean"]}.items():
        rows = [
            [condition]
            + [f"{scores[key]:.{digits}f}" if key in scores else "-" for key, digits in _COLUMNS]
            for condition, scores in summary.items()
        ]
        text.append(f"{name}\n" + table(rows, ["condition", *(key for key, _ in _COLUMNS)]))
    return "\n\n".join(text)


_COLUMNS = (("f1", 1), ("nll", 3), ("entries", 0), ("kl", 3), ("top1", 3))
