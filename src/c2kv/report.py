"""Report: how an answer came about."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """Bytes of KV: `kv_bytes` a question attends to, `loaded_bytes` of stored state it was made
    from. recomputed: token·layer products computed online. Times in seconds; `ttft` is the
    paper's: from the request to the documents' KV complete on the device, the sum of `load`,
    `extract` (0 when every segment came from the store), `blend` and `compose`."""

    method: str
    model: str
    backbone_digest: str
    extractor_digest: str | None
    untrained: bool
    ratio: int
    dtype: str
    device: str
    documents: int
    segments: int
    segments_from_memory: int
    segments_from_disk: int
    segments_extracted: int
    source_tokens: int
    entries: int
    kv_bytes: int
    loaded_bytes: int
    recomputed: int
    ttft: float
    load: float
    extract: float
    blend: float
    compose: float
    question_prefill: float
    question_tokens: int
    new_tokens: int
    decode_tokens_per_second: float | None
    batch: int
    finish_reason: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
