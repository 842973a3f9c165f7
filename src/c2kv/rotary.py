"""Placing keys: the rotate-half form of RoPE, as a plain function and as one fused pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [..., head_dim] by angles broadcast to it. Differentiable.

    Dimension i is paired with i + head_dim/2 (transformers' rotate-half layout)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def place(kv: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Write a segment's KV into a cache, keys rotated, values as they are.

    kv, out: [layers, 2, kv_heads, entries, head_dim]; cos, sin: [entries, head_dim].
    float32 on the CPU is written in a single pass over the data; other dtypes and devices go
    through torch operations, straight into `out`."""
    if kv.dtype == torch.float32 and kv.device.type == "cpu" and out.device.type == "cpu":
        _place_fused(kv, cos, sin, out)
        return
    half = kv.shape[-1] // 2
    out[:, 1].copy_(kv[:, 1])
    keys, target = kv[:, 0].to(out.device), out[:, 0]
    torch.mul(keys, cos, out=target)
    target[..., :half].addcmul_(keys[..., half:], sin[..., :half], value=-1)
    target[..., half:].addcmul_(keys[..., :half], sin[..., half:])


@cache
def _fused_kernel() -> Any:
    # Three eager operations read and write the keys about three times; this reads and writes
    # once. Compiled on first use and cached on disk by numba.
    import numba

    @numba.njit(nogil=True, cache=True, fastmath={"contract", "nsz"})
    def kernel(kv: Any, cos: Any, sin: Any, out: Any, start: int, stop: int) -> None:
        _, _, heads, entries, dim = kv.shape
        half = dim // 2
        for layer in range(start, stop):
            for head in range(heads):
                for e in range(entries):
                    for i in range(half):
                        a = kv[layer, 0, head, e, i]
                        b = kv[layer, 0, head, e, i + half]
                        out[layer, 0, head, e, i] = a * cos[e, i] - b * sin[e, i]
                        out[layer, 0, head, e, i + half] = b * cos[e, i] + a * sin[e, i]
                    for i in range(dim):
                        out[layer, 1, head, e, i] = kv[layer, 1, head, e, i]

    return kernel


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="c2kv-place")


def _place_fused(kv: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    kernel = _fused_kernel()
    layers, threads = kv.shape[0], torch.get_num_threads()
    arrays = [t.detach().numpy() for t in (kv, cos, sin, out)]
    bounds = [layers * i // threads for i in range(threads + 1)]
    # The kernel releases the GIL, and disjoint layers need no lock.
    jobs = [
        _workers(threads).submit(kernel, *arrays, start, stop)
        for start, stop in zip(bounds, bounds[1:], strict=False)
        if start < stop
    ]
    for job in jobs:
        job.result()
