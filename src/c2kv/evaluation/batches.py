"""Answering samples in batches that memory may not hold, or of which one overflows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from c2kv.errors import NumericalError

T = TypeVar("T")
Rows = list[dict[str, Any]]


def out_of_memory(error: Exception) -> bool:
    """Whether torch says by this that memory is too small: not always by an error of its own."""
    texts = ("CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
    return isinstance(error, torch.OutOfMemoryError) or any(t in str(error) for t in texts)


def in_halves(
    answer: Callable[[Sequence[T]], Rows],
    samples: Sequence[T],
    failed: Callable[[T, Exception], dict[str, Any]],
) -> Rows:
    """The rows of `answer(samples)`; where memory does not hold them all, or one gives values that
    are not finite, of each half by itself, down to single samples, which then have a row by
    `failed`."""
    try:
        return answer(samples)
    except (RuntimeError, NumericalError) as error:
        if not (isinstance(error, NumericalError) or out_of_memory(error)):
            raise
        if len(samples) == 1:
            return [failed(samples[0], error)]
    # Not within `except`, where the traceback would keep the failed batch alive.
    half = len(samples) // 2
    parts = (samples[:half], samples[half:])
    return [row for part in parts for row in in_halves(answer, part, failed)]
