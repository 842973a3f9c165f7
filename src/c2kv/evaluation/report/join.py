"""Runs over the same samples become one table: other extractors, backbones, or models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from c2kv.evaluation.bars import SHARED, Bar, bars
from c2kv.evaluation.conditions import split

# What two runs must share to stand side by side: samples, prompts (token by token, or NLL would be
# of other tokens), and where there are times, what they were measured on.
_SAME = {
    "qa": (
        *("data", "segment_tokens", "limit", "per_question", "seed", "max_new_tokens"),
        *("template_digest", "tokenizer_digest"),
    ),
    "longbench": (
        *("protocol", "segment_tokens", "limit", "max_length", "samples", "template_digest"),
        *("tokenizer_digest", "machine", "dtype"),
    ),
}
_BACKBONE = ("backbone_digest", "dtype", "template_digest")
_SCORES = {"qa": "sets", "longbench": "tasks"}


@dataclass(frozen=True)
class Joined:
    """A summary with the conditions of one or several runs, and the manifest of each by name."""

    summary: dict[str, Any]
    manifests: dict[str, dict[str, Any]]
    bars: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        return " + ".join(self.manifests)


def join(runs: Sequence[tuple[str, dict[str, Any]]]) -> list[Joined]:
    """Runs (name, summary) joined where they can be, in the order of the first of each. A
    condition that several have is named with its run; once, where they agree in all of it."""
    groups: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for number, (name, summary) in enumerate(runs):
        described = summary["manifest"]
        shared = [described.get(key) for key in _SAME.get(described["kind"], ())]
        key = json.dumps([described["kind"], shared or number], sort_keys=True)
        groups.setdefault(key, []).append((name, summary))
    return [_one(group) for group in groups.values()]


def _one(group: Sequence[tuple[str, dict[str, Any]]]) -> Joined:
    manifests = {name: summary["manifest"] for name, summary in group}
    asks = group[0][1]["manifest"]["kind"] == "qa"
    if len(group) == 1:
        return Joined(group[0][1], manifests, tuple(bars(group[0][1]["mean"])) if asks else ())
    scores = _SCORES[group[0][1]["manifest"]["kind"]]
    holders: dict[str, dict[str, str]] = {}  # by condition: what a run has of it, and its name
    for run, summary in group:
        for condition in summary["manifest"]["conditions"]:
            holders.setdefault(condition, {}).setdefault(_identity(summary, condition), run)
    conditions: list[str] = []
    mean: dict[str, Any] = {}
    sets: dict[str, dict[str, Any]] = {name: {} for name in group[0][1][scores]}
    checked: list[Bar] = []
    for run, summary in group:
        own = summary["mean"]
        for bar in bars({**_shared(group, summary), **own}) if asks else ():
            if run in holders.get(bar.method, {}).values():
                named = bar.method if len(holders[bar.method]) == 1 else f"{bar.method} ({run})"
                checked.append(replace(bar, method=named))
        for condition in summary["manifest"]["conditions"]:
            if run not in holders[condition].values():
                continue
            named = condition if len(holders[condition]) == 1 else f"{condition} ({run})"
            conditions.append(named)
            if condition in summary["mean"]:
                mean[named] = summary["mean"][condition]
            for name, by_condition in summary[scores].items():
                sets[name][named] = by_condition[condition]
    described = {**group[0][1]["manifest"], "conditions": conditions}
    joined = {"manifest": described, scores: sets, "mean": mean}
    return Joined(joined, manifests, tuple(checked))


def _identity(summary: dict[str, Any], condition: str) -> str:
    """A condition's figures in a run, its controls', and what made them."""
    described = summary["manifest"]
    makers = [described.get(key) for key in ("model", *_BACKBONE)]
    makers.append(described.get("extractors", {}).get(condition))
    own = [c for c in described["conditions"] if c == condition or split(c)[1] == condition]
    sets = summary[_SCORES[described["kind"]]].items()
    scores = {c: [summary["mean"].get(c), {name: by[c] for name, by in sets}] for c in own}
    return json.dumps([makers, scores], sort_keys=True)


def _shared(group: Sequence[tuple[str, dict[str, Any]]], summary: dict[str, Any]) -> dict[str, Any]:
    """What runs of the same backbone have measured for all of them."""
    return {
        name: scores
        for _, other in group
        if all(other["manifest"].get(k) == summary["manifest"].get(k) for k in _BACKBONE)
        for name, scores in other["mean"].items()
        if name in SHARED
    }
