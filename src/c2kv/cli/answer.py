"""c2kv ask: answer questions from documents; c2kv extract: prepare documents ahead of time."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from c2kv.cli.common import (
    add_engine_options,
    extraction_progress,
    human_bytes,
    human_seconds,
    load_engine,
    method_name,
    prepare_documents,
    read_documents,
    table,
    whole_number,
)
from c2kv.errors import ConfigError

if TYPE_CHECKING:
    from c2kv.document import Document
    from c2kv.engine import Answer, Engine

COMPARED = ("c2kv", "recompute")


def add_commands(commands: Any) -> None:
    ask = commands.add_parser("ask", help="answer questions from documents")
    ask.add_argument(
        "-q", "--question", action="append", required=True, help="repeat for a batch of questions"
    )
    way = ask.add_mutually_exclusive_group()
    way.add_argument(
        "--method",
        type=method_name,
        default="c2kv",
        help="c2kv (default), recompute, reuse, epic-32 …: see `c2kv methods`",
    )
    way.add_argument(
        "--compare", action="store_true", help="c2kv and full recompute side by side, with figures"
    )
    ask.add_argument("--json", action="store_true", help="answers and their reports as JSON")
    ask.add_argument("-n", "--max-new-tokens", type=whole_number(1), default=64, metavar="N")
    ask.add_argument("--sample", action="store_true", help="sample instead of greedy decoding")
    ask.add_argument("--temperature", type=float, help="default: the model's generation config")
    ask.add_argument("--top-p", type=float, help="default: the model's generation config")
    ask.add_argument("--seed", type=int, default=0)
    add_engine_options(ask)
    ask.set_defaults(run=run_ask)

    extract = commands.add_parser("extract", help="extract documents into the store")
    extract.add_argument("--json", action="store_true", help="what was stored as JSON")
    add_engine_options(extract)
    extract.set_defaults(run=run_extract)


def run_ask(args: argparse.Namespace) -> int:
    if not args.sample and (args.temperature is not None or args.top_p is not None):
        raise ConfigError("--temperature and --top-p have no effect without --sample; add it")
    texts = read_documents(args.documents)
    engine = load_engine(args)
    documents = prepare_documents(engine, texts)
    with extraction_progress(engine):
        if args.compare:
            engine.check(args.question, documents, **_options(args))
            engine.extract(documents)
            answers = {method: _ask(engine, documents, args, method) for method in COMPARED}
        else:
            answers = {args.method: _ask(engine, documents, args, args.method)}
    if args.json:
        print(json.dumps(_as_json(args, answers), ensure_ascii=False, indent=2))
    elif args.compare:
        _print_comparison(args.question, answers)
    else:
        _print_answers(args, answers[args.method])
    return 0


def _ask(
    engine: Engine, documents: list[Document], args: argparse.Namespace, method: str
) -> list[Answer]:
    stream = len(args.question) == 1 and not args.json and not args.compare

    def show(_: int, text: str) -> None:
        print(text, end="", flush=True)

    return engine.ask(
        args.question,
        documents,
        method=method,
        on_text=show if stream else None,
        **_options(args),
    )


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_new_tokens", "sample", "temperature", "top_p", "seed")
    return {name: getattr(args, name) for name in names}


def _as_json(args: argparse.Namespace, answers: dict[str, list[Answer]]) -> list[dict[str, Any]]:
    return [
        {"question": question, "answer": answer.text, "report": answer.report.as_dict()}
        for found in answers.values()
        for question, answer in zip(args.question, found, strict=True)
    ]


def _print_answers(args: argparse.Namespace, answers: list[Answer]) -> None:
    if len(answers) == 1:
        print()  # ends the streamed line
    else:
        for question, answer in zip(args.question, answers, strict=True):
            print(f"{question}\n  {answer.text}")
    report = answers[0].report
    came = ", ".join(
        f"{count} {how}"
        for count, how in (
            (report.segments_from_memory, "from memory"),
            (report.segments_from_disk, "from disk"),
            (report.segments_extracted, "extracted now"),
        )
        if count
    )
    lines = [
        f"method {report.method}, ratio {report.ratio}, {report.documents} documents, "
        f"{report.source_tokens} source tokens in "
        f"{report.entries} entries ({human_bytes(report.kv_bytes)})",
    ]
    if report.segments:
        lines.append(f"segments {report.segments}: {came}")
    if report.extractor_digest:
        state = "UNTRAINED: this answer means nothing" if report.untrained else "trained"
        lines.append(f"extractor {report.extractor_digest[:12]} ({state})")
    rate = report.decode_tokens_per_second
    lines.append(
        f"TTFT {human_seconds(report.ttft)} (extraction {human_seconds(report.extract)}), question "
        f"{human_seconds(report.question_prefill)}" + (f", {rate:.1f} tokens/s" if rate else "")
    )
    print("\n".join(lines), file=sys.stderr)


def _print_comparison(questions: list[str], answers: dict[str, list[Answer]]) -> None:
    for index, question in enumerate(questions):
        print(f"Q: {question}")
        width = max(map(len, answers))
        for method, found in answers.items():
            note = "  [untrained extractor: means nothing]" if found[index].report.untrained else ""
            print(f"  {method.ljust(width)}  {found[index].text}{note}")
    full = answers["recompute"][0].report
    rows = []
    for method, found in answers.items():
        r = found[0].report
        rate = r.decode_tokens_per_second
        rows.append(
            [
                method,
                f"{r.source_tokens}",
                f"{r.entries}",
                human_bytes(r.kv_bytes),
                human_seconds(r.ttft),
                f"{full.ttft / r.ttft:.0f}×",
                human_seconds(r.question_prefill),
                f"{rate:.1f}" if rate else "-",
            ]
        )
    header = ["method", "source", "entries", "KV", "TTFT", "faster", "question", "tokens/s"]
    print("\n" + table(rows, header))
    print(
        "TTFT: from the request to the documents' KV ready (segments extracted before, in memory)."
    )


def run_extract(args: argparse.Namespace) -> int:
    texts = read_documents(args.documents)
    engine = load_engine(args)
    documents = prepare_documents(engine, texts)
    with extraction_progress(engine):
        got = engine.extract(documents)
    entries = sum(segment.entries for segment in got.segments)
    result = {
        "store": args.store,
        "documents": len(documents),
        "segments": [segment.key for segment in got.segments],
        "extracted": got.extracted,
        "reused": got.from_disk,
        "source_tokens": sum(document.tokens for document in documents),
        "entries": entries,
        "kv_bytes": entries * engine.backbone.kv_bytes_per_entry,
        "seconds": got.extract_seconds,
        "extractor_digest": engine.library.maker.digest,
        "untrained": engine.untrained,
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"{len(documents)} documents, {result['source_tokens']} tokens: {got.extracted} segments "
        f"extracted in {human_seconds(got.extract_seconds)}, {got.from_disk} already stored; "
        f"{entries} entries, {human_bytes(entries * engine.backbone.kv_bytes_per_entry)}"
    )
    if result["untrained"]:
        print("the extractor is UNTRAINED: answers from these segments mean nothing")
    return 0
