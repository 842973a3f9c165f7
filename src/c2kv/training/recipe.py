"""Recipes: everything that fixes a training run, as a YAML file checked on loading."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from c2kv.errors import ConfigError
from c2kv.extractor.config import VARIANTS, check_ratio

# How a run is computed, watched and kept; resuming may change these.
_DECIDE_NOTHING = (
    *("output", "checkpoint_every", "evaluate_every", "dev_samples", "dev", "trackers"),
    *("gradient_checkpointing", "shard"),
)
TRAINS = ("extractor", "block", "block-lora")
SCHEDULES = ("cosine", "linear")
TRACKERS = ("tensorboard", "wandb")
DTYPES = ("auto", "float32", "bfloat16")  # float16 would need its loss scaled
_COUNTS = (
    *("lora_rank", "groups", "questions", "checkpoint_every", "evaluate_every", "dev_samples"),
    *("document_tokens", "pieces", "answer_tokens", "passages", "passage_tokens"),
)
OBJECTIVES = ("sft", "reconstruct", "continue")


@dataclass(frozen=True)
class DataSource:
    """source: a file or `hub:owner/name`; format: of `c2kv.training.records`; weight: how often
    it is drawn relative to the others (default: by its number of questions)."""

    source: str
    format: str = "auto"
    split: str | None = None
    weight: float | None = None

    @property
    def name(self) -> str:
        """Without folder and endings, or `hub:`."""
        if self.source.startswith("hub:"):
            return self.source.removeprefix("hub:")
        return Path(self.source).name.split(".")[0]


@dataclass(frozen=True)
class Stage:
    """steps optimizer steps on a mix of objectives, drawn in proportion to their weights.

    `sft` is the paper's objective; `reconstruct` (repeat a passage from its entries) and
    `continue` (go on where a passage was cut) are warm-ups beyond it."""

    steps: int
    mix: dict[str, float] = field(default_factory=lambda: {"sft": 1.0})

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"a stage of {self.steps} steps does nothing; remove it")
        if unknown := set(self.mix) - set(OBJECTIVES):
            raise ConfigError(f"objectives {sorted(unknown)} are unknown; use {OBJECTIVES}")
        if not self.mix or min(self.mix.values()) < 0 or not sum(self.mix.values()):
            raise ConfigError(f"mix {self.mix} draws nothing; give an objective a weight above 0")


@dataclass(frozen=True)
class Recipe:
    """The paper's settings are the defaults; see `recipes/` for whole runs.

    trains: `extractor`, or the backbone itself for Block-Attention (`block`, or `block-lora` with
    adapters of rank `lora_rank`); start: an extractor (folder or hub id) to go on from, of the
    same variant, instead of a fresh one; anneal: a plain extractor begins as a residual one (and
    may start from one), whose share of the block's mean falls to nothing over so many steps;
    ratios: drawn per sample when given (one extractor for
    several ratios); groups: groups of questions in a step, over all processes; documents: fewest
    and most in a sample; exclude: evaluation data, whose questions, and passages that answer them,
    are neither asked nor answered from in training; distill: share of the loss that follows full
    recompute's distribution instead of the answer; gradient_checkpointing: less memory for about
    a third more computation; shard: spread the frozen backbone over the processes (FSDP)
    instead of holding all of it in each; trackers: of Accelerate (`tensorboard`, `wandb`), beside
    `metrics.jsonl`."""

    model: str
    data: tuple[DataSource, ...]
    output: str
    trains: str = "extractor"
    lora_rank: int = 16
    stages: tuple[Stage, ...] = (Stage(1250),)
    dev: tuple[DataSource, ...] = ()
    exclude: tuple[DataSource, ...] = ()
    ratio: int = 4
    ratios: tuple[int, ...] = ()
    variant: str = "plain"
    start: str | None = None
    anneal: int = 0
    dtype: str = "auto"
    seed: int = 0
    groups: int = 32
    documents: tuple[int, int] = (10, 20)
    questions: int = 1
    document_tokens: int = 1024
    pieces: int = 4
    answer_tokens: int = 128
    passages: int = 8
    passage_tokens: int = 96
    distill: float = 0.0
    gradient_checkpointing: bool = False
    shard: bool = False
    learning_rate: float = 5e-5
    schedule: str = "cosine"
    final_learning_rate: float = 0.0
    warmup_steps: int = 500
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    checkpoint_every: int = 100
    evaluate_every: int = 100
    dev_samples: int = 32
    trackers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for ratio in (self.ratio, *self.ratios):
            check_ratio(ratio)
        if self.ratios and self.ratio not in self.ratios:
            raise ConfigError(f"ratio {self.ratio}, the default one, is not among {self.ratios}")
        if self.variant not in VARIANTS:
            raise ConfigError(f"variant '{self.variant}' is unknown; use {' or '.join(VARIANTS)}")
        if self.anneal < 0 or (self.anneal and self.variant != "plain"):
            raise ConfigError(f"anneal {self.anneal} is a number of steps, for the plain variant")
        if self.anneal and self.anneal >= self.steps:
            raise ConfigError(
                f"anneal {self.anneal} must end before the run, at {self.steps} steps"
            )
        if self.dev and self.dev_samples < 2:
            raise ConfigError(f"dev_samples {self.dev_samples} is too few; use at least 2")
        if self.trains != "extractor":
            self._check_block()
        for name, known in (("trains", TRAINS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} '{getattr(self, name)}' is unknown; use one of {known}")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is not positive")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} {getattr(self, name)} trains nothing; use one above 0")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ConfigError(
                f"warmup_steps {self.warmup_steps} must end before the run, at {self.steps} steps"
            )
        if unknown := set(self.trackers) - set(TRACKERS):
            raise ConfigError(f"trackers {sorted(unknown)} are unknown; use {TRACKERS}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype '{self.dtype}' is unknown; use one of {DTYPES}")
        if not 0 <= self.distill <= 1:
            raise ConfigError(f"distill {self.distill} is no share; use 0 to 1")
        if not self.data or not self.stages:
            raise ConfigError("a recipe needs data and at least one stage")

    def _check_block(self) -> None:
        """Raises ConfigError for settings that only extractors have."""
        ours = ("ratio", "ratios", "variant", "start", "anneal", "distill")
        for f in fields(self):
            if f.name in (*ours, "gradient_checkpointing", "shard") and (
                getattr(self, f.name) != f.default
            ):
                raise ConfigError(f"{f.name} is for training extractors; leave it out")

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides the run (not of how it is computed, watched or kept)."""
        values = dataclasses.asdict(self)
        for name in _DECIDE_NOTHING:
            del values[name]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def load_recipe(path: str | Path, settings: tuple[str, ...] = ()) -> Recipe:
    """Read a YAML recipe; each of `settings` is `key=value`, value as YAML, and wins.

    Raises ConfigError naming the key that is unknown, missing or of the wrong type."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read recipe '{path}': {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe '{path}' is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"recipe '{path}' holds no keys; see recipes/ for examples")
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ConfigError(f"setting '{setting}' is not key=value")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"setting '{setting}' is not YAML: {reason}") from error
    return _build(Recipe, values, str(path))


def _build(kind: type, values: Any, where: str) -> Any:
    """`values` as the dataclass `kind`, checked recursively."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected keys and values, not {values!r}")
    hints = typing.get_type_hints(kind)
    if unknown := set(values) - set(hints):
        raise ConfigError(f"{where}: unknown key '{min(unknown)}'; known: {', '.join(hints)}")
    required = {f.name for f in fields(kind) if _is_required(f)}
    if missing := required - set(values):
        raise ConfigError(f"{where}: key '{min(missing)}' is missing")
    return kind(**{k: _convert(hints[k], v, f"{where}: {k}") for k, v in values.items()})


def _is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: Any, where: str) -> Any:
    if is_dataclass(hint):
        return _build(hint, value, where)  # type: ignore[arg-type]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        if inner[-1] is Ellipsis:
            return tuple(_convert(inner[0], item, where) for item in value)
        if len(inner) == len(value):
            return tuple(_convert(i, item, where) for i, item in zip(inner, value, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {k: _convert(inner[1], v, where) for k, v in value.items()}
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif type(None) in inner:
        return None if value is None else _convert(inner[0], value, where)
    elif hint in (bool, int, str) and type(value) is hint:
        return value
    elif hint is float and isinstance(value, str):  # YAML reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            pass
    raise ConfigError(f"{where}: {value!r} is not of the expected type {hint}")
