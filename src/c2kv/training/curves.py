"""Curves of training runs, from their `metrics.jsonl`: losses and dev scores over training time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from c2kv import extras
from c2kv.errors import DataError

METRICS = "metrics.jsonl"
_SMOOTHED_OVER = 20  # steps


@dataclass(frozen=True)
class Curve:
    """One run. steps: (minutes, loss) of each; dev: (minutes, step, scores). Minutes are of
    training alone, evaluation left out; steps taken again after an interruption count once."""

    name: str
    steps: list[tuple[float, float]]
    dev: list[tuple[float, int, dict[str, float]]]


def read_curve(folder: Path) -> Curve:
    """Raises DataError when there is no run, or its metrics are damaged."""
    path = folder / METRICS
    taken: dict[int, dict[str, Any]] = {}
    scored: dict[int, dict[str, float]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "loss" in row:
                taken[row["step"]] = row
            elif "dev_gap" in row:
                scored[row["step"]] = {n: v for n, v in row.items() if n.startswith("dev_")}
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}; name a run's folder") from error
    except ValueError as error:
        raise DataError(f"'{path}' is damaged: {error}") from error
    minutes, clock = {0: 0.0}, 0.0
    steps = []
    for step in sorted(taken):
        clock += taken[step]["seconds"] / 60
        minutes[step] = clock
        steps.append((clock, taken[step]["loss"]))
    dev = [(minutes[s], s, scored[s]) for s in sorted(scored) if s in minutes]
    return Curve(folder.name, steps, dev)


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Dev gap, dev NLL with the right documents, and loss, over minutes of training."""
    extras.need("matplotlib", "c2kv[plot]")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    gap, right, loss = figure.subplots(1, 3)
    for curve in curves:
        at = [minutes for minutes, _, _ in curve.dev]
        gap.plot(at, [s["dev_gap"] for *_, s in curve.dev], marker="o", markersize=3)
        right.plot(at, [s["dev_nll_right"] for *_, s in curve.dev], marker="o", markersize=3)
        loss.plot(*_smoothed(curve.steps), linewidth=1.2, label=curve.name)
    gap.axhline(0, color="0.6", linewidth=1, linestyle=":")
    gap.set_title("does it read? NLL of answers,\nwrong documents minus right ones", fontsize=10)
    right.set_title("dev NLL of answers,\nright documents", fontsize=10)
    loss.set_title(f"training loss,\nmean of {_SMOOTHED_OVER} steps", fontsize=10)
    for axes in (gap, right, loss):
        axes.set_xlabel("minutes of training")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    gap.set_ylabel("nats a token")
    loss.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)


def _smoothed(steps: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    xs, ys = [], []
    for end in range(1, len(steps) + 1):
        window = steps[max(0, end - _SMOOTHED_OVER) : end]
        xs.append(window[-1][0])
        ys.append(sum(loss for _, loss in window) / len(window))
    return xs, ys
