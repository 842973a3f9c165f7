"""What a run trains: an extractor here, the backbone itself in `c2kv.training.block`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from c2kv.backbone import Backbone
from c2kv.errors import ConfigError, TrainingError
from c2kv.extractor import Extractor
from c2kv.library import Compressed, SegmentMaker
from c2kv.models import weights_digest
from c2kv.training.loss import PADDING, Group, group_loss, prefix_kv
from c2kv.training.recipe import Recipe
from c2kv.training.samples import Sampler
from c2kv.training.shard import shard


class Subject(Protocol):
    """loss: a module over (group, ratio) that gives the mean loss, and holds what is trained;
    earlier: training steps it had before this run; finished: the folder its result goes to."""

    loss: nn.Module
    earlier: int
    finished: str

    def begin(self, step: int) -> None:
        """Told before each step, and before scoring what it left."""
        ...

    def total(self, group: Group, ratio: int) -> tuple[Tensor, int]:
        """The answers' summed NLL, and their tokens."""
        ...

    def maker(self) -> SegmentMaker:
        """Makes the segments its answers are read from, as it now stands."""
        ...

    def save(self, folder: Path, steps: int) -> None:
        """Write it exactly, for a checkpoint."""
        ...

    def finish(self, folder: Path, steps: int) -> None:
        """Check it, and write what the run was for."""
        ...


class ExtractorSubject:
    """An extractor; the backbone is frozen, and checked to be."""

    finished = "extractor"

    def __init__(
        self,
        recipe: Recipe,
        backbone: Backbone,
        sampler: Sampler,
        checkpoint: Path | None,
        step: int,
    ):
        """checkpoint: of this run, made at `step`, to go on from."""
        if checkpoint is not None:
            extractor = _unrounded(checkpoint, backbone)
        else:
            extractor = _fresh(recipe, backbone)
        self.backbone = backbone
        self.extractor = extractor.float()
        self.earlier = extractor.config.steps - step
        self._anneal = recipe.anneal
        self.loss: nn.Module = _MeanLoss(backbone, self.extractor, recipe)
        if recipe.shard:
            for prefix in sampler.prefixes:  # all now: later each process asks for its own
                prefix_kv(backbone, prefix)
            shard(backbone)
        self._frozen = weights_digest(backbone.model)

    def begin(self, step: int) -> None:
        if self._anneal:
            left = max(0.0, 1 - step / self._anneal)
            self.extractor.config = replace(self.extractor.config, annealing=left)

    def total(self, group: Group, ratio: int) -> tuple[Tensor, int]:
        return group_loss(self.backbone, self.extractor, group, ratio)

    def maker(self) -> SegmentMaker:
        return Compressed(self.backbone, self.extractor)

    def save(self, folder: Path, steps: int) -> None:
        self.extractor.save_pretrained(folder, dtype=torch.float32, steps=steps)

    def finish(self, folder: Path, steps: int) -> None:
        if weights_digest(self.backbone.model) != self._frozen:
            raise TrainingError("the backbone changed while training; the result is not valid")
        self.extractor.save_pretrained(folder, steps=steps)


def _fresh(recipe: Recipe, backbone: Backbone) -> Extractor:
    """What a run's first step starts from."""
    if recipe.start is None:
        extractor = Extractor.from_backbone(backbone, recipe.ratio, recipe.variant)
    else:
        extractor = _unrounded(recipe.start, backbone)
        # Annealed and anchor ones begin as residual ones do.
        begins = "residual" if recipe.anneal or recipe.variant == "anchor" else recipe.variant
        if extractor.config.variant not in (recipe.variant, begins):
            raise ConfigError(
                f"start '{recipe.start}' is {extractor.config.variant}, the recipe's variant is "
                f"{recipe.variant}; they must be the same"
            )
    config = extractor.config
    extractor.config = replace(
        config,
        variant=recipe.variant,
        ratio=recipe.ratio,
        ratios=recipe.ratios,
        annealing=0.0,
        trained_on=tuple(sorted({*config.trained_on, *(data.name for data in recipe.data)})),
    )
    return extractor


def _unrounded(source: str | Path, backbone: Backbone) -> Extractor:
    """An extractor for `backbone` with its weights as they were saved, whatever the backbone's
    precision is."""
    extractor = Extractor.from_pretrained(source)
    extractor.check_backbone(backbone)
    return extractor.to(backbone.device)


class _MeanLoss(nn.Module):
    """What DDP wraps: the extractor as a module, the frozen backbone beside it."""

    def __init__(self, backbone: Backbone, extractor: Extractor, recipe: Recipe):
        super().__init__()
        self.extractor = extractor
        self._recipe = recipe
        self._backbone = [backbone]  # in a list: not a submodule, so neither synced nor saved

    def forward(self, group: Group, ratio: int) -> Tensor:
        loss, tokens = group_loss(
            self._backbone[0],
            self.extractor,
            group,
            ratio,
            self._recipe.distill,
            self._recipe.gradient_checkpointing,
            # Processes that share weights must call the same layers equally often.
            math.inf if self._recipe.shard else PADDING,
        )
        return loss / tokens
