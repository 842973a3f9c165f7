"""Equivalence checks on a loaded model: whether c2kv computes with it what it should."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from c2kv.backbone import Backbone
from c2kv.cache import ComposedCache
from c2kv.composition import Composition, Placement
from c2kv.decode import DecodingOptions, decode
from c2kv.errors import PromptError
from c2kv.extractor import Extractor, extract
from c2kv.fullkv import full_kv
from c2kv.methods.recompute import prefill
from c2kv.prompt import PromptTemplate
from c2kv.rotary import Part, place
from c2kv.segment import Segment, SegmentIdentity
from c2kv.store import FolderStore

_TEXT = (
    "The lighthouse keeper wrote every evening about the weather, the ships and the birds. "
    "On the third of May a brig lost its mast off the point and was towed in by two tugs. "
    "The harbour master entered it as number 4,172 in the blue ledger. "
)
_QUESTION = "What number did the harbour master enter?"
_FAR = 8_500  # an offset beyond the 8k at which position bugs stay hidden
_NEW_TOKENS = 16


@dataclass(frozen=True)
class Check:
    """One row of the doctor's table."""

    name: str
    passed: bool
    detail: str


class _Failed(Exception):
    """A check found a difference; the message says which."""


def examine(backbone: Backbone) -> list[Check]:
    """Run every check on the loaded model, in its dtype and on its device."""
    checks: list[tuple[str, Callable[[Backbone], str]]] = [
        ("prompt pieces equal the whole conversation", _prompt),
        ("source tokens are undisturbed by extraction", _invariance),
        ("store, load, place equals placing directly", _store),
        ("own KV placed answers as full recompute", _answers),
        (f"positions beyond {_FAR:,} equal the model's own", _far),
        ("the composed cache decodes as transformers' own", _layout),
    ]
    results = []
    for name, check in checks:
        try:
            results.append(Check(name, True, check(backbone)))
        except (_Failed, PromptError) as failure:
            results.append(Check(name, False, str(failure)))
    return results


def _ids(backbone: Backbone, text: str) -> list[int]:
    return backbone.tokenizer(text, add_special_tokens=False).input_ids


def _identity(backbone: Backbone, ids: list[int], variant: str, ratio: int) -> SegmentIdentity:
    dtype = str(backbone.dtype).removeprefix("torch.")
    return SegmentIdentity(backbone.digest, "doctor", variant, ratio, dtype, "", tuple(ids))


def _compare(what: str, got: Tensor, expected: Tensor) -> str:
    difference = (got.float() - expected.float()).abs().max().item()
    # Two kernels round differently; bfloat16 keeps 8 bits.
    allowed = 1e-3 if got.dtype == torch.float32 else 0.1
    allowed *= max(1.0, expected.float().abs().max().item())
    if not difference <= allowed:  # NaN is no pass
        raise _Failed(f"{what} differ by {difference:.2e} (allowed {allowed:.0e})")
    return f"largest difference {difference:.1e}"


def _prompt(backbone: Backbone) -> str:
    return f"{PromptTemplate.of(backbone.tokenizer).layout} layout"


@torch.no_grad()
def _invariance(backbone: Backbone) -> str:
    ids = _ids(backbone, _TEXT)
    (plain,) = full_kv(backbone, [ids])
    seen: list[Tensor] = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda m, i, out: seen.append(out[0]))
        for layer in backbone.layers
    ]
    try:
        extract(backbone, Extractor.from_backbone(backbone), [ids])
    finally:
        for hook in hooks:
            hook.remove()
    for index, values in enumerate(seen):
        own = plain[index, 1].transpose(0, 1).flatten(1)
        if not torch.equal(values, own):
            raise _Failed(f"layer {index}'s values change when C2Tokens are present")
    return f"bit for bit over {len(seen)} layers"


