"""Decoding questions against a composition: greedy or sampled, one or a batch, streamed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from c2kv.backbone import Backbone
from c2kv.composition import Composition, check_positions, open_together
from c2kv.errors import ConfigError, DocumentError, NumericalError


@dataclass(frozen=True)
class DecodingOptions:
    """How answers are drawn. Greedy unless `sample`; then by the values given here. No stop token
    is chosen among the first `min_new_tokens`."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, good, allowed in (
            ("max_new_tokens", _whole(self.max_new_tokens, 1), "a whole number of at least 1"),
            ("min_new_tokens", _whole(self.min_new_tokens, 0), "a whole number, 0 for none"),
            ("temperature", 0 < self.temperature < math.inf, "a positive number"),
            ("top_k", _whole(self.top_k, 0), "a whole number, 0 for all"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a positive number"),
            ("seed", _whole(self.seed, 0, 2**63), "a whole number below 2^63"),
        ):
            if not good:
                raise ConfigError(f"{name} {getattr(self, name)} is not usable; give {allowed}")

    @classmethod
    def of(cls, backbone: Backbone, **given: Any) -> DecodingOptions:
        """The model's generation config (stop tokens, sampling values), overridden by `given`;
        None means not given. Sampling itself happens only when asked for."""
        config = backbone.model.generation_config
        ours = {"max_new_tokens", "min_new_tokens", "sample", "seed", "stop_ids"}
        names = {f.name for f in fields(cls)} - ours
        values = {n: v for n in names if (v := getattr(config, n, None)) is not None}
        eos = config.eos_token_id
        if eos is None:
            eos = getattr(backbone.tokenizer, "eos_token_id", None)
        stop = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        return replace(
            cls(stop_ids=stop, **values), **{k: v for k, v in given.items() if v is not None}
        )

    def processors(self) -> list[Any]:
        """transformers' logits processors these options ask for, in its order."""
        from transformers.generation import logits_process as lp

        chain: list[Any] = []
        if self.repetition_penalty != 1.0:
            chain.append(lp.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if not self.sample:
            return chain
        if self.temperature != 1.0:
            chain.append(lp.TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            chain.append(lp.TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            chain.append(lp.TopPLogitsWarper(self.top_p))
        if self.min_p > 0.0:
            chain.append(lp.MinPLogitsWarper(self.min_p))
        return chain


def _whole(value: Any, low: int, limit: float = math.inf) -> bool:
    return type(value) is int and low <= value < limit


@dataclass
class Decoded:
    """token_ids without the stop token; finish_reason `stop`, `length` or `cancelled`."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"


@dataclass
class DecodingTimes:
    """Seconds: `compose` fills the cache, `question` runs the question's tokens, `steps` the
    decoding steps after it (the first token comes from the question's pass), which brought
    `step_tokens` tokens over all rows."""

    compose: float = 0.0
    question: float = 0.0
    steps: float = 0.0
    step_tokens: int = 0


@torch.inference_mode()
def decode(
    compositions: Composition | Sequence[Composition],
    questions: Sequence[Sequence[int]],
    options: DecodingOptions,
    on_token: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[list[Decoded], DecodingTimes]:
    """Answer questions (token ids up to where the answer starts) as one batch, each with a tail
    of its own, over one composition or one for each question. `on_token(row, token_id)` sees
    every token as it comes; `cancelled()` is asked before every step.

    Raises ContextOverflowError before any work when positions would not suffice, NumericalError
    when what the model makes of a question is not finite."""
    if not questions or not all(questions):
        raise DocumentError("there is no question, or an empty one; ask something")
    if isinstance(compositions, Composition):
        compositions = [compositions] * len(questions)
    backbone, device = compositions[0].backbone, compositions[0].backbone.device
    longest = max(map(len, questions))
    for composition, question in zip(compositions, questions, strict=True):
        end = len(question) + options.max_new_tokens
        check_positions(backbone, composition.question_position, end)
    times, clock = DecodingTimes(), _Clock(backbone)
    cache = open_together(compositions, longest + options.max_new_tokens)
    times.compose = clock.lap()

    # Left padding: every row's composition and last question token end in the same columns.
    entries = cache.get_seq_length()
    padding = torch.tensor([longest - len(ids) for ids in questions])
    rows = [[0] * (longest - len(ids)) + list(ids) for ids in questions]
    tokens = torch.tensor(rows, device=device)
    columns = (torch.arange(longest) - padding[:, None]).clamp(min=0)
    starts = torch.tensor([composition.question_position for composition in compositions])
    positions = (starts[:, None] + columns).to(device)
    unset = torch.tensor([entries - composition.entries for composition in compositions])
    mask = _mask(entries, unset, padding, longest + options.max_new_tokens, device)

    choose = _Chooser(compositions, questions, options)
    decoded = [Decoded() for _ in questions]
    active = set(range(len(questions)))
    for step in range(options.max_new_tokens):
        if cancelled():
            for row in active:
                decoded[row].finish_reason = "cancelled"
            break
        filled = entries + longest + step
        seen = None if mask is None else mask[:, :filled]
        logits = backbone.forward(tokens, positions, cache, seen)[:, -1]
        chosen = choose(logits, decoded)
        if step == 0:
            times.question = clock.lap()
            if not logits.isfinite().all():
                raise NumericalError(
                    f"the model's logits are not finite: {backbone.model.dtype} overflows; load it "
                    "in bfloat16 or float32"
                )
        for row in sorted(active):
            if chosen[row] in options.stop_ids:
                decoded[row].finish_reason = "stop"
                active.discard(row)
                continue
            decoded[row].token_ids.append(chosen[row])
            times.step_tokens += step > 0
            if on_token is not None:
                on_token(row, chosen[row])
        if not active:
            break
        tokens = torch.tensor(chosen, device=device)[:, None]
        positions = positions[:, -1:] + 1
    times.steps = clock.lap()
    return decoded, times


class _Chooser:
    """Picks the next token of every row from logits [rows, vocab]."""

    def __init__(
        self,
        compositions: Sequence[Composition],
        questions: Sequence[Sequence[int]],
        options: DecodingOptions,
    ):
        self._sample = options.sample
        self._minimum, self._stop = options.min_new_tokens, list(options.stop_ids)
        self._processors = options.processors()
        penalised = options.repetition_penalty != 1.0
        self._contexts = [
            [*(composition.token_ids if penalised else ()), *question]
            for composition, question in zip(compositions, questions, strict=True)
        ]
        device = compositions[0].backbone.device
        # A generator per row: a row's draws do not depend on who shares its batch.
        self._generators = [torch.Generator(device).manual_seed(options.seed) for _ in questions]

    def __call__(self, logits: Tensor, decoded: list[Decoded]) -> list[int]:
        if self._minimum and max(len(d.token_ids) for d in decoded) < self._minimum:
            logits = logits.clone()
            logits[:, self._stop] = -torch.inf
        if not self._processors and not self._sample:
            return logits.argmax(dim=-1).tolist()
        return [self._row(logits[i : i + 1].float(), i, d) for i, d in enumerate(decoded)]

    def _row(self, scores: Tensor, row: int, so_far: Decoded) -> int:
        ids = torch.tensor([self._contexts[row] + so_far.token_ids], device=scores.device)
        for processor in self._processors:
            scores = processor(ids, scores)
        if not self._sample:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generators[row]))


def _mask(
    entries: int, unset: Tensor, padding: Tensor, tail: int, device: torch.device
) -> Tensor | None:
    """What each row may see over all slots [rows, entries + tail]; None when all is visible.

    unset, padding [rows]: slots to hide before the composition, and before the question."""
    if not padding.any() and not unset.any():
        return None
    mask = torch.ones(len(padding), entries + tail, dtype=torch.long)
    for row, before, pads in zip(mask, unset.tolist(), padding.tolist(), strict=True):
        row[:before] = 0
        row[entries : entries + pads] = 0
    return mask.to(device)


class _Clock:
    def __init__(self, backbone: Backbone):
        self._now = backbone.now
        self._last = self._now()

    def lap(self) -> float:
        """Seconds since the last lap, with the device's queued work done."""
        now = self._now()
        self._last, elapsed = now, now - self._last
        return elapsed
