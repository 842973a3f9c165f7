"""Block-Attention (arXiv 2409.15355): reuse on a backbone that was fine-tuned for it."""

from __future__ import annotations

from c2kv.errors import ConfigError
from c2kv.methods.base import Materials, Method
from c2kv.methods.registry import refuse
from c2kv.methods.reuse import Reuse

# In a checkpoint's config: how its weights were fine-tuned for Block-Attention.
CONFIG_KEY = "c2kv_block_attention"


def build(name: str, parameters: list[str], materials: Materials) -> Method:
    """`block` wants a checkpoint marked as fine-tuned; `block-unchecked` takes any."""
    if parameters not in ([], ["unchecked"]):
        raise refuse(name, "block")
    backbone = materials.backbone
    if not parameters and not getattr(backbone.config, CONFIG_KEY, None):
        raise ConfigError(
            f"'{backbone.name}' is not marked as fine-tuned for Block-Attention, without which "
            "this method is plain reuse; make a checkpoint by `c2kv train` (see "
            "docs/methods/block.md), or write block-unchecked to take the weights as they are"
        )
    return Reuse(name, materials.full)
