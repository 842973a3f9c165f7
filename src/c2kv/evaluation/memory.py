"""How much memory a piece of work takes at most."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def peak_bytes(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Bytes of memory above what was held at the start: of the device, or of this process (as
    sampled by psutil, where that is installed)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - held
        return
    try:
        import psutil
    except ImportError:
        yield lambda: None
        return
    process, done, most = psutil.Process(), threading.Event(), [0]
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        # What was freed but kept by the allocator would be taken again unseen.
        ctypes.CDLL(None).malloc_trim(0)
    held = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], process.memory_info().rss - held)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: most[0]
    finally:
        done.set()
        watcher.join()
