"""c2kv eval: measure methods on question answering over documents."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from c2kv.cli import longbench, probes
from c2kv.cli.common import add_engine_options, distinct, load_engine, table, whole_number
from c2kv.errors import ConfigError, DocumentError
from c2kv.evaluation.conditions import DEFAULT, Condition


def add_commands(commands: Any) -> None:
    group = commands.add_parser("eval", help="measure methods on question answering")
    kinds = group.add_subparsers(dest="kind", required=True, metavar="KIND")
    qa = kinds.add_parser("qa", help="records of any training format, with controls")
    qa.add_argument("-n", "--limit", type=whole_number(1), default=100, help="questions a file")
    qa.add_argument("--per-question", type=whole_number(1), default=4, metavar="DOCUMENTS")
    qa.add_argument("--split", help="of hub: sources, which need one")
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
    add_out_options(qa)
    add_engine_options(qa, documents="record files", keeps=False)
    qa.set_defaults(run=run_qa)

    longbench.add_command(kinds, conditions, add_out_options)
    probes.add_command(kinds, conditions, add_out_options)
    for parser in kinds.choices.values():
        parser.add_argument(
            "--config",
            action=_Config,
            metavar="FILE",
            help="options from a YAML file (see recipes/eval/); those given after it win",
        )


class _Given(list[str]):
    """A config's values of an option that may be repeated: those of the command line replace
    them."""

    def __copy__(self) -> list[str]:  # argparse appends to a copy
        return []


class _Config(argparse.Action):
    """Sets the options that a YAML file gives, as if they stood here on the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        import yaml

        try:
            given = yaml.safe_load(Path(values).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            parser.error(f"cannot read config '{values}': {' '.join(str(error).split())}")
        known = {action.dest: action for action in parser._actions if action.option_strings}
        if not isinstance(given, dict) or (wrong := set(given) - set(known)):
            what = f"option '{min(wrong)}' is unknown" if isinstance(given, dict) else "no options"
            parser.error(f"config '{values}': {what}; known: {', '.join(sorted(known))}")
        for name, value in given.items():
            choices = known[name].choices
            if (choices and value not in choices) or isinstance(known[name].const, bool) != (
                isinstance(value, bool)
            ):
                parser.error(f"config '{values}': {name}: {value!r} is not one of its values")
            if isinstance(known[name], argparse._AppendAction):
                setattr(namespace, name, _Given(value if isinstance(value, list) else [value]))
                continue
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            parse = known[name].type
            try:
                setattr(namespace, name, parse(str(text)) if callable(parse) else text)
            except (argparse.ArgumentTypeError, ValueError) as error:
                parser.error(f"config '{values}': {name}: {error}")


def add_out_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="keep manifest, samples and summary here; an interrupted run there is gone on with",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def conditions(text: str) -> list[Condition]:
    """An argparse type for a list of conditions."""
    try:
        return distinct([Condition.of(name) for name in text.split(",")])
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_qa(args: argparse.Namespace) -> int:
    from c2kv.evaluation.run import run_folder
    from c2kv.training.records import read_records

    sets = {}
    for source in args.documents:
        name = Path(source).name.split(".")[0]
        if name in sets:
            raise DocumentError(f"two files are called '{name}'; rename one of them")
        if source.startswith("hub:") and args.split is None:
            raise ConfigError(f"which split of '{source}'? give --split validation, say")
        sets[name] = list(read_records(source, split=args.split))
    with run_folder(args.out) as folder:
        return _run(args, load_engine(args), sets, folder)


def _run(args: argparse.Namespace, engine: Any, sets: dict[str, Any], folder: Path) -> int:
    from dataclasses import asdict

    from tqdm import tqdm

    from c2kv.evaluation.bars import bars
    from c2kv.evaluation.qa import evaluate, make_cases, summarize
    from c2kv.evaluation.run import SUMMARY, Run, manifest, rows_digest, write_json
    from c2kv.models import file_sha256

    names = ("limit", "per_question", "seed", "max_new_tokens", "batch")
    settings = {"kind": "qa", **{name: getattr(args, name) for name in names}}
    data = {}
    for source, records in zip(args.documents, sets.values(), strict=True):
        if source.startswith("hub:"):
            data[f"{source} ({args.split})"] = rows_digest([asdict(record) for record in records])
        else:
            data[Path(source).name] = file_sha256(Path(source))
    described = manifest(engine, args.conditions, settings, data)
    run = Run(folder, described)
    summaries = {}
    drawn = {  # all of them first: what is wrong with a file is told before the work
        name: make_cases(engine, records, args.limit, args.per_question, args.seed)
        for name, records in sets.items()
    }
    for name, cases in drawn.items():
        done = run.resume(name, args.conditions)
        left = [case for case in cases if case.id not in done]
        with tqdm(
            total=len(cases),
            initial=len(cases) - len(left),
            desc=name,
            unit="case",
            file=sys.stderr,
            leave=False,
            disable=None,
        ) as bar:
            for rows in evaluate(engine, left, args.conditions, args.max_new_tokens, args.batch):
                run.append(name, rows)
                bar.update(len({row["id"] for row in rows}))
        summaries[name] = summarize(run.rows(name))
    mean = _mean(summaries)
    checked = [bar.as_json() for bar in bars(mean)]
    result = {"manifest": described, "sets": summaries, "mean": mean, "bars": checked}
    write_json(folder / SUMMARY, result)
    print(json.dumps(result, indent=2) if args.json else _tables(result))
    failed = sum(int(s["failed"]) for summary in summaries.values() for s in summary.values())
    if failed:
        print(f"c2kv: {failed} samples failed; see 'error' in the samples", file=sys.stderr)
    return 1 if failed else 0


def _mean(summaries: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Unweighted means over the sets, of scores that every set has, where no case failed (others
    were scored on other cases); and how many were scored, and failed, in all of them."""
    mean = {}
    for condition in next(iter(summaries.values())):
        scores = [summary[condition] for summary in summaries.values()]
        counts = {n: sum(one[n] for one in scores) for n in ("scored", "failed")}
        shared = [n for n in scores[0] if all(n in one for one in scores) and not counts["failed"]]
        mean[condition] = {n: sum(one[n] for one in scores) / len(scores) for n in shared}
        for name in (n for n in shared if n.endswith("_margin")):  # sets err independently
            mean[condition][name] = math.hypot(*(one[name] for one in scores)) / len(scores)
        mean[condition] |= counts
    return mean


def _tables(result: dict[str, Any]) -> str:
    from c2kv.evaluation.bars import bars, bars_table

    text = []
    for name, summary in {**result["sets"], "mean of the sets": result["mean"]}.items():
        rows = [
            [condition]
            + [f"{scores[key]:.{digits}f}" if key in scores else "-" for key, digits in _COLUMNS]
            for condition, scores in summary.items()
        ]
        text.append(f"{name}\n" + table(rows, ["condition", *(key for key, _ in _COLUMNS)]))
    if every := bars(result["mean"]):
        columns, lines = bars_table(every)
        text.append("what is expected of an extractor\n" + table(lines, columns))
    return "\n\n".join(text)


_COLUMNS = (("f1", 1), ("nll", 3), ("entries", 0), ("kl", 3), ("top1", 3), ("failed", 0))
