"""Anchor tokens (the paper's contrast): composed from documents read apart, or read together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from c2kv.composition import Composition
from c2kv.document import Document, token_ids
from c2kv.library import Retrieval
from c2kv.methods.base import Materials, Method, Prefilled, Stored
from c2kv.methods.registry import refuse
from c2kv.methods.reuse import Reuse


class JointAnchors(Stored):
    """All documents in a row as one input, as anchors are trained: a segment of it serves only
    requests with the same documents in the same order."""

    def prepare(self, documents: Sequence[Document]) -> Retrieval:
        whole = tuple(token_ids(documents))
        return self.library.get([whole] if whole else [])

    def prefill(self, prefix: Composition, documents: Sequence[Document]) -> Prefilled:
        got = self.prepare(documents)
        return Prefilled.of(got, replace(prefix, segments=tuple(got.segments)))


def build(name: str, parameters: list[str], materials: Materials) -> Method:
    if parameters not in ([], ["joint"]):
        raise refuse(name, "anchor")
    library = materials.compressed("anchor")
    return JointAnchors(name, library) if parameters else Reuse(name, library)
