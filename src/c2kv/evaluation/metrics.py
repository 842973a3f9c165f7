"""Scores of an answer, as the benchmarks' official scripts compute them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD's and LongBench's rule)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answers: Sequence[str]) -> float:
    """The best token F1 (multiset overlap) over the accepted answers, 0 to 1."""
    return max(_f1(normalize(prediction).split(), normalize(a).split()) for a in answers)


def _f1(predicted: list[str], expected: list[str]) -> float:
    shared = (Counter(predicted) & Counter(expected)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)
