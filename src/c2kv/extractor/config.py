"""ExtractorConfig: everything that fixes what an extractor computes, checked on creation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from c2kv.errors import ConfigError

CONFIG_FILE = "extractor.json"
FORMAT_VERSION = 1
# What an extractor computes; `anchor` is the paper's contrast: KV that cannot be composed.
VARIANTS = ("plain", "residual", "anchor")
MAX_RATIO = 64
_KINDS = {"int": int, "str": str, "bool": bool, "float": float}
_LISTS = ("ratios", "trained_on")


@dataclass(frozen=True)
class ExtractorConfig:
    """Written as `extractor.json` beside the weights.

    ratio: source tokens per C2Token, 1 to 64; ratios: all it was trained for, where these are
    several. variant: `plain`, `residual` (C2KV-Residual, which adds the block's mean embedding to
    the C2Token's) or `anchor` (as residual, but source tokens see earlier anchors, not earlier
    source tokens).
    backbone, backbone_digest: what it was made for. steps: training steps done; 0 is an untrained
    extractor. trained_on: names of the data they drew from, in order. annealing: what a plain
    extractor still adds of its blocks' means while training lets go of them; 0 in a finished one.
    weights_digest: of the weights beside it (`Extractor.digest`), checked on loading."""

    ratio: int
    variant: str
    backbone: str
    backbone_digest: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    steps: int = 0
    weights_digest: str = ""
    ratios: tuple[int, ...] = ()
    trained_on: tuple[str, ...] = ()
    annealing: float = 0.0
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for ratio in (self.ratio, *self.ratios):
            check_ratio(ratio)
        for f in fields(self):
            value, kind = getattr(self, f.name), _KINDS.get(str(f.type), tuple)
            if type(value) is not kind or (type(value) is int and value < (f.name != "steps")):
                raise ConfigError(f"extractor config: {f.name} {value!r} is not a valid {f.type}")
        if self.ratios and self.ratio not in self.ratios:
            raise ConfigError(f"extractor config: ratio {self.ratio} is not among {self.ratios}")
        if not all(isinstance(name, str) for name in self.trained_on):
            raise ConfigError(f"extractor config: trained_on {self.trained_on!r} are not names")
        if self.variant not in VARIANTS:
            raise ConfigError(f"variant '{self.variant}' is unknown; use {' or '.join(VARIANTS)}")
        if not 0 <= self.annealing <= (self.variant == "plain"):
            raise ConfigError(f"extractor config: annealing {self.annealing} is no share of plain")
        if self.format_version != FORMAT_VERSION:
            raise ConfigError(
                f"extractor format {self.format_version} is not {FORMAT_VERSION}; "
                "use the c2kv release that wrote it, or train again"
            )

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> ExtractorConfig:
        """Raises ConfigError when the file is not a valid config."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"cannot read extractor config '{path}': {reason}; is it an extractor's folder?"
            ) from error
        known = {f.name for f in fields(cls)}
        if not isinstance(values, dict):
            raise ConfigError(f"'{path}' is not an extractor config; get the folder again")
        for name in _LISTS:
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        if unknown := set(values) - known:
            raise ConfigError(f"'{path}' is not an extractor config (unknown: {sorted(unknown)})")
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"'{path}' is not a complete extractor config: {error}") from error


def check_ratio(ratio: int) -> None:
    """Raises ConfigError for a compression ratio outside 1..64."""
    if isinstance(ratio, bool) or not isinstance(ratio, int) or not 1 <= ratio <= MAX_RATIO:
        raise ConfigError(
            f"ratio {ratio} is out of range; use a whole number from 1 to {MAX_RATIO}"
        )
