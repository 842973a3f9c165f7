"""Extraction agrees with the dense single-pass oracle, and never disturbs source tokens."""

import sys

import pytest
import torch

from c2kv.errors import ConfigError, DocumentError
from c2kv.extractor import Extractor, extract
from c2kv.extractor import flow as flow_module
from c2kv.extractor.flow import attend
from conftest import backbone_of, noisy_extractor, random_ids
from oracle import extract_dense, extraction_pass, visibility

RATIOS = (1, 2, 3, 4, 7, 16)
LENGTHS = (1, 2, 5, 16, 37, 64, 600)


@pytest.mark.parametrize("variant", ["plain", "residual"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_matches_the_dense_oracle(backbone, ratio, variant):
    extractor = noisy_extractor(backbone, ratio, variant)
    documents = [random_ids(n, seed=n) for n in LENGTHS]
    with torch.no_grad():
        batch = extract(backbone, extractor, documents)
        for ids, kv in zip(documents, batch, strict=True):
            expected = extract_dense(backbone.model, extractor, ids, ratio, variant == "residual")
            alone = extract(backbone, extractor, [ids])[0]
            assert kv.shape == expected.shape == (3, 2, 2, -(-len(ids) // ratio), backbone.head_dim)
            torch.testing.assert_close(kv, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(alone, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["plain", "residual"])
@pytest.mark.parametrize(("ratio", "length"), [(1, 600), (4, 600), (7, 599), (64, 600), (64, 1)])
def test_long_documents_match_the_oracle_across_query_chunks(monkeypatch, ratio, length, variant):
    monkeypatch.setattr(flow_module, "QUERY_CHUNK", 48)
    backbone = backbone_of("qwen3")
    extractor = noisy_extractor(backbone, ratio, variant)
    ids = random_ids(length)
    with torch.no_grad():
        got = extract(backbone, extractor, [ids, random_ids(3)])[0]
        expected = extract_dense(backbone.model, extractor, ids, ratio, variant == "residual")
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["plain", "residual"])
def test_gradients_match_the_oracle(backbone, variant):
    extractor = noisy_extractor(backbone, 3, variant)
    documents = [random_ids(10, seed=1), random_ids(4, seed=2)]
    weights = [torch.randn(3, 2, 2, m, backbone.head_dim) for m in (4, 2)]

    def gradients(pieces):
        extractor.zero_grad()
        sum((w * kv).sum() for w, kv in zip(weights, pieces, strict=True)).backward()
        return {n: p.grad.clone() for n, p in extractor.named_parameters() if p.requires_grad}

    got = gradients(extract(backbone, extractor, documents))
    residual = variant == "residual"
    expected = gradients(
        [extract_dense(backbone.model, extractor, ids, 3, residual) for ids in documents]
    )
    assert set(got) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-3, rtol=1e-4, msg=name)
    assert all(p.grad is None for p in backbone.model.parameters())


def test_source_tokens_are_the_backbones_own_bit_for_bit(backbone, monkeypatch):
    ids = random_ids(53)
    seen = []

    def spy(queries, keys, values, source_keys, source_values, *rest):
        seen.append((source_keys, source_values))
        return attend(queries, keys, values, source_keys, source_values, *rest)

    monkeypatch.setattr(sys.modules["c2kv.extractor.extract"], "attend", spy)
    extract(backbone, noisy_extractor(backbone, 4), [ids])
    plain = backbone.model(torch.tensor([ids]), output_hidden_states=True, use_cache=True)
    cache = getattr(plain, "cache", None) or plain.past_key_values
    assert len(seen) == backbone.num_layers - 1  # of the last layer none are read
    for layer, (keys, values) in zip(cache.layers, seen, strict=False):
        assert torch.equal(keys, layer.keys)
        assert torch.equal(values, layer.values)


def test_the_oracle_leaves_source_tokens_alone_too(backbone):
    ids = random_ids(20)
    hidden, _ = extraction_pass(backbone.model, noisy_extractor(backbone, 4), ids, 4, True)
    plain = backbone.model.model(torch.tensor([ids])).last_hidden_state[0]
    torch.testing.assert_close(backbone.model.model.norm(hidden[:20]), plain, atol=1e-4, rtol=1e-4)


def test_later_tokens_never_reach_earlier_entries(llama):
    extractor = noisy_extractor(llama, 4)
    ids = random_ids(40)
    changed = [*ids[:21], (ids[21] + 1) % 199, *ids[22:]]
    with torch.no_grad():
        before, after = extract(llama, extractor, [ids, changed])
    assert torch.equal(before[..., :5, :], after[..., :5, :])
    assert not torch.allclose(before[..., 5, :], after[..., 5, :])


def test_ratio_can_be_chosen_per_call(llama):
    extractor = noisy_extractor(llama, 4)
    ids = random_ids(33)
    with torch.no_grad():
        kv = extract(llama, extractor, [ids], ratio=8)[0]
        expected = extract_dense(llama.model, extractor, ids, 8, False)
    torch.testing.assert_close(kv, expected, atol=1e-4, rtol=1e-4)


def test_fresh_heads_are_the_backbones_own(backbone):
    extractor = Extractor.from_backbone(backbone, variant="residual")
    assert not extractor.embedding.any() and not extractor.trained
    own = backbone.layers[1].self_attn.k_proj
    assert torch.equal(extractor.layers[1].k_proj.weight, own.weight)
    assert (extractor.layers[1].k_proj.bias is None) == (own.bias is None)


def test_empty_documents_are_refused(llama):
    with pytest.raises(DocumentError, match="nothing to extract"):
        extract(llama, noisy_extractor(llama), [[1, 2], []])


@pytest.mark.parametrize("ratio", [0, 65, -1, 2.5, True])
def test_ratios_out_of_range_are_refused(llama, ratio):
    with pytest.raises(ConfigError, match=f"ratio {ratio}"):
        Extractor.from_backbone(llama, ratio=ratio)
    with pytest.raises(ConfigError, match=f"ratio {ratio}"):
        extract(llama, noisy_extractor(llama), [[1]], ratio=ratio)


@pytest.mark.parametrize("variant", ["plain", "residual"])
def test_gradient_checkpointing_changes_memory_alone(variant):
    backbone = backbone_of("qwen3")
    found = []
    for gradient_checkpointing in (False, True):
        extractor = noisy_extractor(backbone, 4, variant)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
        ):
            kvs = extract(
                backbone,
                extractor,
                [random_ids(37), random_ids(12)],
                gradient_checkpointing=gradient_checkpointing,
            )
        sum(kv.square().sum() for kv in kvs).backward()
        gradients = [p.grad for p in extractor.parameters() if p.grad is not None]
        found.append((sum(kept), kvs, gradients))
    (more, kvs, gradients), (less, same_kvs, same_gradients) = found
    assert less < more / 3
    for one, other in zip([*kvs, *gradients], [*same_kvs, *same_gradients], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def anchor_visibility(n, ratio):
    """As oracle.visibility, for anchors: a source token sees its own block up to itself, and the
    anchors before it."""
    visible = visibility(n, ratio).clone()
    for row in range(n):
        own = row // ratio
        for col in range(n):
            visible[row, col] = col <= row and col // ratio == own
        for anchor in range(visible.shape[0] - n):
            visible[row, n + anchor] = anchor < own
    return visible


@pytest.mark.parametrize("ratio", [1, 3, 4, 16])
def test_anchors_match_a_dense_pass_with_their_own_mask(backbone, monkeypatch, ratio):
    extractor = noisy_extractor(backbone, ratio, "anchor")
    documents = [random_ids(n, seed=n) for n in (1, 5, 37)]
    monkeypatch.setattr("oracle.visibility", anchor_visibility)
    for ids, kv in zip(documents, extract(backbone, extractor, documents), strict=True):
        expected = extract_dense(backbone.model, extractor, ids, ratio, True)
        torch.testing.assert_close(kv, expected, atol=1e-4, rtol=1e-4)
    extractor.zero_grad()
    kv.square().sum().backward()
    got = {n: p.grad.clone() for n, p in extractor.named_parameters() if p.requires_grad}
    extractor.zero_grad()
    expected.square().sum().backward()
    for name, gradient in got.items():
        wanted = dict(extractor.named_parameters())[name].grad
        torch.testing.assert_close(gradient, wanted, atol=1e-2, rtol=1e-3, msg=name)
