"""RANDOM, a control: C2KV with an extractor that was never trained."""

from __future__ import annotations

from c2kv.methods.base import Materials, Method
from c2kv.methods.registry import refuse
from c2kv.methods.reuse import Reuse


def build(name: str, parameters: list[str], materials: Materials) -> Method:
    if parameters:
        raise refuse(name, "random")
    return Reuse(name, materials.compressed("random"))