@torch.no_grad()
def _store(backbone: Backbone) -> str:
    ids = _ids(backbone, _TEXT)
    extractor = Extractor.from_backbone(backbone)
    (kv,) = extract(backbone, extractor, [ids])
    segment = Segment(_identity(backbone, ids, "plain", extractor.config.ratio), kv)
    with tempfile.TemporaryDirectory() as folder:
        FolderStore(folder).put(segment)
        loaded = FolderStore(folder).get(segment.identity)
    if loaded is None:
        raise _Failed("the segment just stored is not found")
    prefix = prefill(backbone, _ids(backbone, _QUESTION))
    arenas = [
        Composition(backbone, prefix.prefix, prefix.prefix_ids, (s,)).open(0).arena
        for s in (segment, loaded)
    ]
    if not torch.equal(*arenas):
        raise _Failed("the loaded segment composes to other values")
    return "bit for bit"


def _full_composition(backbone: Backbone, ids: list[int]) -> Composition:
    segment = Segment(_identity(backbone, ids, "full", 1), *full_kv(backbone, [ids]))
    return Composition(backbone, prefill(backbone, []).prefix, (), (segment,))


def _answers(backbone: Backbone) -> str:
    ids, question = _ids(backbone, _TEXT), _ids(backbone, _QUESTION)
    cache = _full_composition(backbone, ids).open(len(question))
    close = _compare("logits", _ask(backbone, cache, question), _plain(backbone, ids + question))
    if backbone.dtype != torch.float32:
        return close
    options = DecodingOptions(max_new_tokens=_NEW_TOKENS)
    placed, recomputed = (
        decode(composition, [question], options)[0][0].token_ids
        for composition in (_full_composition(backbone, ids), prefill(backbone, ids))
    )
    if placed != recomputed:
        at = next(i for i, (a, b) in enumerate(zip(placed, recomputed, strict=True)) if a != b)
        raise _Failed(f"answers part at token {at}: {placed[at]} placed, {recomputed[at]} full")
    return f"{len(placed)} tokens equal, {close}"


@torch.no_grad()
def _far(backbone: Backbone) -> str:
    ids, question = _ids(backbone, _TEXT), _ids(backbone, _QUESTION)
    (kv,) = full_kv(backbone, [ids])
    shape = (*kv.shape[:2], 1, kv.shape[2], len(ids) + len(question), kv.shape[4])
    arena = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    at = Placement(_FAR, len(ids), 1, 0, len(ids))
    cos, sin = backbone.tabled_cos_sin(at.positions())
    place([Part(kv, cos, sin, 0)], arena)
    got = _ask(backbone, ComposedCache(arena, len(ids)), question, _FAR)
    return _compare("logits", got, _plain(backbone, ids + question, _FAR))


def _layout(backbone: Backbone) -> str:
    from transformers import DynamicCache

    ids, question = _ids(backbone, _TEXT), _ids(backbone, _QUESTION)
    stock = DynamicCache(config=backbone.config)
    with torch.no_grad():
        tokens = torch.tensor([ids], device=backbone.device)
        backbone.forward(tokens, torch.arange(len(ids), device=backbone.device)[None], stock)
    got = _ask(backbone, prefill(backbone, ids).open(len(question)), question)
    return _compare("logits", got, _ask(backbone, stock, question))


@torch.no_grad()
def _ask(backbone: Backbone, cache: ComposedCache, question: list[int], offset: int = 0) -> Tensor:
    """Logits after `question`, behind all that `cache` holds."""
    start = offset + cache.get_seq_length()
    positions = start + torch.arange(len(question), device=backbone.device)[None]
    tokens = torch.tensor([question], device=backbone.device)
    return backbone.forward(tokens, positions, cache)


@torch.no_grad()
def _plain(backbone: Backbone, ids: list[int], offset: int = 0) -> Tensor:
    """The model's own logits after `ids`, at positions from `offset`, without any cache."""
    tokens = torch.tensor([ids], device=backbone.device)
    positions = offset + torch.arange(len(ids), device=backbone.device)[None]
    return backbone.model(
        input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1
    ).logits
