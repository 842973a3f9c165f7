"""The trainer: AdamW over what a recipe trains, with exact resume, on one process or many."""

from __future__ import annotations

import json
import math
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm

from c2kv import extras
from c2kv.backbone import Backbone
from c2kv.errors import ConfigError, TrainingError
from c2kv.prompt import PromptTemplate
from c2kv.training.block import BlockSubject
from c2kv.training.checkpoint import checkpoints, load, save
from c2kv.training.corpus import Corpus, HeldOut
from c2kv.training.curves import METRICS
from c2kv.training.dev import dev_scores
from c2kv.training.loss import Group
from c2kv.training.recipe import DataSource, Recipe, Stage
from c2kv.training.samples import SampleOptions, Sampler
from c2kv.training.subject import ExtractorSubject, Subject


class _Interrupt:
    """Notes Ctrl-C, so that a step is finished before it takes effect. (Elsewhere than in the
    main thread signals are not ours to take.)"""

    def __init__(self) -> None:
        self.seen = False
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: Any) -> None:
        if self.seen:  # asked twice: at once
            raise KeyboardInterrupt
        self.seen = True

    def close(self) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)


class Trainer:
    """One run of a recipe. Everything it writes is under `recipe.output`: `checkpoints/`,
    `metrics.jsonl`, and what was trained in `extractor/` (or `model/`)."""

    def __init__(self, recipe: Recipe, backbone: Backbone, resume: bool = False):
        self.recipe = recipe
        self.backbone = backbone
        self.output = Path(recipe.output)
        for tracker in recipe.trackers:  # Accelerate leaves out, without a word, one it cannot find
            extras.need(tracker, tracker)
        mixed = "bf16" if backbone.dtype == torch.bfloat16 else "no"
        self.accelerator = Accelerator(
            mixed_precision=mixed,
            cpu=backbone.device.type == "cpu",
            log_with=list(recipe.trackers) or None,
            project_dir=recipe.output,
        )
        world = self.accelerator.num_processes
        if recipe.groups % world:
            raise ConfigError(f"{recipe.groups} groups a step do not divide over {world} processes")
        self.template = PromptTemplate.of(backbone.tokenizer)
        names = [f.name for f in fields(SampleOptions)]
        options = SampleOptions(**{name: getattr(recipe, name) for name in names})
        with self.accelerator.main_process_first():  # the others find the corpora made
            corpora = self._corpora(recipe.data, HeldOut(recipe.exclude))
            dev = self._corpora(recipe.dev, HeldOut())
        self.sources = [
            {
                "source": s.source,
                "records": c.questions,
                "bad": c.bad,
                "first_bad": c.first_bad,
                "excluded": c.excluded,
            }
            for s, (c, _) in zip(recipe.data, corpora, strict=True)
        ]
        self.sampler = Sampler(corpora, self.template, options, recipe.seed)
        self.dev: Sampler | None = None
        if recipe.dev:
            self.dev = Sampler(dev, self.template, replace(options, questions=1), seed=1)
        earlier = checkpoints(recipe)
        if not resume and (earlier or (self.output / METRICS).exists()):
            raise TrainingError(
                f"'{self.output}' holds an earlier run; pass --resume to go on, or choose another "
                "output"
            )
        self.step, state = load(earlier[-1], recipe) if earlier else (0, None)
        checkpoint = earlier[-1] if earlier else None
        self.subject: Subject
        if recipe.trains == "extractor":
            self.subject = ExtractorSubject(recipe, backbone, self.sampler, checkpoint, self.step)
        else:
            self.subject = BlockSubject(recipe, backbone, checkpoint)
        trained = [p for p in self.subject.loss.parameters() if p.requires_grad]
        decay = {
            "params": [p for p in trained if p.dim() > 1],
            "weight_decay": recipe.weight_decay,
        }
        plain = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW([decay, plain], recipe.learning_rate, recipe.betas)
        if state is not None:
            self.optimizer.load_state_dict(state)
        self.module = self.accelerator.prepare(self.subject.loss)

    def _corpora(
        self, sources: Sequence[DataSource], held_out: HeldOut
    ) -> list[tuple[Corpus, float | None]]:
        tokens = self.recipe.document_tokens
        return [(Corpus.of(s, self.template, tokens, held_out), s.weight) for s in sources]

    def train(self, until: int | None = None) -> Path:
        """Run to the end (or to step `until`), saving on the way; returns the folder of what was
        trained. Raises TrainingError when the
        loss is not finite; the last good checkpoint stays. Ctrl-C ends the step, saves, and goes
        on up."""
        recipe, total = self.recipe, self.recipe.steps if until is None else until
        if recipe.trackers:
            self.accelerator.init_trackers("c2kv")
        for counts in self.sources:
            self._log(counts)
        bar = tqdm(
            total=total,
            initial=self.step,
            unit="step",
            disable=not self.accelerator.is_main_process,
        )
        interrupted = _Interrupt()
        try:
            while self.step < total:
                if self.step % recipe.evaluate_every == 0:
                    self.evaluate()
                metrics = self._one_step()
                self._log(metrics)
                bar.set_postfix_str(
                    f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:.0f} tok/s"
                )
                bar.update()
                if interrupted.seen or self.step % recipe.checkpoint_every == 0:
                    self._save()
                if interrupted.seen:
                    raise KeyboardInterrupt
        finally:
            interrupted.close()
            bar.close()
        self._save()
        if self.step == recipe.steps:
            self.evaluate()
        folder = self.output / self.subject.finished
        if self.step == recipe.steps and self.accelerator.is_main_process:
            self.subject.finish(folder, self._steps)
        return folder

    def probe(self) -> float:
        """Seconds that the losses and gradients of a run's steps take, from a step of each stage
        (its second, as what is done once counts for little); nothing is changed."""
        total, stands, self.step = 0.0, self.step, 0
        for stage in self.recipe.stages:
            for _ in range(2):
                start = self.backbone.now()
                self.subject.begin(self.step)
                for group, ratio in self._groups():
                    with self.accelerator.autocast():
                        self.accelerator.backward(self.module(group, ratio))
                seconds = self.backbone.now() - start
                self.optimizer.zero_grad()
            total += seconds * stage.steps
            self.step += stage.steps
        self.step = stands
        return total

    def evaluate(self) -> None:
        """Log the scores of dev samples."""
        if self.dev is None:
            return
        start = time.perf_counter()
        self.subject.begin(self.step)
        groups = [self.dev.qa(i) for i in range(self.recipe.dev_samples)]
        own = self.recipe.ratio
        ratios = [own, *(ratio for ratio in self.recipe.ratios if ratio != own)]
        # Weights kept in float32 answer in float32.
        mixed = self.backbone.dtype == torch.bfloat16
        with self.accelerator.autocast() if mixed else nullcontext():
            scores = dev_scores(self.backbone, self.subject, self.template, groups, ratios)
        self._log({"step": self.step, **scores, "seconds": _since(start)})

    @property
    def _steps(self) -> int:
        """All steps that what is trained has seen, those of earlier runs included."""
        return self.subject.earlier + self.step

    def _one_step(self) -> dict[str, Any]:
        recipe, start = self.recipe, time.perf_counter()
        rate = self._learning_rate()
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        self.subject.begin(self.step)
        losses, tokens = [], 0
        mine = list(self._groups())
        for position, (group, ratio) in enumerate(mine):
            last = position == len(mine) - 1
            # Processes exchange gradients once, after the last group.
            sync = self.accelerator.no_sync(self.module) if not last else nullcontext()
            with sync, self.accelerator.autocast():
                loss = self.module(group, ratio)
                self.accelerator.backward(loss / len(mine))
            losses.append(loss.detach().float())
            tokens += sum(map(len, group.documents))
            tokens += sum(len(q.question) + len(q.answer) for q in group.questions)
        mean = self.accelerator.reduce(torch.stack(losses).mean(), "mean").item()
        if not math.isfinite(mean):
            self.optimizer.zero_grad()
            raise self._not_finite("loss", mean)
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), recipe.clip)
        if not math.isfinite(float(norm)):
            self.optimizer.zero_grad()
            raise self._not_finite("gradient's norm", float(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        seconds = _since(start)
        return {
            "step": self.step,
            "loss": mean,
            "gradient_norm": float(norm),
            "learning_rate": rate,
            "tokens_per_second": tokens * self.accelerator.num_processes / seconds,
            "seconds": seconds,
        }

    def _not_finite(self, what: str, value: float) -> TrainingError:
        saved = checkpoints(self.recipe)
        advice = "train anew, in another output, with a lower learning rate or clip"
        if saved and self.recipe.trains == "extractor" and not self.recipe.anneal:
            advice = (
                f"the last good checkpoint is '{saved[-1]}': go on from it in another run, with "
                "start=…, another output and a lower learning rate"
            )
        return TrainingError(f"the {what} is {value} at step {self.step}; {advice}")

    def _groups(self) -> Iterator[tuple[Group, int]]:
        """This process's groups of the current step, each with its ratio."""
        recipe, stage = self.recipe, self._stage()
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        for index in range(
            self.step * recipe.groups + rank, (self.step + 1) * recipe.groups, world
        ):
            rng = random.Random(f"{recipe.seed}/plan/{index}")
            (objective,) = rng.choices(list(stage.mix), list(stage.mix.values()))
            ratio = rng.choice(recipe.ratios) if recipe.ratios else recipe.ratio
            if objective == "sft":
                yield self.sampler.qa(index), ratio
            else:
                repeat = objective == "reconstruct"
                yield self.sampler.passages(index, repeat), ratio

    def _stage(self) -> Stage:
        left = self.step
        for stage in self.recipe.stages:
            if left < stage.steps:
                return stage
            left -= stage.steps
        return self.recipe.stages[-1]

    def _learning_rate(self) -> float:
        """Linear warm-up, then down to the final rate at the recipe's last step."""
        recipe = self.recipe
        if self.step < recipe.warmup_steps:
            return recipe.learning_rate * (self.step + 1) / recipe.warmup_steps
        done = (self.step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
        left = 1 - min(1.0, done)
        share = left if recipe.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2
        low, high = recipe.final_learning_rate, recipe.learning_rate
        return low + (high - low) * share

    def _log(self, metrics: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.output.mkdir(parents=True, exist_ok=True)
            with (self.output / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")
            if "step" in metrics and self.accelerator.trackers:
                self.accelerator.log(metrics, step=metrics["step"])

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            save(self.recipe, self.step, self.subject, self._steps, self.optimizer)


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 3)
