"""Scores of an answer, 0 to 1, as the benchmarks' official scripts compute them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from c2kv import extras

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD's and LongBench's rule)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answers: Sequence[str]) -> float:
    """The best token F1 (multiset overlap) over the accepted answers."""
    return max(_f1(normalize(prediction).split(), normalize(a).split()) for a in answers)


def _f1(predicted: list[str], expected: list[str]) -> float:
    shared = (Counter(predicted) & Counter(expected)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L's F of the PyPI package `rouge`, LongBench's (other packages give other numbers).

    What that package cannot score (an empty text, say) is 0, as in the official script."""
    rouge = extras.load("rouge", "c2kv[eval]")
    try:
        return rouge.Rouge().get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError, ZeroDivisionError, IndexError):
        return 0.0


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 over the number of classes named, if the right one is; names that are part of the
    right one's do not count."""
    named = [name for name in classes if name in prediction]
    # The official script removes from the list it walks, and so passes over the name after each
    # one removed. Its numbers are the benchmark.
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            named.remove(named[at])
        at += 1
    return 1 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Share of the numbers written that are the paragraph's."""
    (expected, *_) = re.findall(r"Paragraph (\d+)", answer)
    return count(prediction, expected)


def count(prediction: str, answer: str) -> float:
    """Share of the numbers written that are the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0
