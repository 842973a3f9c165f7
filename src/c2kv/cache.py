"""ComposedCache: a transformers cache over one preallocated arena, so appends copy no prefix."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from c2kv.errors import ContextOverflowError


class ArenaLayer(CacheLayerMixin):
    """One layer's view of the arena; `keys` and `values` show the filled part."""

    is_sliding = False
    is_croppable = True

    def __init__(self, arena: Tensor, length: int):
        """arena: [2, batch, kv_heads, capacity, head_dim], its first `length` slots filled."""
        super().__init__()
        self._arena = arena
        self.device = arena.device
        self.is_initialized = True
        self._show(length)

    def _show(self, length: int) -> None:
        self._length = length
        self.keys, self.values = self._arena[:, :, :, :length].unbind(0)

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do: the arena exists."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append [batch, kv_heads, new, head_dim] in place and return all keys and values."""
        start, stop = self._length, self._length + keys.shape[-2]
        if stop > self._arena.shape[3]:
            raise ContextOverflowError(
                f"the cache has room for {self._arena.shape[3]} entries, not {stop}; "
                "open the composition with more room"
            )
        self._arena[0, :, :, start:stop] = keys
        self._arena[1, :, :, start:stop] = values
        self._show(stop)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return self._arena.shape[3]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` entries (transformers' sign convention)."""
        self._show(self._length - abs(tokens_to_remove))

    def reset(self) -> None:
        self._show(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("a ComposedCache serves no beam search; decode greedily")


class ComposedCache(Cache):
    """Behaves as any transformers cache."""

    def __init__(self, arena: Tensor, length: int):
        """arena: [layers, 2, batch, kv_heads, capacity, head_dim], `length` slots filled."""
        super().__init__(layers=[ArenaLayer(layer, length) for layer in arena])
        self.arena = arena
