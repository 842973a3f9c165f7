"""Checkpoints of a run: everything to go on bit for bit, each appearing whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from c2kv.errors import ConfigError, DataError
from c2kv.training.recipe import Recipe
from c2kv.training.subject import Subject

_KEPT = 2


def checkpoints(recipe: Recipe) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((Path(recipe.output) / "checkpoints").glob("step-*"))


def save(
    recipe: Recipe, step: int, subject: Subject, steps: int, optimizer: torch.optim.Optimizer
) -> None:
    """Write what step `step` of the run left (`steps` in all, those of runs before it included),
    and drop all but the newest checkpoints."""
    folder = Path(recipe.output) / "checkpoints" / f"step-{step:07d}"
    if folder.exists():
        return
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    subject.save(partial, steps)
    torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    state = {"step": step, "recipe": recipe.digest, "settings": asdict(recipe)}
    (partial / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    _sync(partial)
    os.replace(partial, folder)
    for old in checkpoints(recipe)[:-_KEPT]:
        shutil.rmtree(old)


def _sync(folder: Path) -> None:
    """Bring a folder and its files to the disk: the checkpoint before is about to go."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def load(folder: Path, recipe: Recipe) -> tuple[int, dict[str, Any]]:
    """A checkpoint's step and optimizer state. Raises DataError when it is damaged, ConfigError
    when another recipe made it."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"checkpoint '{folder}' is damaged ({reason}); remove it") from error
    if state["recipe"] != recipe.digest:
        raise ConfigError(
            f"checkpoint '{folder}' was made by another recipe; resume with the settings in "
            "its state.json, or choose another output"
        )
    return state["step"], optimizer
