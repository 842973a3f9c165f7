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
        facts: dict[str, str] = {}
        for name, described in joined.manifests.items():
            of = f"{name}: " if len(joined.manifests) > 1 else ""
            facts |= {f"{of}{fact}": value for fact, value in _facts(described).items()}
        sections.append(replace(made, facts=facts))
    return sections


def _facts(described: dict[str, Any]) -> dict[str, str]:
    """Where the numbers come from."""
    machine, versions = described["machine"], described["versions"]
    digest, dtype = described["backbone_digest"][:12], described["dtype"]
    facts = {
        "model": f"{described['model']} ({digest}), {dtype}",
        "machine": f"{machine['device']}, {machine['cores']} cores, {machine['processor']}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    extractors = {
        f"{one['variant']}, k = {one['ratio']} ({one['digest'][:12]})"
        for one in described["extractors"].values()
    }
    if extractors:
        facts["extractors"] = "; ".join(sorted(extractors))
    if described["untrained"]:
        facts["untrained"] = f"{', '.join(described['untrained'])}: these scores mean nothing"
    if described.get("fine_tuned"):
        facts["fine-tuned for blocks"] = described["fine_tuned"]
    for name in (
        *("segment_tokens", "limit", "per_question", "seed", "protocol", "max_length"),
        *("max_new_tokens", "repeats"),
    ):
        if described.get(name) is not None:
            facts[name.replace("_", " ")] = str(described[name])
    return facts
