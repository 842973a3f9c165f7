"""c2kv train: train an extractor from a recipe."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from c2kv.cli.common import human_bytes

if TYPE_CHECKING:
    from c2kv.training.recipe import Recipe


def add_commands(commands: Any) -> None:
    train = commands.add_parser("train", help="train an extractor from a recipe")
    train.add_argument("recipe", metavar="RECIPE", help="a YAML file; see recipes/")
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="override a key of the recipe (value as YAML); repeat as needed",
    )
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    train.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 …")
    train.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    from c2kv.training.recipe import load_recipe

    recipe = load_recipe(args.recipe, tuple(args.settings))
    from transformers.utils import logging

    from c2kv.models import load_backbone
    from c2kv.training.trainer import Trainer

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    backbone = load_backbone(recipe.model, dtype=recipe.dtype, device=_device(args.device))
    trainer = Trainer(recipe, backbone, resume=args.resume)
    main = trainer.accelerator.is_main_process
    for source in trainer.sources if main else ():
        print(_source(source), file=sys.stderr)
    if args.dry_run:
        plan = _plan(recipe, trainer)
        if main:
            print(plan)
        return 0
    folder = trainer.train()
    print(f"{trainer.subject.finished} written to {folder}")
    return 0


def _device(asked: str) -> str:
    """Where this process computes: under `accelerate launch`, each has a GPU of its own."""
    import torch
    from accelerate import PartialState

    if asked == "auto":
        # Asked before PartialState, which would settle on another accelerator.
        return str(PartialState().device) if torch.cuda.is_available() else "cpu"
    if asked.startswith("cuda:"):
        torch.cuda.set_device(torch.device(asked))  # where Accelerate puts what it prepares
    return asked


def _plan(recipe: Recipe, trainer: Any) -> str:
    """The resolved recipe, sizes, and what real steps take."""
    import json
    from dataclasses import asdict

    import yaml

    backbone = trainer.backbone
    count = sum(p.numel() for p in trainer.subject.loss.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in backbone.model.parameters())
    seconds = trainer.probe()
    resolved = yaml.safe_dump(json.loads(json.dumps(asdict(recipe))), sort_keys=False)
    return (
        f"{resolved}\n"
        f"trained        {count:,} parameters, {count / whole:.1%} of the backbone\n"
        # Two moments of the optimizer are yet to come.
        f"memory         about {human_bytes(_peak(backbone.device) + 2 * 4 * count)} a process, "
        "at its most\n"
        + "".join(f"data           {_source(s)}\n" for s in trainer.sources)
        + f"steps          {recipe.steps} of {recipe.groups} groups\n"
        f"time           about {seconds / 3600:.1f} h, evaluations left out"
    )


def _source(source: dict[str, Any]) -> str:
    first = f" (first: {source['first_bad'][0]})" if source["first_bad"] else ""
    return (
        f"{source['source']}: {source['records']} records, {source['bad']} bad{first}, "
        f"{source['excluded']} held out"
    )


def _peak(device: Any) -> int:
    """The most bytes this process has held, of the device's memory where it computes on one."""
    import resource

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
