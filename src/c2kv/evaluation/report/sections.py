"""Finished runs as sections of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from c2kv.errors import DataError
from c2kv.evaluation.report import kinds
from c2kv.evaluation.report.join import join
from c2kv.evaluation.report.parts import Section
from c2kv.evaluation.run import FORMAT, SUMMARY, read_json

_KINDS = {
    "qa": kinds.qa,
    "longbench": kinds.longbench,
    "probes": kinds.probes,
    "bench": kinds.bench,
    "deviation": kinds.deviation,
}


def read_sections(folders: Sequence[Path]) -> list[Section]:
    """A section for each run, or for several that measured the same samples. Raises DataError
    when one is no run, or not finished."""
    runs = []
    for folder in folders:
        if not (folder / SUMMARY).exists():
            raise DataError(f"'{folder}' holds no {SUMMARY}: no run, or not run to its end yet")
        summary = read_json(folder / SUMMARY)
        made_as = summary.get("manifest", {}).get("format")
        if made_as != FORMAT:
            raise DataError(
                f"run '{folder}' has format {made_as!r} and this c2kv reads {FORMAT}: "
                "report it with the version that made it, or run it again"
            )
        kind = summary["manifest"].get("kind")
        if kind not in _KINDS:
            raise DataError(f"run '{folder}' is of no known kind ({kind!r})")
        same = sum(other.name == folder.name for other in folders)
        runs.append((folder.name if same == 1 else str(folder), summary))
    sections = []
    for joined in join(runs):
        made = _KINDS[joined.summary["manifest"]["kind"]](joined)
        sections.append(replace(made, facts=_joined_facts(joined.manifests)))
    return sections


def _joined_facts(manifests: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What all runs share is said once, the rest with the run's name."""
    of = {run: _facts(described) for run, described in manifests.items()}
    facts = {}
    for fact in dict.fromkeys(fact for some in of.values() for fact in some):
        values = {run: some[fact] for run, some in of.items() if fact in some}
        if len(values) == len(of) and len(set(values.values())) == 1:
            facts[fact] = next(iter(values.values()))
        else:
            facts |= {f"{fact}, {run}": value for run, value in values.items()}
    return facts


def _facts(described: dict[str, Any]) -> dict[str, str]:
    """Where the numbers come from."""
    machine, versions = described["machine"], described["versions"]
    digest, dtype = described["backbone_digest"][:12], described["dtype"]
    facts = {
        "model": f"{described['model']} ({digest}), {dtype}",
        "machine": f"{machine['device']}, {machine['threads']} of {machine['cores']} cores, "
        f"{machine['processor']}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    extractors = {
        f"{one['variant']}, k = {one['ratio']} ({one['digest'][:12]})": one
        for one in described["extractors"].values()
    }
    learnt: dict[str, list[str]] = {}  # who learnt from what
    for name, one in sorted(extractors.items()):
        if data := one.get("trained_on"):
            learnt.setdefault(", ".join(data), []).append(name)
    if extractors:
        facts["extractors"] = "; ".join(sorted(extractors))
    if len(learnt) == 1:
        facts["trained on"] = next(iter(learnt))
    for data, names in learnt.items() if len(learnt) > 1 else ():
        facts[f"trained on ({', '.join(names)})"] = data
    if described["untrained"]:
        facts["untrained"] = f"{', '.join(described['untrained'])}: these scores mean nothing"
    if described.get("fine_tuned"):
        facts["fine-tuned for blocks"] = described["fine_tuned"]
    for name in (
        *("segment_tokens", "limit", "per_question", "seed", "protocol", "max_length"),
        *("max_new_tokens", "repeats", "batch"),
    ):
        if described.get(name) is not None:
            facts[name.replace("_", " ")] = str(described[name])
    return facts
