"""c2kv eval longbench: LongBench v1 by its official prompts, or as reusable documents."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from c2kv import extras
from c2kv.cli.common import add_engine_options, load_engine, table, whole_number
from c2kv.errors import ConfigError
from c2kv.evaluation.conditions import Condition

_METHODS = (
    *("recompute", "reuse", "epic-32", "cacheblend-0.15", "c2kv"),
    *("wrongdoc", "budget", "noctx", "random"),
)


def add_command(
    kinds: Any,
    conditions: Callable[[str], list[Condition]],
    add_out_options: Callable[[argparse.ArgumentParser], None],
) -> None:
    bench = kinds.add_parser("longbench", help="LongBench v1 (English tasks), official scores")
    bench.add_argument(
        "--protocol",
        choices=("official", "paper"),
        default="paper",
        help="official: the published prompt, full recompute only; paper: the context as "
        "documents that methods reuse (default)",
    )
    bench.add_argument(
        "--methods",
        type=conditions,
        help="methods and controls, as wrongdoc or wrongdoc:reuse; default: "
        f"{','.join(_METHODS)} (official: recompute)",
    )
    bench.add_argument(
        "--tasks",
        type=lambda text: text.split(","),
        help="default: the seven of the C2KV comparison",
    )
    bench.add_argument("-n", "--limit", type=whole_number(1), help="samples a task (default all)")
    bench.add_argument("--max-length", type=whole_number(2), help="official: cut prompts to N")
    bench.add_argument(
        "--batch", type=whole_number(1), default=1, help="samples answered at once (default 1)"
    )
    add_out_options(bench)
    add_engine_options(bench, documents=None, keeps=False)
    bench.add_argument(
        "--data",
        metavar="DIR",
        help="folder of NAME.jsonl, or hub (THUDM/LongBench), or hub:owner/name of a copy",
    )
    bench.set_defaults(run=run_longbench)


def run_longbench(args: argparse.Namespace) -> int:
    from c2kv.evaluation.longbench import DEFAULT_TASKS, TASKS, load_records
    from c2kv.evaluation.protocols import check_protocol
    from c2kv.evaluation.run import run_folder

    default = ("recompute",) if args.protocol == "official" else _METHODS
    conditions = args.methods or [Condition.of(name) for name in default]
    check_protocol(args.protocol, [condition.name for condition in conditions])
    if args.max_length is not None and args.protocol != "official":
        raise ConfigError(
            "--max-length cuts official prompts; in the paper protocol documents lose whole "
            "pieces, where the model's positions ask for it"
        )
    if args.data is None:
        raise ConfigError("which samples? give --data a folder of NAME.jsonl, or hub")
    tasks = args.tasks or list(DEFAULT_TASKS)
    records = {name: load_records(name, args.data, args.limit) for name in tasks}
    if _has_wrongdoc(conditions):
        for name, samples in records.items():
            if len({sample["context"] for sample in samples}) < 2:
                raise ConfigError(
                    f"wrongdoc needs two different contexts of {name}; use a larger --limit"
                )
    if any(TASKS[name].metric == "rouge_l" for name in tasks):
        extras.need("rouge", "c2kv[eval]")  # now, not after hours
    with run_folder(args.out) as folder:
        return _run(args, load_engine(args), conditions, records, folder)


def _run(
    args: argparse.Namespace,
    engine: Any,
    conditions: list[Condition],
    records: dict[str, list[dict[str, Any]]],
    folder: Path,
) -> int:
    from tqdm import tqdm

    from c2kv.evaluation.protocols import answer_official, answer_paper
    from c2kv.evaluation.run import SUMMARY, Run, manifest, rows_digest, write_json

    methods = [condition.name for condition in conditions]
    names = ("protocol", "limit", "max_length", "batch")
    settings = {"kind": "longbench", **{name: getattr(args, name) for name in names}}
    settings["samples"] = {name: rows_digest(rows) for name, rows in records.items()}
    described = manifest(engine, conditions, settings)
    run = Run(folder, described)
    has_wrongdoc = _has_wrongdoc(conditions)
    for name, samples in records.items():
        done = run.resume(name, conditions)
        left = [record for record in samples if record["_id"] not in done]
        with tqdm(
            total=len(samples),
            initial=len(done),
            desc=name,
            unit="sample",
            file=sys.stderr,
            leave=False,
            disable=None,
        ) as bar:
            for start in range(0, len(left), args.batch):
                some = left[start : start + args.batch]
                if args.protocol == "official":
                    rows = answer_official(engine, name, some, args.max_length)
                else:
                    others = [_next_foreign(samples, one) for one in some] if has_wrongdoc else ()
                    rows = answer_paper(engine, name, some, conditions, others)
                run.append(name, rows)
                engine.forget()  # the next samples' documents are other ones
                bar.update(len(some))
    summaries = {name: summarize(run.rows(name), methods) for name in records}
    result = {"manifest": described, "tasks": summaries, "mean": _mean(summaries, methods)}
    write_json(folder / SUMMARY, result)
    print(json.dumps(result, indent=2) if args.json else _table(result, methods))
    bad = sum(one["failed"] for summary in summaries.values() for one in summary.values())
    if bad:
        print(f"c2kv: {bad} samples failed; see 'error' in the samples", file=sys.stderr)
    return 1 if bad else 0


def _has_wrongdoc(conditions: list[Condition]) -> bool:
    return any(condition.control == "wrongdoc" for condition in conditions)


def _next_foreign(samples: list[dict[str, Any]], one: dict[str, Any]) -> dict[str, Any]:
    """The next sample of another context; there is one, or the command had been refused."""
    at = samples.index(one)
    rotated = (*samples[at + 1 :], *samples[:at])
    return next(other for other in rotated if other["context"] != one["context"])


def summarize(rows: list[dict[str, Any]], methods: list[str]) -> dict[str, dict[str, Any]]:
    """By method: the official score (mean x 100, rounded to 2), median TTFT, entries."""
    summary = {}
    for method in methods:
        every = [row for row in rows if row["condition"] == method]
        some = [row for row in every if "error" not in row]
        one: dict[str, Any] = {"scored": len(some), "failed": len(every) - len(some)}
        if some:
            one["score"] = round(100 * sum(row["score"] for row in some) / len(some), 2)
            one["ttft"] = statistics.median(row["ttft"] for row in some)
            one["entries"] = sum(row["entries"] for row in some) / len(some)
            one["cut"] = sum(row["cut_tokens"] > 0 for row in some)
        summary[method] = one
    return summary


def _mean(summaries: dict[str, Any], methods: list[str]) -> dict[str, float]:
    """Unweighted mean of the tasks' scores, for methods of which no sample failed: others were
    scored on other samples."""
    found = {}
    for method in methods:
        scores = [summary[method].get("score") for summary in summaries.values()]
        failed = any(summary[method]["failed"] for summary in summaries.values())
        if None not in scores and not failed:
            found[method] = round(sum(scores) / len(scores), 2)
    return found


def _score(scores: dict[str, Any]) -> str:
    """With the number of samples in it where some failed."""
    partial = f" (of {scores['scored']})" if scores["failed"] else ""
    return (f"{scores['score']:.2f}" if "score" in scores else "-") + partial


def _table(result: dict[str, Any], methods: list[str]) -> str:
    from c2kv.evaluation.longbench import IN_DISTRIBUTION, NOTE

    tasks = result["tasks"]
    names = [task + ("*" if task in IN_DISTRIBUTION else "") for task in tasks]
    counted = [str(max(one["scored"] for one in by.values())) for by in tasks.values()]
    rows = [["samples", *counted, ""]]
    for method in methods:
        mean = f"{result['mean'][method]:.2f}" if method in result["mean"] else "-"
        rows.append([method, *(_score(by[method]) for by in tasks.values()), mean])
    text = table(rows, ["", *names, "mean"])
    protocol = result["manifest"]["protocol"]
    return f"LongBench, {protocol} protocol\n{text}\n{NOTE}"
