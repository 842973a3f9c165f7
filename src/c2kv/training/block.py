"""Fine-tuning a backbone for Block-Attention (arXiv 2409.15355), whole or by LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from c2kv import extras
from c2kv.backbone import Backbone
from c2kv.fullkv import full_kv
from c2kv.library import SegmentMaker, Uncompressed
from c2kv.methods.block import CONFIG_KEY
from c2kv.training.loss import Group, answer_logits, compose, placed, recomputed_logits
from c2kv.training.recipe import Recipe

_STATE = "trained.safetensors"
_STEPS = f"{CONFIG_KEY}_steps"


class BlockSubject:
    """The backbone's own weights. Each sample is seen twice: documents in blocks, as reuse reads
    them, and in full, so that ordinary prompts stay what they were."""

    finished = "model"

    def __init__(self, recipe: Recipe, backbone: Backbone, checkpoint: Path | None):
        self.backbone = backbone
        self.lora = recipe.trains == "block-lora"
        self.earlier = getattr(backbone.config, _STEPS, 0)
        model = backbone.model
        self._adapted: Any = None
        if self.lora:
            peft = extras.load("peft", "c2kv[train]")
            config = peft.LoraConfig(
                r=recipe.lora_rank, lora_alpha=2 * recipe.lora_rank, target_modules="all-linear"
            )
            with torch.random.fork_rng():  # adapters start from random numbers
                torch.manual_seed(recipe.seed)
                self._adapted = peft.get_peft_model(model, config)  # changes the layers in place
        else:
            model.float().requires_grad_(True)
        self.loss: nn.Module = _BothModes(backbone)
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if checkpoint is not None:
            saved = load_file(checkpoint / _STATE)
            with torch.no_grad():
                for name, parameter in self._trained.items():
                    parameter.copy_(saved[name])

    def begin(self, step: int) -> None:
        """Nothing changes from step to step."""

    def total(self, group: Group, ratio: int) -> tuple[Tensor, int]:
        return block_loss(self.backbone, group)

    def maker(self) -> SegmentMaker:
        return Uncompressed(self.backbone)

    def save(self, folder: Path, steps: int) -> None:
        folder.mkdir(parents=True)
        state = {n: p.detach().cpu().contiguous() for n, p in self._trained.items()}
        save_file(state, folder / _STATE)

    def finish(self, folder: Path, steps: int) -> None:
        model = self._adapted.merge_and_unload() if self.lora else self.backbone.model
        setattr(model.config, CONFIG_KEY, "lora" if self.lora else "full")
        setattr(model.config, _STEPS, steps)
        model.to(torch.bfloat16).save_pretrained(folder)
        self.backbone.tokenizer.save_pretrained(folder)


class _BothModes(nn.Module):
    def __init__(self, backbone: Backbone):
        super().__init__()
        self.model = backbone.model
        self._backbone = [backbone]

    def forward(self, group: Group, ratio: int) -> Tensor:
        backbone = self._backbone[0]
        loss, tokens = block_loss(backbone, group)
        logits, targets = recomputed_logits(backbone, group)
        full = F.cross_entropy(logits.float(), targets, reduction="sum")
        return (loss + full) / (2 * tokens)


def block_loss(backbone: Backbone, group: Group) -> tuple[Tensor, int]:
    """Sum over answer tokens of next-token cross-entropy (scalar), documents each attending to
    themselves alone, and the number of tokens. Differentiable in the backbone's weights."""
    kvs = dict(enumerate(full_kv(backbone, group.documents)))
    starts = list(dict.fromkeys(q.prefix for q in group.questions))
    prefixes = dict(zip(starts, full_kv(backbone, starts), strict=True))
    rows = []
    for q in group.questions:
        prefix = placed(backbone, prefixes[q.prefix], 0, len(q.prefix), 1)
        rows.append(compose(backbone, prefix, kvs, group, q, 1))
    logits, targets = answer_logits(backbone, rows, group.questions)
    return F.cross_entropy(logits.float(), targets, reduction="sum"), len(targets)
