"""What the controls say of a method: whether it reads, is worth its entries, keeps up, composes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from c2kv.evaluation.conditions import CONTROLS


@dataclass(frozen=True)
class Bar:
    """value: None where it has no meaning (a ratio to an F1 of 0)."""

    method: str
    name: str
    value: float | None
    limit: float
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


# F1 of a method over F1 of these, and what is expected of an extractor.
_RATIOS = (("wrongdoc", 2.0), ("noctx", 2.0), ("budget", 1.0), ("reuse", 1.0), ("recompute", 1.0))


def bars(mean: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    """Bars of every method that was also asked with wrong documents; those that lack a control
    are left out. mean: F1 and NLL by condition (in a report of several runs with the run's name in
    parentheses behind it)."""
    found = []
    for condition, scores in mean.items():
        method, opened, run = condition.partition(" (")
        if ":" in method or method in CONTROLS:
            continue

        def of(name: str, method: str = method, suffix: str = opened + run) -> Any:
            bare = (name,) if method == "c2kv" or name not in CONTROLS or name == "noctx" else ()
            for asked in (f"{name}:{method}", *bare):
                for one in (asked + suffix, asked):
                    if one in mean and "f1" in mean[one]:
                        return mean[one]
            return None

        wrong = of("wrongdoc")
        if wrong is None or "f1" not in scores:
            continue
        found.append(Bar(condition, "NLL gap to wrongdoc", wrong["nll"] - scores["nll"], 1.0))
        for name, limit in _RATIOS:
            other = of(name)
            if other is not None and other is not scores:
                ratio = scores["f1"] / other["f1"] if other["f1"] else None
                found.append(Bar(condition, f"F1 / {name}", ratio, limit))
        if (turned := of("shuffled")) is not None:
            change = abs(turned["f1"] / scores["f1"] - 1) if scores["f1"] else None
            found.append(Bar(condition, "F1 change when shuffled", change, 0.1, at_least=False))
    return found


def bars_table(every: list[Bar]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a bar a row, a method a column; what is missed says so."""
    methods = list(dict.fromkeys(bar.method for bar in every))
    rows: dict[str, list[str]] = {}
    for bar in every:
        row = rows.setdefault(bar.name, [bar.name, _limit(bar), *("–" for _ in methods)])
        shown = "–" if bar.value is None else f"{bar.value:.2f}"
        row[2 + methods.index(bar.method)] = shown + (" missed" if bar.met is False else "")
    return ["", "bar", *methods], list(rows.values())


def _limit(bar: Bar) -> str:
    return f"{'≥' if bar.at_least else '≤'} {bar.limit:g}"
