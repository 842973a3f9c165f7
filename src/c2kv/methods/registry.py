"""Methods by name: a family and its parameters, as in `epic-32`. Imports no torch by itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from c2kv.errors import ConfigError

if TYPE_CHECKING:
    from c2kv.methods.base import Materials, Method

Build = Callable[[str, list[str], "Materials"], "Method"]


@dataclass(frozen=True)
class Family:
    """form: how names of it are written; summary: one line; build: makes one from its whole name
    and its parameters, or the module of this package whose `build` does."""

    form: str
    summary: str
    build: Build | str


FAMILIES: dict[str, Family] = {}


def register(name: str, form: str, summary: str, build: Build | str) -> None:
    """Make a family of methods known by `name` (no hyphens). A known name is replaced."""
    if not name.isidentifier():
        raise ConfigError(f"'{name}' cannot name a method; use letters, digits and underscores")
    FAMILIES[name] = Family(form, summary, build)


def check(name: str) -> str:
    """The name, if its family is known. Raises ConfigError naming those that are."""
    if name.split("-")[0] not in FAMILIES:
        known = ", ".join(family.form for family in FAMILIES.values())
        raise ConfigError(f"method '{name}' is unknown; use one of: {known}")
    return name


def build(name: str, materials: Materials) -> Method:
    """The method of this name. Raises ConfigError when its family or a parameter is unknown."""
    family, *parameters = check(name).split("-")
    maker: Any = FAMILIES[family].build
    if isinstance(maker, str):
        maker = importlib.import_module(maker).build
    return maker(name, parameters, materials)


def refuse(name: str, family: str) -> ConfigError:
    """The error for parameters that a family does not have."""
    return ConfigError(f"method '{name}' cannot be read; write {FAMILIES[family].form}")


for _name, _form, _summary in (
    ("recompute", "recompute", "the whole prompt in one causal pass: the reference"),
    ("reuse", "reuse", "each document's own KV, placed and concatenated; nothing recomputed"),
    ("epic", "epic-K", "reuse, with the first K tokens of every document recomputed (LegoLink)"),
    (
        "cacheblend",
        "cacheblend-R[-layerL][-gradual|-oracle]",
        "reuse, with the share R of tokens recomputed whose values deviate most",
    ),
    ("block", "block[-unchecked]", "reuse on a backbone fine-tuned for it (Block-Attention)"),
    ("naive", "naive-stride-K, naive-norm-K", "reuse of one in K entries of each document"),
    ("c2kv", "c2kv[-plain|-residual]", "an extractor's segments: k-times fewer entries"),
    (
        "hybrid",
        "hybrid-N, hybrid-at-I-J…, hybrid-all",
        "the first N documents, or those numbered, by reuse; the rest by c2kv",
    ),
    ("anchor", "anchor[-joint]", "anchor tokens, which do not compose: a contrast"),
    ("random", "random", "c2kv with an untrained extractor: a control"),
):
    register(_name, _form, _summary, f"c2kv.methods.{_name}")
