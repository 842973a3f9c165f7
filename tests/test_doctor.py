"""The doctor notices a model, or a c2kv, that computes wrong."""

import pytest
import torch

from c2kv.backbone import Backbone
from c2kv.composition import Placement
from c2kv.doctor import examine
from tiny import tiny_model

pytestmark = pytest.mark.embedded


@pytest.fixture
def backbone(embedded):
    """A tiny model of its own, so that tests may break it."""
    model = tiny_model("qwen3", vocab_size=len(embedded.tokenizer))
    return Backbone(model, embedded.tokenizer, "tiny")


def failed(backbone):
    return [check.name for check in examine(backbone) if not check.passed]


def test_a_sound_model_passes(backbone):
    assert failed(backbone) == []


@pytest.mark.parametrize("name", ["llama-rope-yarn", "llama-rope-llama3", "qwen2", "mistral"])
def test_every_architecture_passes(embedded, name):
    model = tiny_model(name, vocab_size=len(embedded.tokenizer))
    assert failed(Backbone(model, embedded.tokenizer, name)) == []


def test_bfloat16_passes(embedded):
    model = tiny_model("llama", vocab_size=len(embedded.tokenizer)).to(torch.bfloat16)
    model.model.rotary_emb.float()
    assert failed(Backbone(model, embedded.tokenizer, "bf16")) == []


def test_values_that_are_not_numbers_fail(backbone):
    backbone.model.model.norm.weight.data.fill_(float("nan"))
    assert len(failed(backbone)) >= 3


@pytest.mark.parametrize("shift", [1, 3])
def test_wrong_positions_fail(backbone, monkeypatch, shift):
    right = Placement.positions
    monkeypatch.setattr(Placement, "positions", lambda self: right(self) + shift)
    assert failed(backbone) == [
        "own KV placed answers as full recompute",
        "positions beyond 8,500 equal the model's own",
    ]


def test_disturbed_source_tokens_fail(backbone, monkeypatch):
    original = backbone.run_layer
    calls = []

    def disturbed(index, hidden, angles):
        calls.append(index)
        first_pass = len(calls) < backbone.num_layers  # of the last layer only KV is computed
        return original(index, hidden if first_pass else hidden * 1.001, angles)

    monkeypatch.setattr(backbone, "run_layer", disturbed)
    assert "source tokens are undisturbed by extraction" in failed(backbone)


def test_a_store_that_changes_values_fails(backbone, monkeypatch):
    from c2kv.segment import Segment
    from c2kv.store import FolderStore

    get = FolderStore.get

    def altered(self, identity):
        segment = get(self, identity)
        return Segment(identity, segment.kv * 1.001)

    monkeypatch.setattr(FolderStore, "get", altered)
    assert failed(backbone) == ["store, load, place equals placing directly"]
