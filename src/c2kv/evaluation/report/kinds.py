"""What a report says of each kind of run: sentences, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from c2kv.evaluation.bars import bars_table
from c2kv.evaluation.longbench import IN_DISTRIBUTION, NOTE
from c2kv.evaluation.report import figures
from c2kv.evaluation.report.join import Joined
from c2kv.evaluation.report.parts import Figure, Section, Table


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def qa(joined: Joined) -> Section:
    name, summary = joined.name, joined.summary
    mean, sets = summary["mean"], summary["sets"]
    columns = (
        ("f1", "F1", 1),
        ("over_wrongdoc", "over wrongdoc", 1),
        ("nll", "NLL", 3),
        ("entries", "KV entries", 0),
        ("kl", "KL", 3),
        ("top1", "top-1", 3),
    )
    rows = tuple(
        (
            name,
            *(
                _number(scores.get(key), digits) + _margin(scores, key)
                for key, _, digits in columns
            ),
        )
        for name, scores in mean.items()
    )
    names = tuple(sets)
    by_set = tuple(
        (condition, *(_score(sets[name][condition], "f1", 1) for name in names))
        for condition in mean
    )
    nlls = tuple(
        (condition, *(_score(sets[name][condition], "nll", 3) for name in names))
        for condition in mean
    )
    scored = {name: max(by["scored"] for by in one.values()) for name, one in sets.items()}
    text = (
        "The same questions over the same documents, by each method and under controls. "
        "wrongdoc: another question's documents; budget: raw text cut to as many entries; noctx: "
        "no documents; shuffled: documents reversed. NLL is of the expected answer, in nats a "
        "token; KL and top-1 agreement are with the same model's full recompute, along its own "
        "answer. ±: 95 % interval over the questions; over wrongdoc: F1 above the same method's "
        "from wrong documents, question by question. Sets whose training split an "
        "extractor has seen (named above, or on its card) are in-distribution for it."
    )
    header, expected = bars_table(joined.bars)
    header[0] = "expected of an extractor"
    checks = (Table(tuple(header), tuple(map(tuple, expected))),) if expected else ()
    figure = figures.svg(figures.scores({n: one["f1"] for n, one in mean.items() if "f1" in one}))
    alt = "F1 by condition, mean of the sets"
    questions = ", ".join(f"{name} {count}" for name, count in scored.items())
    return Section(
        f"Question answering: {name}",
        f"{text} Questions: {questions}.{_failures(sets)}",
        (
            Figure(figure, alt),
            Table(("mean of the sets", *(title for _, title, _ in columns)), rows),
            *checks,
            Table(("F1", *names), by_set),
            Table(("NLL", *names), nlls),
        ),
    )


def _failures(sets: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A sentence on samples that failed, which no score counts; nothing where none did."""
    failed = [
        f"{name} {one['failed']:.0f} of {one['failed'] + one['scored']:.0f} under {condition}"
        for name, by in sets.items()
        for condition, one in by.items()
        if one["failed"]
    ]
    if not failed:
        return ""
    return (
        f" FAILED samples are in no score, and scores with failures are over fewer samples than "
        f"the others: {'; '.join(failed)}."
    )


def longbench(joined: Joined) -> Section:
    summary = joined.summary
    tasks, described = summary["tasks"], summary["manifest"]
    methods = tuple(described["conditions"])
    names = tuple(task + ("*" if task in IN_DISTRIBUTION else "") for task in tasks)
    note = NOTE if any(task in IN_DISTRIBUTION for task in tasks) else ""
    counted = (str(max(one["scored"] for one in by.values())) for by in tasks.values())
    rows = [("samples", *counted, "")]
    for method in methods:
        scores = (_score(by[method], "score", 2) for by in tasks.values())
        rows.append((method, *scores, _number(summary["mean"].get(method), 2)))
    ttfts = tuple((m, *(_ttft(by[m]) for by in tasks.values())) for m in methods)
    entries = tuple(
        (m, *(_number(by[m].get("entries"), 0) for by in tasks.values())) for m in methods
    )
    points = {
        name: {m: (scores[m]["ttft"], scores[m]["score"]) for m in methods if "score" in scores[m]}
        for name, scores in tasks.items()
    }
    text = (
        f"LongBench v1 by the {described['protocol']} protocol, official scores. Protocols are not "
        "comparable with each other. TTFT: from the request to the documents' KV ready, what a "
        "method keeps made before, in memory."
    )
    cut = sum(max(one.get("cut", 0) for one in scores.values()) for scores in tasks.values())
    text += _failures(tasks)
    if cut:
        text += f" {cut} contexts were longer than what is allowed, and lost their middle."
    return Section(
        f"LongBench: {joined.name}",
        text,
        (
            Table(("score", *names, "mean"), tuple(rows), note),
            Figure(figures.svg(figures.trade_off(points)), "score over TTFT, a panel a task"),
            Table(("median TTFT", *tasks), ttfts),
            Table(("KV entries", *tasks), entries),
        ),
    )


