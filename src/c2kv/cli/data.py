"""c2kv data: what training files hold, before any time is spent on them."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from c2kv.cli.common import table, whole_number
from c2kv.training.formats import FORMATS

if TYPE_CHECKING:
    from c2kv.prompt import PromptTemplate
    from c2kv.training.records import Record

_BAD_SHOWN = 5
_SHOWN_CHARACTERS = (1500, 700)  # of a sample's start and end; --json gives it whole


def add_commands(commands: Any) -> None:
    group = commands.add_parser("data", help="look into training data")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = actions.add_parser(
        "inspect",
        help="formats, counts, lengths and samples; exit 1 if a record is bad",
        description="Read files as training would and say what they hold. Exits 1 if any record "
        "is bad; questions marked unanswerable count as bad.",
    )
    inspect.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help=".json, .jsonl (also .gz), .parquet, or hub:owner/name[:config]",
    )
    inspect.add_argument("--format", choices=("auto", *FORMATS), default="auto")
    inspect.add_argument("--split", help="split of hub: data sets (default train)")
    inspect.add_argument(
        "-m", "--model", help="measure in this model's tokens, not words; show its prompts"
    )
    inspect.add_argument(
        "--samples",
        type=whole_number(0),
        default=2,
        metavar="N",
        help="records to show of each file (default 2)",
    )
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> int:
    template = _template(args.model) if args.model else None
    unit = "tokens" if template else "words"
    reports = []
    for file in args.files:
        reports.append(report := _inspect(file, args, template, unit))
        if not args.json:
            _print(report, unit)
    if args.json:
        print(json.dumps(reports, indent=2, ensure_ascii=False))
    return 1 if any(report["bad"]["count"] for report in reports) else 0


def _inspect(
    file: str, args: argparse.Namespace, template: PromptTemplate | None, unit: str
) -> dict[str, Any]:
    from tqdm import tqdm

    from c2kv.prompt import render_document
    from c2kv.training.records import BadRecord, detect_format, read_records

    format = detect_format(file, args.split) if args.format == "auto" else args.format
    count = _counter(template)
    bad: list[str] = []
    bad_reasons: Counter[str] = Counter()
    lengths: dict[str, list[int]] = {"document": [], "question": [], "answer": []}
    documents: list[int] = []
    ids: Counter[str] = Counter()
    datasets: Counter[str] = Counter()
    groups = set()
    samples: list[str] = []

    def note(record: BadRecord) -> None:
        bad_reasons[record.reason] += 1
        bad.append(str(record))

    records = read_records(file, format, args.split, note)
    for record in tqdm(records, unit="record", desc=file, leave=False, disable=None):
        ids[record.id] += 1
        datasets[record.dataset] += 1
        groups.add(record.group)
        documents.append(len(record.documents))
        lengths["document"] += count([render_document(d.text, d.title) for d in record.documents])
        lengths["question"] += count([record.question])
        lengths["answer"] += count(list(record.answers))
        if len(samples) < args.samples:
            samples.append(_render(record, template))
    return {
        "file": file,
        "format": format,
        "records": len(documents),
        "datasets": dict(datasets),
        "groups": len(groups),
        "repeated_ids": sum(times - 1 for times in ids.values()),
        "bad": {"count": len(bad), "records": bad, "reasons": dict(bad_reasons)},
        "documents_per_record": _summary(documents, tail=False),
        f"{unit}_per": {name: _summary(values) for name, values in lengths.items()},
        "samples": samples,
    }


def _template(model: str) -> PromptTemplate:
    """The prompts of a model, from its tokenizer alone."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from c2kv.errors import ModelReferenceError
    from c2kv.models import resolve
    from c2kv.prompt import PromptTemplate

    logging.set_verbosity_error()
    reference = resolve(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(reference.source, revision=reference.revision)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".;")
        raise ModelReferenceError(
            f"cannot load the tokenizer of '{model}': {reason}; give a reachable hub id, a local "
            "folder or a .gguf file"
        ) from error
    return PromptTemplate.of(tokenizer)


def _counter(template: PromptTemplate | None) -> Callable[[list[str]], list[int]]:
    """A function from texts to their lengths, in words or tokens (no special ones)."""
    if template is None:
        return lambda texts: [len(text.split()) for text in texts]
    tokenizer = template.tokenizer
    settings = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    return lambda texts: [len(ids) for ids in tokenizer(texts, **settings).input_ids]


def _render(record: Record, template: PromptTemplate | None) -> str:
    from c2kv.prompt import render_document, render_question

    documents = [render_document(d.text, d.title) for d in record.documents]
    if template is not None:
        prompt = template.conversation(documents, render_question(record.question))
        return prompt + record.answers[0]
    parts = [f"Document {i}: {text}" for i, text in enumerate(documents)]
    parts += [f"Question: {record.question}", f"Answer: {' | '.join(record.answers)}"]
    return "\n\n".join(parts)


def _summary(values: Sequence[int], tail: bool = True) -> dict[str, int]:
    """Nearest-rank statistics: each is a value that occurs."""
    if not values:
        return {}
    ordered, count = sorted(values), len(values)
    shares = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
    if not tail:
        del shares["p95"]
    return {name: ordered[max(0, math.ceil(share * count) - 1)] for name, share in shares.items()}


def _print(report: dict[str, Any], unit: str) -> None:
    bad = report["bad"]
    print(f"{report['file']}: format {report['format']}, {report['records']} records", end="")
    print(f" of {report['groups']} groups, {bad['count']} bad")
    if list(report["datasets"]) != [report["format"]]:
        print("  data sets: " + ", ".join(f"{k} {v}" for k, v in report["datasets"].items()))
    if report["repeated_ids"]:
        print(f"  {report['repeated_ids']} records repeat the id of another")
    for line in bad["records"][:_BAD_SHOWN]:
        print(f"  bad: {line}")
    if bad["count"] > _BAD_SHOWN:
        print("  (all of them with --json)")
        reasons = sorted(bad["reasons"].items(), key=lambda item: -item[1])[:_BAD_SHOWN]
        print("  bad in all: " + ", ".join(f"{times} {reason}" for reason, times in reasons))
    if report["records"]:
        rows = [["documents per record", report["documents_per_record"]]]
        rows += [[f"{unit} per {name}", summary] for name, summary in report[f"{unit}_per"].items()]
        columns = ("min", "median", "p95", "max")
        cells = [[name, *(str(summary.get(c, "")) for c in columns)] for name, summary in rows]
        print(table(cells, ["", *columns]))
    for number, sample in enumerate(report["samples"], 1):
        print(f"--- sample {number} ---\n{_shorten(sample)}")
    print()


def _shorten(text: str) -> str:
    start, end = _SHOWN_CHARACTERS
    if (left_out := len(text) - start - end) <= 0:
        return text
    return f"{text[:start]}\n[… {left_out} characters, whole with --json …]\n{text[-end:]}"
