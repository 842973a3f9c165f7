"""Block-Attention: its loss is the definition's, and fine-tuning makes checkpoints to use."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from c2kv.backbone import Backbone
from c2kv.engine import Engine
from c2kv.errors import ConfigError
from c2kv.models import load_backbone
from c2kv.training.block import block_loss
from c2kv.training.recipe import Stage
from c2kv.training.trainer import Trainer
from conftest import backbone_of
from oracle import compose_dense, embed, run_layers
from test_loss import DOCUMENTS, GROUP, PREFIX, QUESTIONS
from test_training import backbone, cache, data, logged, recipe  # noqa: F401
from tiny import TINY_MODELS, tiny_model


def oracle_loss(model, question):
    segments = []
    for index in question.documents:
        ids = list(DOCUMENTS[index])
        causal = torch.ones(len(ids), len(ids)).tril().bool()
        _, kv = run_layers(model, embed(model, ids), list(range(len(ids))), causal)
        segments.append((kv, len(ids), 1))
    tail = [*question.question, *question.answer[:-1]]
    logits = compose_dense(model, list(PREFIX), segments, tail)[-len(question.answer) :]
    return F.cross_entropy(logits, torch.tensor(question.answer), reduction="sum")


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_loss_and_its_gradients_equal_the_oracles(name):
    backbone = Backbone(tiny_model(name), name=name)  # noqa: F811
    backbone.model.requires_grad_(True)
    found = []
    for loss in (
        block_loss(backbone, GROUP)[0],
        sum(oracle_loss(backbone.model, q) for q in QUESTIONS),
    ):
        backbone.model.zero_grad()
        loss.backward()
        found.append((loss, {n: p.grad.clone() for n, p in backbone.model.named_parameters()}))
    (got, gradients), (expected, wanted) = found
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for key, gradient in wanted.items():
        torch.testing.assert_close(gradients[key], gradient, atol=2e-3, rtol=2e-3, msg=key)


@pytest.fixture
def tuned(recipe):  # noqa: F811
    def make(**changes):
        return recipe(
            trains="block", variant="plain", learning_rate=3e-3, schedule="linear", **changes
        )

    return make


@pytest.fixture
def trainable(embedded):
    """A tiny backbone that a test may change."""
    model = tiny_model("llama", vocab_size=len(embedded.tokenizer))
    return Backbone(model, embedded.tokenizer, "tiny")


@pytest.mark.embedded
@pytest.mark.parametrize("trains", ["block", "block-lora"])
def test_fine_tuning_makes_a_checkpoint_the_method_takes(tuned, trainable, trains, tmp_path):
    before = trainable.digest
    settings = replace(tuned(stages=(Stage(12),), evaluate_every=6), trains=trains)
    folder = Trainer(settings, trainable).train()
    scores = logged(tmp_path / "run", "dev_nll_right")
    assert len(scores) == 3 and scores[-1] < scores[0]
    marked = json.loads((folder / "config.json").read_text())
    assert marked["c2kv_block_attention"] == ("lora" if trains == "block-lora" else "full")
    made = load_backbone(str(folder), dtype="float32", device="cpu")
    assert made.digest != before
    engine = Engine(made, None)
    assert engine.prefill([engine.document("The mill is old.")], "block").loaded_bytes > 0


@pytest.mark.embedded
@pytest.mark.parametrize("trains", ["block", "block-lora"])
def test_a_resumed_run_equals_an_uninterrupted_one(tuned, embedded, trains, tmp_path):
    def fresh():
        model = tiny_model("llama", vocab_size=len(embedded.tokenizer))
        return Backbone(model, embedded.tokenizer, "tiny")

    settings = replace(tuned(dev=(), stages=(Stage(4),)), trains=trains)
    whole = replace(settings, output=str(tmp_path / "whole"))
    parts = replace(settings, output=str(tmp_path / "parts"))
    Trainer(whole, fresh()).train()
    Trainer(parts, fresh()).train(until=2)
    Trainer(parts, fresh(), resume=True).train()
    one, two = (
        load_backbone(str(tmp_path / n / "model"), device="cpu") for n in ("whole", "parts")
    )
    assert one.digest == two.digest


@pytest.mark.embedded
def test_options_of_extractors_are_refused(tuned):
    with pytest.raises(ConfigError, match="gradient_checkpointing is for training extractors"):
        tuned(gradient_checkpointing=True)


def test_an_ordinary_checkpoint_is_not_taken_for_a_fine_tuned_one():
    assert not hasattr(backbone_of("llama").config, "c2kv_block_attention")
