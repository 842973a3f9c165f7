"""Placing keys: the rotate-half form of RoPE, as a plain function and as one fused pass."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_CHUNK_LAYERS = 4


class Part(NamedTuple):
    """KV [layers, 2, kv_heads, entries, head_dim] with keys before RoPE, to stand from `slot` on;
    cos and sin [entries, head_dim] rotate its keys."""

    kv: Tensor
    cos: Tensor
    sin: Tensor
    slot: int


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [..., head_dim] by angles broadcast to it. Differentiable.

    Dimension i is paired with i + head_dim/2 (transformers' rotate-half layout)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def place(parts: Sequence[Part], arena: Tensor, row: int = 0) -> None:
    """Write parts into a row of a cache arena [layers, 2, batch, kv_heads, capacity, head_dim]
    (contiguous): keys rotated, values as they are.

    float32 on the CPU is written in a single pass over the data; other dtypes and devices go
    through torch operations, straight into the arena."""
    if _is_fused(arena.dtype, arena.device):
        _place_fused(parts, arena, row)
        return
    half = arena.shape[-1] // 2
    for kv, cos, sin, slot in parts:
        out = arena[:, :, row, :, slot : slot + kv.shape[3]]
        kv = kv.to(out.device)  # contiguous: a single copy onto a device
        out[:, 1].copy_(kv[:, 1])
        keys, target = kv[:, 0], out[:, 0]
        torch.mul(keys, cos, out=target)
        target[..., :half].addcmul_(keys[..., half:], sin[..., :half], value=-1)
        target[..., half:].addcmul_(keys[..., :half], sin[..., half:])


def warm_up(dtype: torch.dtype, device: torch.device) -> None:
    """Load the fused pass now where `place` will use it, so that no request waits for it."""
    if _is_fused(dtype, device):
        _fused_kernel()


def _is_fused(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float32 and device.type == "cpu"


@cache
def _fused_kernel() -> Any:
    # Three eager operations read and write the keys about three times; this reads and writes
    # once. Compiled once per machine (about a second), then cached on disk by numba.
    import numba

    # A fixed signature compiles nothing in the middle of a request; contiguous layouts
    # (`::1`) let it vectorise.
    signature = "void(f4[:,:,:,:,::1], f4[:,::1], f4[:,::1], i8, f4[:,:,:,:,:,::1], i8, i8, i8)"

    def kernel(kv, cos, sin, slot, arena, row, start, stop):  # type: ignore[no-untyped-def]
        _, _, heads, entries, dim = kv.shape
        half = dim // 2
        for layer in range(start, stop):
            for head in range(heads):
                for e in range(entries):
                    to = slot + e
                    for i in range(half):
                        a = kv[layer, 0, head, e, i]
                        b = kv[layer, 0, head, e, i + half]
                        arena[layer, 0, row, head, to, i] = a * cos[e, i] - b * sin[e, i]
                        arena[layer, 0, row, head, to, i + half] = b * cos[e, i] + a * sin[e, i]
                    for i in range(dim):
                        arena[layer, 1, row, head, to, i] = kv[layer, 1, head, e, i]

    options = {"nogil": True, "fastmath": {"contract", "nsz"}}
    try:
        return numba.njit(signature, cache=True, **options)(kernel)
    except RuntimeError as error:  # numba finds no folder it may write its cache to
        _log.warning("the placing kernel is compiled anew in each process: %s", error)
        return numba.njit(signature, **options)(kernel)


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="c2kv-place")


def _place_fused(parts: Sequence[Part], arena: Tensor, row: int) -> None:
    kernel = _fused_kernel()
    layers, helpers = arena.shape[0], torch.get_num_threads() - 1
    out = arena.detach().numpy()
    # Small chunks, taken as threads come free: torch's own threads spin for a while after their
    # last operation, and would slow down whoever holds a fixed share.
    chunks: deque[tuple[Any, ...]] = deque()
    for part in parts:
        arrays = [t.detach().cpu().contiguous().numpy() for t in part[:3]]
        for start in range(0, layers, _CHUNK_LAYERS):
            stop = min(start + _CHUNK_LAYERS, layers)
            chunks.append((*arrays, part.slot, out, row, start, stop))

    def work() -> None:
        with suppress(IndexError):  # none left
            while True:
                kernel(*chunks.popleft())  # disjoint memory, and the kernel releases the GIL

    jobs = [_workers(helpers).submit(work) for _ in range(helpers)]
    work()
    for job in jobs:
        job.result()
