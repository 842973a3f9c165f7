"""Exact-string probes: a code, a number or a name planted in a document, and asked for.

What k tokens said has to fit one entry, so exact strings blur first; where they stand (an early
or a late document, the inside or the end of a block) must not matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any

from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.errors import ConfigError
from c2kv.evaluation.qa import Case

KINDS = ("code", "number", "name")
PLACES = ("early document", "late document")
ENDS = ("inside a block", "block end")

_THINGS = ("boiler room", "east gate", "spare safe", "chapel organ", "ferry office", "seed vault")
_FIRST = ("Orla", "Tamsin", "Ruben", "Imke", "Casimir", "Delphine", "Anselm", "Yrsa")
_LAST = ("Quillfeather", "Brandvold", "Oxenham", "Marchetti", "Sorrelby", "Vantongeren")


@dataclass(frozen=True)
class Probe:
    """A case, and what is varied in it. end: None where nothing is in blocks; expected: the planted
    string."""

    case: Case
    kind: str
    place: str
    end: str | None
    expected: str


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=3))
    return f"{letters}-{rng.randrange(1000, 10000)}"


_MAKE: dict[str, Callable[[random.Random], str]] = {
    "code": _code,
    "number": lambda rng: str(rng.randrange(10_000, 100_000)),
    "name": lambda rng: f"{rng.choice(_FIRST)} {rng.choice(_LAST)}",
}
_SENTENCES = {
    "code": (
        "The access code of the {thing} is {value}.",
        "What is the access code of the {thing}?",
    ),
    "number": (
        "The inventory number of the {thing} is {value}.",
        "What is the inventory number of the {thing}?",
    ),
    "name": ("The keeper of the {thing} is {value}.", "Who is the keeper of the {thing}?"),
}


def make_probes(
    engine: Engine, texts: Sequence[str], each: int, ratio: int, documents: int = 4, seed: int = 0
) -> list[Probe]:
    """`each` probes for every kind, place and (for a ratio above 1) end, in real texts (one
    paragraph of each is kept a document). Raises ConfigError when the texts are too few."""
    if len(texts) < documents:
        raise ConfigError(f"{len(texts)} texts make no {documents} documents; give more")
    probes = []
    ends: tuple[str | None, ...] = ENDS if ratio > 1 else (None,)
    for kind, place, end, number in product(KINDS, PLACES, ends, range(each)):
        name = f"{kind}, {place}, {end or 'anywhere'} {number}"
        rng = random.Random(f"{seed}/{name}")
        around = [_paragraph(rng, text) for text in rng.sample(list(texts), documents)]
        thing, value = rng.choice(_THINGS), _MAKE[kind](rng)
        sentence, question = (text.format(thing=thing, value=value) for text in _SENTENCES[kind])
        hay = [engine.document(text, f"text {i}") for i, text in enumerate(around)]
        at = 0 if place == "early document" else documents - 1
        hay[at] = _planted(engine, around[at], sentence, value, end == "block end", ratio)
        case = Case(name, tuple(hay), tuple(hay[:at] + hay[at + 1 :]), question, (value,))
        probes.append(Probe(case, kind, place, end, value))
    return probes


def _planted(
    engine: Engine, text: str, sentence: str, value: str, at_end: bool, ratio: int
) -> Document:
    """The text with the sentence in its middle, so that the planted string's last token ends a
    block, or does not: words before it are left out until that is so."""
    words = text.split()
    middle = len(words) // 2
    upto = sentence[: sentence.index(value) + len(value)]
    for dropped in range(middle):
        before, after = " ".join(words[: middle - dropped]), " ".join(words[middle:])
        document = engine.document(f"{before} {sentence} {after}", "planted")
        if len(document.pieces) > 1:
            raise ConfigError("a probe's document must be one segment; use more --segment-tokens")
        head = engine.document(f"{before} {upto}")
        pairs = zip(document.pieces[0], head.pieces[0], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if (shared % ratio == 0) == at_end or ratio == 1:
            return document
    raise ConfigError(f"a text of {len(words)} words leaves no place for a probe; give longer ones")


def _paragraph(rng: random.Random, text: str) -> str:
    """A stretch of some 120 words."""
    words = text.split()
    start = rng.randrange(max(1, len(words) - 120))
    return " ".join(words[start : start + 120])


def found(prediction: str, expected: str) -> float:
    """Whether the planted string stands in the answer, to the letter (case aside)."""
    return float(expected.lower() in prediction.lower())


def tabulate(
    probes: Sequence[Probe], rows: Sequence[dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """Percent found by condition: of all, and by each thing that was varied."""
    known = {probe.case.id: probe for probe in probes}
    scores: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if "error" in row:
            continue
        probe = known[row["id"]]
        hit = found(row["prediction"], probe.expected)
        by = scores.setdefault(row["condition"], {})
        for group in filter(None, ("all", probe.kind, probe.place, probe.end)):
            by.setdefault(group, []).append(hit)
    return {
        condition: {group: 100 * sum(hits) / len(hits) for group, hits in by.items()}
        for condition, by in scores.items()
    }
