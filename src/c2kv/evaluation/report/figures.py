"""A report's figures (matplotlib). A method has the same colour in all of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from c2kv import extras
from c2kv.evaluation.conditions import split

_PALETTE = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#9c6b4e", "#97bbf5")
_KNOWN = {"recompute": "#57606a", "reuse": "#9498a0", "c2kv": "#4269d0"}
_MARKERS = ("o", "s", "^", "D", "v", "P")
_FONT = {"font.family": "sans-serif", "font.size": 9, "svg.fonttype": "none"}


def _method(condition: str) -> str:
    """The name without the run's, which stands in brackets where several have the method."""
    return condition.partition(" (")[0]


def _colours(conditions: Sequence[str]) -> dict[str, str]:
    """One for each method, also when several runs have it."""
    free = [c for c in _PALETTE if c not in _KNOWN.values()]
    others = [m for m in dict.fromkeys(map(_method, conditions)) if m not in _KNOWN]
    by_method = {**_KNOWN, **{m: free[i % len(free)] for i, m in enumerate(others)}}
    return {condition: by_method[_method(condition)] for condition in conditions}


def _is_control(condition: str) -> bool:
    """Whether it shows what a score is worth, and is no method to choose."""
    name = _method(condition)
    return split(name)[0] is not None or name == "random"


def _figure(width: float, height: float) -> Any:
    extras.need("matplotlib", "c2kv[plot]")
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(_FONT)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.7)
    axes.set_axisbelow(True)


def svg(figure: Any) -> str:
    """A figure as SVG text, the same for the same run."""
    buffer = io.StringIO()
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "c2kv"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def scores(by_condition: dict[str, float]) -> Any:
    """Horizontal bars, a control paler than a method."""
    figure = _figure(7, 0.9 + 0.34 * len(by_condition))
    axes = figure.add_subplot()
    names = list(by_condition)[::-1]
    colours = _colours([n for n in by_condition if not _is_control(n)])
    for at, name in enumerate(names):
        colour = "#c8ccd2" if _is_control(name) else colours[name]
        axes.barh(at, by_condition[name], color=colour, height=0.7)
        axes.annotate(
            f"{by_condition[name]:.1f}",
            (by_condition[name], at),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("F1 (mean of the sets)")
    axes.margins(x=0.12)
    _plain(axes)
    axes.grid(axis="y", visible=False)
    return figure


def trade_off(points: dict[str, dict[str, tuple[float, float]]]) -> Any:
    """Methods' score over TTFT (log), a panel a task: up and left is better (the paper's
    Figure 7)."""
    columns = min(4, len(points))
    rows = -(-len(points) // columns)
    figure = _figure(2.6 * columns + 0.6, 2.5 * rows + 0.5)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    methods = [m for one in points.values() for m in one if not _is_control(m)]
    colours = _colours(methods)
    runs = list(dict.fromkeys(m.partition(" (")[2] for m in methods))
    for axes, (task, one) in zip(panels, points.items(), strict=False):
        for method, (ttft, score) in one.items():
            if _is_control(method):
                continue
            marker = _MARKERS[runs.index(method.partition(" (")[2]) % len(_MARKERS)]
            style = {"color": colours[method], "marker": marker, "zorder": 3}
            axes.scatter(ttft, score, s=46, label=method, **style)
        axes.set_xscale("log")
        axes.margins(0.15)
        axes.set_title(task, fontsize=9)
        axes.set_xlabel("TTFT (s)")
        axes.set_ylabel("score")
        _plain(axes)
    for axes in panels[len(points) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=min(6, len(handles)),
        frameon=False,
    )
    return figure


def breakdown(costs: Sequence[dict[str, Any]]) -> Any:
    """Parts of TTFT at the longest context, log scale aside: full recompute's prefill against
    what the others load and compute (the paper's Figure 3)."""
    longest = max(c["source_tokens"] for c in costs)
    some = [c for c in costs if c["source_tokens"] == longest]
    some = [c for c in some if c["documents"] == some[0]["documents"]][::-1]
    figure = _figure(7, 1.1 + 0.36 * len(some))
    axes = figure.add_subplot()
    parts = (
        ("blend", "computed online", "#57606a"),
        ("load", "read from memory", "#efb118"),
        ("compose", "placed in the cache", "#4269d0"),
    )
    for at, cost in enumerate(some):
        left = 0.0
        for key, label, colour in parts:
            axes.barh(at, cost[key], left=left, color=colour, height=0.7, label=label)
            left += cost[key]
        axes.annotate(
            f"{left:.3g} s", (left, at), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(some)), [c["method"] for c in some])
    axes.set_xlabel(f"TTFT (s), {longest} source tokens")
    axes.margins(x=0.12)
    _plain(axes)
    axes.grid(axis="y", visible=False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique, frameon=False, loc="lower right")
    return figure


def growth(costs: Sequence[dict[str, Any]]) -> Any:
    """TTFT (log), peak memory and decode rate over source tokens."""
    figure = _figure(10, 3.2)
    panels = figure.subplots(1, 3)
    methods = list(dict.fromkeys(c["method"] for c in costs))
    colours = _colours(methods)
    first = costs[0]["documents"]
    for method in methods:
        line = [c for c in costs if c["method"] == method]
        if any(c["documents"] == first for c in line) and len({c["documents"] for c in line}) > 1:
            line = [c for c in line if c["documents"] == first]
        xs = [c["source_tokens"] for c in line]
        style = {"color": colours[method], "marker": "o", "markersize": 4, "linewidth": 1.5}
        panels[0].plot(xs, [c["ready"]["median"] for c in line], label=method, **style)
        if all(c["peak_bytes"] is not None for c in line):
            panels[1].plot(xs, [c["peak_bytes"] / 1e6 for c in line], **style)
        panels[2].plot(xs, [c["decode_tokens_per_second"] for c in line], **style)
    panels[0].set_yscale("log")
    for axes, title in zip(
        panels, ("TTFT (s)", "peak memory of an answer (MB)", "decoding (tokens/s)"), strict=True
    ):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("source tokens")
        _plain(axes)
    panels[2].set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=min(8, len(methods)), frameon=False)
    return figure


def deviation(rows: Sequence[dict[str, Any]]) -> Any:
    """Deviation over the share recomputed, a line a family (the paper's Figure 2)."""
    figure = _figure(6.4, 3.8)
    axes = figure.add_subplot()
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        words = row["method"].split("-")
        family = "-".join(word for word in words if not word.replace(".", "").isdecimal())
        families.setdefault(family, []).append(row)
    start = families.pop("reuse", [])
    colours = _colours(list(families))
    for family in families:
        line = sorted([*start, *families[family]], key=lambda row: row["recomputed"])
        xs, ys = [100 * r["recomputed"] for r in line], [r["deviation"] for r in line]
        axes.plot(xs, ys, marker="o", markersize=5, color=colours[family], label=family)
    if start:
        axes.axhline(start[0]["deviation"], color="0.6", linewidth=1, linestyle=":")
        at = (100, start[0]["deviation"])
        axes.annotate("reuse: nothing recomputed", at, ha="right", va="bottom")
    axes.set(xlabel="recomputed (% of tokens × layers)", ylabel="KV deviation from full recompute")
    axes.set_ylim(bottom=0)
    _plain(axes)
    if families:
        axes.legend(frameon=False)
    return figure
