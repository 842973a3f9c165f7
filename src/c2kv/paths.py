"""Where c2kv keeps what it makes. Free of torch, so that the command line may ask."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Converted models and the default store: $C2KV_HOME, else ~/.cache/c2kv."""
    return Path(os.environ.get("C2KV_HOME") or Path.home() / ".cache" / "c2kv")
