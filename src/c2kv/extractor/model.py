"""The trainable part: one C2Token embedding and per-layer Q, K, V heads used only for C2Tokens."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from c2kv.backbone import Backbone
from c2kv.errors import ConfigError, ExtractorMismatchError, ModelReferenceError
from c2kv.extractor.box import box
from c2kv.extractor.config import CONFIG_FILE, ExtractorConfig

WEIGHTS_FILE = "extractor.safetensors"


class QKVHeads(nn.Module):
    """One layer's projections, shaped like the backbone's own."""

    def __init__(self, config: ExtractorConfig):
        super().__init__()
        queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)


class Extractor(nn.Module):
    """The C2Extractor of one backbone (arXiv 2607.17715): ~10 % of its parameters."""

    def __init__(self, config: ExtractorConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.hidden_size))
        self.layers = nn.ModuleList(QKVHeads(config) for _ in range(config.num_layers))
        # Only keys and values of the last layer are kept: its queries are never read.
        self.layers[-1].q_proj.requires_grad_(False)

    @classmethod
    def from_backbone(
        cls,
        backbone: Backbone,
        ratio: int = 4,
        variant: str = "plain",
        embedding_token: int | None = None,
    ) -> Extractor:
        """A fresh, untrained extractor: heads copied from the backbone's own projections, the
        embedding from a token's row (`embedding_token`, default EOS) or, where block means are
        added, zeros."""
        attention = backbone.layers[0].self_attn
        config = ExtractorConfig(
            ratio=ratio,
            variant=variant,
            backbone=backbone.name,
            backbone_digest=backbone.digest,
            num_layers=backbone.num_layers,
            hidden_size=backbone.hidden_size,
            num_heads=backbone.num_heads,
            num_kv_heads=backbone.num_kv_heads,
            head_dim=backbone.head_dim,
            qkv_bias=attention.q_proj.bias is not None,
        )
        extractor = cls(config).to(backbone.device, backbone.dtype)
        with torch.no_grad():
            for heads, layer in zip(extractor.layers, backbone.layers, strict=True):
                for name in ("q_proj", "k_proj", "v_proj"):
                    own = getattr(layer.self_attn, name)
                    getattr(heads, name).load_state_dict(own.state_dict())
            if variant != "plain":
                extractor.embedding.zero_()
            else:
                if embedding_token is None:
                    eos = backbone.config.eos_token_id
                    embedding_token = eos[0] if isinstance(eos, list) else (eos or 0)
                extractor.embedding.copy_(backbone.embed_tokens.weight[embedding_token])
        return extractor

    @property
    def trained(self) -> bool:
        return self.config.steps > 0

    @property
    def digest(self) -> str:
        """SHA-256 of how it starts and the weights as bfloat16 (the published precision).

        Recomputed on each read; keep it when the weights do not change."""
        started = f"{self.config.variant}{self.config.annealing or ''}"
        total = hashlib.sha256(f"c2kv-extractor-1;{started}".encode())
        for name, tensor in sorted(self.state_dict().items()):
            flat = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8)
            total.update(name.encode() + b"\0" + flat.numpy().tobytes())
        return total.hexdigest()

    def use_ratio(self, ratio: int) -> None:
        """Compress `ratio` source tokens into one from here on. Raises ConfigError unless it was
        trained for that."""
        trained = self.config.ratios or (self.config.ratio,)
        if ratio not in trained:
            known = ", ".join(map(str, trained))
            raise ConfigError(f"this extractor was trained for ratio {known}, not {ratio}")
        self.config = replace(self.config, ratio=ratio)

    def check_backbone(self, backbone: Backbone) -> None:
        """Raises ExtractorMismatchError unless made for exactly these backbone weights."""
        if self.config.backbone_digest != backbone.digest:
            raise ExtractorMismatchError(
                f"extractor was made for '{self.config.backbone}' with weights "
                f"{self.config.backbone_digest[:16]}, but '{backbone.name}' has "
                f"{backbone.digest[:16]}; use the matching model or extractor"
            )

    def save_pretrained(
        self,
        folder: str | Path,
        dtype: torch.dtype | None = torch.bfloat16,
        steps: int | None = None,
    ) -> None:
        """Write config and weights (bfloat16; None keeps the dtype) to `folder`; the weights
        appear whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        steps = self.config.steps if steps is None else steps
        self.config = replace(self.config, steps=steps, weights_digest=self.digest)
        state = {k: v.detach().to("cpu", dtype).contiguous() for k, v in self.state_dict().items()}
        partial = folder / f".{WEIGHTS_FILE}.{os.getpid()}"
        save_file(state, partial, metadata={"format": "pt"})
        os.replace(partial, folder / WEIGHTS_FILE)
        self.config.save(folder / CONFIG_FILE)
        # safetensors makes files that only their owner may read.
        shutil.copymode(folder / CONFIG_FILE, folder / WEIGHTS_FILE)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, backbone: Backbone | None = None, revision: str | None = None
    ) -> Extractor:
        """Load from a folder, the name of one in the box (`c2kv.extractor.box`) or a hub id; with
        `backbone`, checked against its weights and moved to its device and dtype.

        Raises ModelReferenceError, ConfigError or ExtractorMismatchError."""
        folder = Path(source).expanduser()
        if not folder.is_dir():
            folder = box().get(str(source)) or _download(str(source), revision)
        config = ExtractorConfig.load(folder / CONFIG_FILE)
        extractor = cls(config)
        try:
            state = load_file(folder / WEIGHTS_FILE)
            extractor.load_state_dict(state)
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"cannot read extractor weights in '{folder}': {reason}; get the folder again"
            ) from error
        if not all(p.isfinite().all() for p in extractor.parameters()):
            raise ConfigError(f"extractor weights in '{folder}' are not finite; train it again")
        if (got := extractor.digest) != config.weights_digest:
            raise ConfigError(
                f"extractor weights in '{folder}' have digest {got[:16]}, their config says "
                f"{config.weights_digest[:16]}: damaged or mixed up; get the folder again"
            )
        if backbone is not None:
            extractor.check_backbone(backbone)
            extractor.to(backbone.device, backbone.dtype)
        return extractor

    def start(self, block_means: Tensor) -> Tensor:
        """Hidden states that enter the first layer for the C2Tokens [batch, m, hidden]: the
        embedding, plus the means of their blocks for all variants but the plain one."""
        carry = self.embedding.expand_as(block_means)
        share = self.config.annealing if self.config.variant == "plain" else 1.0
        return carry + share * block_means if share else carry


def _download(source: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(source, revision=revision, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE])
        )
    except HFValidationError as error:
        raise ModelReferenceError(
            f"extractor '{source}' is neither a folder nor a hub id; check the path"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelReferenceError(
            f"extractor '{source}' is not a folder here, and the hub gave none: {reason}; check "
            "the name, or the connection"
        ) from error
