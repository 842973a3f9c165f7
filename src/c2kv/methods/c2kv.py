"""C2KV and C2KV-Residual (arXiv 2607.17715): reuse of an extractor's segments."""

from __future__ import annotations

from c2kv.errors import ConfigError
from c2kv.library import SegmentLibrary
from c2kv.methods.base import Materials, Method
from c2kv.methods.registry import refuse
from c2kv.methods.reuse import Reuse


def build(name: str, parameters: list[str], materials: Materials) -> Method:
    """`c2kv` takes the engine's extractor, `c2kv-plain` and `c2kv-residual` one of that variant."""
    if parameters not in ([], ["plain"], ["residual"]):
        raise refuse(name, "c2kv")
    library = materials.compressed(parameters[0] if parameters else None)
    return Reuse(name, composable(name, library))


def composable(name: str, library: SegmentLibrary) -> SegmentLibrary:
    """The library, unless its segments do not compose: raises ConfigError for anchors."""
    if library.maker.variant == "anchor":
        raise ConfigError(f"the extractor for '{name}' makes anchors; use the method anchor")
    return library
