"""What the controls say of a method: whether it reads, is worth its entries, keeps up, composes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from c2kv.evaluation.conditions import split


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
# What every method of a backbone is held against.
SHARED = ("noctx", "reuse", "recompute")


def bars(mean: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    """Bars of every method that was also asked with wrong documents; those that lack a control
    are left out, and so is what failed on a sample: it was scored on others. mean: F1, NLL and
    failures by condition."""
    found = []
    scored = {n: scores for n, scores in mean.items() if "f1" in scores and not scores["failed"]}
    for name, scores in scored.items():
        control, method = split(name)
        if control is not None:
            continue
        of = {split(n)[0]: other for n, other in scored.items() if split(n)[1] == method}
        of |= {n: other for n, other in scored.items() if n in SHARED and n != name}
        if "wrongdoc" not in of:
            continue
        found.append(Bar(name, "NLL gap to wrongdoc", of["wrongdoc"]["nll"] - scores["nll"], 1.0))
        for against, limit in _RATIOS:
            if against in of:
                ratio = scores["f1"] / of[against]["f1"] if of[against]["f1"] else None
                found.append(Bar(name, f"F1 / {against}", ratio, limit))
        if "shuffled" in of:
            change = abs(of["shuffled"]["f1"] / scores["f1"] - 1) if scores["f1"] else None
            found.append(Bar(name, "F1 change when shuffled", change, 0.1, at_least=False))
    return found


def bars_table(every: Sequence[Bar]) -> tuple[list[str], list[list[str]]]:
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
