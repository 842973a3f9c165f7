"""Answering samples in batches that memory may not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Rows = list[dict[str, Any]]


def in_halves(
    answer: Callable[[Sequence[T]], Rows],
    samples: Sequence[T],
    failed: Callable[[T, Exception], dict[str, Any]],
) -> Rows:
    """The rows of `answer(samples)`; where the device's memory does not hold them all, of each half
    by itself, down to single samples, which then have a row by `failed`."""
    try:
        return answer(samples)
    except torch.OutOfMemoryError as error:
        if len(samples) == 1:
            return [failed(samples[0], error)]
    # Not within `except`, where the traceback would keep the failed batch alive.
    half = len(samples) // 2
    parts = (samples[:half], samples[half:])
    return [row for part in parts for row in in_halves(answer, part, failed)]
