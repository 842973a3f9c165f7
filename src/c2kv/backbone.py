"""What c2kv needs from a frozen causal LM, and why a model is refused.

The library's own modules do the work: nothing here reimplements a layer. An architecture is
supported when its decoder layer is the pre-norm layout named in `ARCHITECTURES`.
"""

from __future__ import annotations

import inspect
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from c2kv.errors import UnsupportedModelError
from c2kv.rotary import rotate

# transformers model types whose decoder layer is: input_layernorm, self_attn with
# q/k/v/o_proj (and optional q_norm/k_norm on head_dim), post_attention_layernorm, mlp.
# To add one of that layout, add its model type here and to tests/tiny.py.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

# RoPE variants whose angles depend on the position alone.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Kernels that read "no mask" as causal; eager attention reads it as full attention.
CAUSAL_KERNELS = ("sdpa", "flash_attention_2", "flash_attention_3")


def refusal(config: Any) -> str | None:
    """Why a model with this transformers config cannot be used, or None if it can."""
    model_type = config.model_type
    if model_type not in ARCHITECTURES:
        if getattr(config, "kv_lora_rank", None):
            why = "multi-head latent attention (MLA) keeps no per-head keys to place"
        elif getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
            why = "its mixture-of-experts layers are not known to the adapter"
        elif getattr(config, "alibi", False) or not hasattr(config, "rope_parameters"):
            why = "its positions are not rotary (RoPE)"
        else:
            why = "its decoder layer is not known to the adapter"
        return f"model type '{model_type}': {why} (known: {', '.join(ARCHITECTURES)})"
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if layer_types:
        return f"layers of type {', '.join(sorted(layer_types))}: placed entries could be cut off"
    # Qwen configs carry a window that only `use_sliding_window` switches on.
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        return f"sliding window of {window} positions: placed entries could be cut off"
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        return (
            f"RoPE type '{rope_type}': its angles change with the current length, so stored "
            f"keys cannot be placed (usable: {', '.join(ROPE_TYPES)})"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"partial RoPE (factor {rope['partial_rotary_factor']}) is not known to the adapter"
    return None


def check_config(config: Any) -> None:
    """Raise UnsupportedModelError, before any weights are read, if the model cannot be used."""
    if (why := refusal(config)) is not None:
        raise UnsupportedModelError(f"this model cannot be used: {why}; choose another backbone")


class _KVCapture:
    """Stands where a layer expects its cache: keeps the keys and values it is handed."""

    keys: Tensor
    values: Tensor

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values


class _KVScatter:
    """Stands where a layer expects its cache: puts what it is handed among a prompt's KV."""

    def __init__(self, kv: Tensor, at: Tensor):
        self._kv, self._at = kv, at

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self._kv[0][:, self._at], self._kv[1][:, self._at] = keys[0], values[0]
        return self._kv[0][None], self._kv[1][None]


class Backbone:
    """A frozen causal LM of transformers, its tokenizer and the digest of its weights.

    Attributes give dimensions under the field's names: `num_layers`, `num_heads`,
    `num_kv_heads`, `head_dim`, `hidden_size`, `max_positions`.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, name: str = "", digest: str = ""):
        """Freeze `model` (a `*ForCausalLM`). `digest` as of `c2kv.models.weights_digest`;
        computed when empty. Raises UnsupportedModelError for a model c2kv cannot use."""
        config: Any = model.config
        check_config(config)
        if config._attn_implementation not in CAUSAL_KERNELS:
            raise UnsupportedModelError(
                f"attention implementation '{config._attn_implementation}' needs full masks; "
                "load the model with attn_implementation='sdpa'"
            )
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = config
        self.name = name or config._name_or_path or config.model_type
        decoder: Any = model.model
        self.embed_tokens: nn.Embedding = decoder.embed_tokens
        self.layers: list[Any] = list(decoder.layers)
        attention = self.layers[0].self_attn
        self.num_layers: int = len(self.layers)
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.hidden_size: int = config.hidden_size
        self.max_positions: int = config.max_position_embeddings
        self._rotary = decoder.rotary_emb
        self._table: tuple[Tensor, Tensor] | None = None
        parameters = inspect.signature(type(decoder).forward).parameters
        # transformers renames `past_key_values` to `cache` between 5.19 and 5.40.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._check_rotation()
        if not digest:
            from c2kv.models import weights_digest

            digest = weights_digest(model)
        self.digest = digest

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def now(self) -> float:
        """Seconds of a clock that waits for the device's queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @property
    def kv_bytes_per_entry(self) -> int:
        """Bytes of one KV entry: both of keys and values, over all layers and heads."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own rotary angles at `positions` [..., n]: cos and sin [..., n, head_dim],
        attention scaling included, in the model's dtype."""
        flat = positions.reshape(1, -1).to(self.device)
        cos, sin = self._rotary(self.embed_tokens.weight[:1], position_ids=flat)
        shape = (*positions.shape, self.head_dim)
        return cos.reshape(shape), sin.reshape(shape)

    def tabled_cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `cos_sin` for positions [n] from 0, looked up in a table that grows as needed.

        Placing reads memory as fast as it can: computing cosines then would cost more time, and
        leave torch's threads spinning on the cores that placing wants."""
        needed = int(positions.max()) + 1
        if self._table is None or needed > self._table[0].shape[0]:
            rows = max(1024, 1 << (needed - 1).bit_length())
            self._table = self.cos_sin(torch.arange(rows))
        cos, sin = self._table
        positions = positions.to(self.device)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def run_layer(
        self, index: int, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one frozen layer, causally, over `hidden` [batch, n, hidden_size] at the positions
        of `angles` (cos, sin [1 or batch, n, head_dim]).

        Returns the new hidden states and the layer's keys (after RoPE) and values
        [batch, kv_heads, n, head_dim]."""
        capture = _KVCapture()
        hidden = self.layers[index](
            hidden,
            attention_mask=None,
            position_embeddings=angles,
            **{self._cache_argument: capture},
        )
        return hidden, capture.keys, capture.values

    def recompute_layer(
        self,
        index: int,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        kv: Tensor,
        at: Tensor,
        seen: Tensor,
    ) -> Tensor:
        """Run one frozen layer over `hidden` [1, s, hidden_size], the tokens at positions `at`
        [s] of a prompt with KV `kv` [2, kv_heads, n, head_dim] (keys rotated). Their own keys
        and values are written into it, then each sees the keys that `seen` [s, n] says. Returns
        the new hidden states."""
        return self.layers[index](
            hidden,
            attention_mask=seen[None, None],
            position_embeddings=angles,
            **{self._cache_argument: _KVScatter(kv, at)},
        )

    def project_kv(self, index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The frozen layer's keys before RoPE, and its values, of tokens with hidden states
        [batch, n, hidden_size]: each [batch, kv_heads, n, head_dim]."""
        layer = self.layers[index]
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        shape = (*hidden.shape[:-1], self.num_kv_heads, self.head_dim)
        keys, values = attention.k_proj(normed).view(shape), attention.v_proj(normed).view(shape)
        if hasattr(attention, "k_norm"):
            keys = attention.k_norm(keys)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: Any,
        attention_mask: Tensor | None = None,
        logits: int = 1,
    ) -> Tensor:
        """The model over new tokens [batch, q] at `positions` [batch, q], reading and appending
        to `cache`. Returns the logits of the last `logits` tokens [batch, logits, vocab]."""
        return self.model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=attention_mask,
            use_cache=True,
            logits_to_keep=logits,
            **{self._cache_argument: cache},
        ).logits

    def hidden(
        self, input_ids: Tensor, positions: Tensor, cache: Any, attention_mask: Tensor
    ) -> Tensor:
        """As `forward`, up to the final norm: hidden states [batch, q, hidden_size], so that the
        vocabulary is computed only where it is wanted."""
        return self.model.model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=attention_mask,
            use_cache=True,
            **{self._cache_argument: cache},
        ).last_hidden_state

    def _check_rotation(self) -> None:
        """c2kv rotates keys itself, in one pass; it must mean what this model's code means."""
        library = sys.modules[type(self.model).__module__]
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(1, 1, 3, self.head_dim, generator=generator).to(self.device, self.dtype)
        cos, sin = self.cos_sin(torch.tensor([[1, 7, 4000]]))
        expected, _ = library.apply_rotary_pos_emb(keys, keys, cos, sin)
        got = rotate(keys, cos[:, None], sin[:, None])
        if not torch.allclose(got.float(), expected.float(), atol=1e-2, rtol=1e-2):
            raise UnsupportedModelError(
                f"model type '{self.config.model_type}' rotates keys in a layout unknown to c2kv; "
                "choose another backbone"
            )
