"""Model references, refusals before any weights are read, and digests."""

import pytest
import torch
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from c2kv.backbone import Backbone, refusal
from c2kv.errors import ExtractorMismatchError, ModelReferenceError, UnsupportedModelError
from c2kv.extractor import Extractor
from c2kv.models import EMBEDDED, load_backbone, resolve, weights_digest
from tiny import tiny_model


def rope(**values):
    return LlamaConfig(rope_parameters={"rope_theta": 1e4, **values}, max_position_embeddings=64)


REFUSED = {
    "sliding window of 4096": MistralConfig(sliding_window=4096),
    "sliding_attention": Qwen2Config(
        use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "RoPE type 'dynamic'": rope(rope_type="dynamic", factor=2.0),
    "RoPE type 'longrope'": rope(
        rope_type="longrope",
        factor=2.0,
        short_factor=[1.0] * 64,
        long_factor=[1.0] * 64,
        original_max_position_embeddings=32,
    ),
    "partial RoPE": rope(rope_type="default", partial_rotary_factor=0.5),
    "not rotary": GPT2Config(),
    "mixture-of-experts": AutoConfig.for_model("mixtral"),
    "MLA": AutoConfig.for_model("deepseek_v3"),
    "not known to the adapter": AutoConfig.for_model("gemma2"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_work_is_refused_with_its_reason(reason):
    assert reason in refusal(REFUSED[reason])


@pytest.mark.parametrize(
    "config", [LlamaConfig(), Qwen2Config(), Qwen3Config(), MistralConfig(sliding_window=None)]
)
def test_supported_configs_are_accepted(config):
    assert refusal(config) is None


def test_a_refused_model_is_refused_before_its_weights_are_read(tmp_path):
    MistralConfig(sliding_window=16).save_pretrained(tmp_path)  # a config alone: no weights
    with pytest.raises(UnsupportedModelError, match="sliding window of 16"):
        load_backbone(str(tmp_path))


def test_eager_attention_is_refused():
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
        Backbone(model)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./nowhere", "not a model folder"),
        ("missing.gguf", "GGUF file 'missing.gguf' does not exist"),
        ("a/b/c", "not a model folder"),
    ],
)
def test_unknown_references_say_what_to_give(name, says):
    with pytest.raises(ModelReferenceError, match=says):
        resolve(name)


def test_a_hub_id_out_of_reach_says_offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelReferenceError, match=r"'nobody/nothing': .*offline"):
        load_backbone("nobody/nothing")


def test_broken_files_are_refused(tmp_path):
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelReferenceError, match="is it complete"):
        load_backbone(str(gguf))
    with pytest.raises(ModelReferenceError, match=r"no config\.json"):
        load_backbone(str(tmp_path))
    with pytest.raises(ModelReferenceError, match="dtype 'int3'"):
        load_backbone(str(tmp_path), dtype="int3")


def test_the_digest_is_of_the_weights_not_of_their_dtype():
    model = tiny_model("llama")
    digest = weights_digest(model)
    assert digest == weights_digest(tiny_model("llama"))
    rounded = tiny_model("llama")
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    assert digest == weights_digest(rounded)
    assert digest != weights_digest(tiny_model("llama", seed=1))
    assert digest != weights_digest(tiny_model("llama-rope-linear"))
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 4] += 0.5
    assert digest != weights_digest(model)


def test_a_folder_saved_and_loaded_is_the_same_backbone(tmp_path, embedded):
    model = tiny_model("qwen3", vocab_size=len(embedded.tokenizer))
    model.save_pretrained(tmp_path)
    embedded.tokenizer.save_pretrained(tmp_path)
    loaded = load_backbone(str(tmp_path), dtype="bfloat16", device="cpu")
    assert loaded.digest == weights_digest(model) and loaded.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path, embedded):
    from safetensors.torch import load_file, save_file

    tiny_model("llama", vocab_size=len(embedded.tokenizer)).save_pretrained(tmp_path)
    embedded.tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelReferenceError, match=r"lacks 1 weights \(model\.layers\.1\.mlp\.up"):
        load_backbone(str(tmp_path))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelReferenceError, match="cannot load model"):
        load_backbone(str(tmp_path))


@pytest.mark.parametrize("device", ["foo", "cuda:9", "mps"])
def test_devices_out_of_reach_are_refused_by_name(tmp_path, embedded, device):
    tiny_model("llama", vocab_size=len(embedded.tokenizer)).save_pretrained(tmp_path)
    embedded.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelReferenceError, match=f"device '{device}' cannot be used"):
        load_backbone(str(tmp_path), device=device, dtype="float32")


@pytest.mark.embedded
def test_the_embedded_model_is_what_it_was(embedded):
    assert embedded.name == EMBEDDED
    assert (embedded.num_layers, embedded.num_heads, embedded.num_kv_heads) == (30, 9, 3)
    assert embedded.digest == "658520ae1a899fce5c4a7e7e7506d734652e46df478f5719a9d48a787a68f903"


def test_extractors_travel_and_know_their_backbone(tmp_path, backbone):
    made = Extractor.from_backbone(backbone, ratio=7, variant="residual")
    made.save_pretrained(tmp_path, steps=12)
    loaded = Extractor.from_pretrained(tmp_path, backbone)
    assert loaded.config == made.config and loaded.trained and loaded.digest == made.digest
    other = Backbone(tiny_model("llama", seed=9), name="other")
    with pytest.raises(ExtractorMismatchError) as error:
        Extractor.from_pretrained(tmp_path, other)
    assert backbone.digest[:16] in str(error.value) and other.digest[:16] in str(error.value)


def test_damaged_extractors_are_refused(tmp_path, llama):
    from c2kv.errors import ConfigError

    Extractor.from_backbone(llama).save_pretrained(tmp_path)
    weights = tmp_path / "extractor.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match="cannot read extractor weights"):
        Extractor.from_pretrained(tmp_path, llama)
    flipped = bytearray(whole)
    flipped[-5] ^= 64
    weights.write_bytes(flipped)
    with pytest.raises(ConfigError, match="damaged or mixed up"):
        Extractor.from_pretrained(tmp_path, llama)
    weights.write_bytes(whole)
    config = tmp_path / "extractor.json"
    text = config.read_text()
    for broken, says in (
        ("{", "cannot read"),
        (text.replace('"ratio": 4', '"ratio": 65'), "ratio 65"),
        (text.replace('"plain"', '"fancy"'), "variant 'fancy'"),
        (text.replace('"format_version": 1', '"format_version": 9'), "format 9"),
        (text.replace('"ratio"', '"ratoi"'), "ratoi"),
        ("[1]", "not an extractor config"),
        (text.replace('"num_layers": 3', '"num_layers": "3"'), "num_layers '3'"),
        (text.replace('"head_dim": 8', '"head_dim": -8'), "head_dim -8"),
    ):
        config.write_text(broken)
        with pytest.raises(ConfigError, match=says):
            Extractor.from_pretrained(tmp_path, llama)
    config.write_text(text)
    broken = Extractor.from_backbone(llama)
    broken.embedding.data.fill_(float("nan"))
    broken.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not finite"):
        Extractor.from_pretrained(tmp_path, llama)
    with pytest.raises(ModelReferenceError, match="neither a folder nor a hub id"):
        Extractor.from_pretrained("./no/such/folder")