def _score(scores: dict[str, Any], key: str, digits: int) -> str:
    """With the number of samples in it where some failed."""
    partial = f" (of {scores['scored']})" if scores["failed"] else ""
    return _number(scores.get(key), digits) + partial


def _margin(scores: dict[str, Any], key: str) -> str:
    return f" ± {scores[f'{key}_margin']:.1f}" if f"{key}_margin" in scores else ""


def _ttft(scores: dict[str, Any]) -> str:
    return _seconds(scores["ttft"]) if "ttft" in scores else "–"


def probes(joined: Joined) -> Section:
    name, summary = joined.name, joined.summary
    scores = summary["found"]
    groups = tuple(dict.fromkeys(group for by in scores.values() for group in by))
    rows = tuple(
        (name, *(_number(by.get(group), 0) for group in groups)) for name, by in scores.items()
    )
    text = (
        "A code, a number or a name planted in a document, and asked for: percent found to the "
        "letter, by kind, by where its document stands, and by whether it ends where a block does."
    )
    for condition, count in summary["failed"].items():
        text += f" {count} samples FAILED under {condition} and are not counted."
    return Section(f"Exact strings: {name}", text, (Table(("% found", *groups), rows),))


def bench(joined: Joined) -> Section:
    name, summary = joined.name, joined.summary
    costs = summary["costs"]
    rows = tuple(
        (
            c["method"],
            str(c["source_tokens"]),
            str(c["documents"]),
            str(c["entries"]),
            _seconds(c["ready"]["median"]),
            f"{_seconds(c['ready']['least'])} to {_seconds(c['ready']['most'])}",
            _number(c["speedup"], 1),
            _seconds(c["disk"]["median"]) if c["disk"] else "–",
            _seconds(c["cold"]["median"]) if c["cold"] else "–",
            _seconds(c["question"]),
            f"{c['decode_tokens_per_second']:.1f}",
            _mega(c["peak_bytes"]),
            _mega(c["stored_bytes"]),
            _mega(c["loaded_bytes"]),
            paid(c),
        )
        for c in costs
    )
    parts = tuple(
        (
            c["method"],
            str(c["source_tokens"]),
            str(c["documents"]),
            *(_seconds(c[part]) for part in ("load", "blend", "compose")),
        )
        for c in costs
    )
    header = (
        *("method", "tokens", "documents", "entries", "TTFT", "spread", "× faster", "disk", "cold"),
        *("question", "tokens/s", "peak MB", "stored MB", "loaded MB", "pays after"),
    )
    text = (
        "Medians of interleaved repeats (peak: of one answer). TTFT: from the request to the "
        "documents' KV ready, kept state in memory; disk: in the store; cold: nothing kept. "
        "× faster: than full recompute. stored: bytes on disk; loaded: KV bytes. "
        "pays after: requests until preparing once beats full recompute."
    )
    described = summary["manifest"]
    points = {(c["source_tokens"], c["documents"]) for c in (*costs, *summary["failed"])}
    if missing := len(described["tokens"]) * len(described["counts"]) - len(points):
        text += f" NOT RUN to its end: {missing} points are missing."
    text += "".join(f" FAILED: {failure(one)}." for one in summary["failed"])
    if not costs:
        return Section(f"What a request costs: {name}", text)
    return Section(
        f"What a request costs: {name}",
        text,
        (
            Figure(figures.svg(figures.breakdown(costs)), "parts of TTFT by method"),
            Figure(
                figures.svg(figures.growth(costs)),
                "TTFT, memory and decode rate over context length",
            ),
            Table(header, rows),
            Table(("parts of TTFT", "tokens", "documents", "read", "computed", "placed"), parts),
        ),
    )


def failure(one: Mapping[str, Any]) -> str:
    """A sentence on a method that failed at one point."""
    at = f"{one['source_tokens']} tokens in {one['documents']} documents"
    return f"{one['method']} failed with {at}: {one['error']}"


def paid(cost: Mapping[str, Any]) -> str:
    """Requests until preparing has paid off, as text; of a cost as `bench` keeps it."""
    if cost["break_even"] is None:
        compared = cost["cold"] and cost["speedup"] and cost["method"] != "recompute"
        return "never" if compared else "–"
    return f"{cost['break_even']:.1f}"


def _seconds(value: float) -> str:
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def _mega(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e6:.1f}"


def deviation(joined: Joined) -> Section:
    name, summary = joined.name, joined.summary
    rows = summary["methods"]
    table = tuple(
        (r["method"], f"{100 * r['recomputed']:.1f}", f"{r['deviation']:.4f}") for r in rows
    )
    text = (
        "Relative distance of each method's KV from full recompute's for the same tokens, over the "
        f"share of the work it computes online ({summary['source_tokens']} tokens)."
    )
    drawing = figures.svg(figures.deviation(rows))
    return Section(
        f"KV deviation: {name}",
        text,
        (
            Figure(drawing, "KV deviation over the share recomputed"),
            Table(("method", "recomputed %", "deviation"), table),
        ),
    )
