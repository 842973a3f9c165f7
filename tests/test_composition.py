"""Compositions agree with the dense oracle; placements, order, offsets and immutability."""

import pytest
import torch

from c2kv.composition import Composition, Placement
from c2kv.errors import ContextOverflowError, ExtractorMismatchError
from c2kv.extractor import extract
from c2kv.fullkv import full_kv
from c2kv.methods.recompute import prefill
from c2kv.segment import Segment, SegmentIdentity
from conftest import backbone_of, noisy_extractor, random_ids
from oracle import compose_dense, extract_dense
from oracle import rotate as oracle_rotate

PREFIX = random_ids(6, seed=9)
QUESTION = random_ids(8, seed=10)


def identity_of(backbone, ids, ratio, variant="plain"):
    return SegmentIdentity(
        backbone=backbone.digest,
        extractor="x",
        variant=variant,
        ratio=ratio,
        dtype="float32",
        template="t",
        token_ids=tuple(ids),
    )


def segments_of(backbone, extractor, documents):
    ratio = extractor.config.ratio
    with torch.no_grad():
        kvs = extract(backbone, extractor, documents)
    return tuple(
        Segment(identity_of(backbone, ids, ratio), kv)
        for ids, kv in zip(documents, kvs, strict=True)
    )


def question_logits(composition, question):
    """Logits of every question token, through a cache the composition opened."""
    backbone = composition.backbone
    cache = composition.open(room=len(question))
    positions = composition.question_position + torch.arange(len(question))[None]
    with torch.no_grad():
        return backbone.forward(torch.tensor([question]), positions, cache, logits=len(question))[0]


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("prefix", [[], PREFIX])
def test_a_question_over_a_composition_matches_the_oracle(backbone, ratio, prefix):
    extractor = noisy_extractor(backbone, ratio, "residual")
    documents = [random_ids(n, seed=n) for n in (19, 1, 32)]
    segments = segments_of(backbone, extractor, documents)
    composition = Composition(backbone, prefill(backbone, prefix).prefix, tuple(prefix), segments)
    with torch.no_grad():
        dense = [
            (extract_dense(backbone.model, extractor, ids, ratio, True), len(ids), ratio)
            for ids in documents
        ]
        expected = compose_dense(backbone.model, prefix, dense, QUESTION)
    got = question_logits(composition, QUESTION)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_offsets_accumulate_source_spans_and_slots_count_entries(llama):
    segments = segments_of(llama, noisy_extractor(llama, 4), [random_ids(10), random_ids(7)])
    composition = Composition(llama, prefill(llama, PREFIX).prefix, tuple(PREFIX), segments)
    assert composition.placements == (Placement(6, 10, 4, 6, 3), Placement(16, 7, 4, 9, 2))
    assert composition.placements[0].positions().tolist() == [9, 13, 15]
    assert composition.placements[1].positions().tolist() == [19, 22]
    assert composition.question_position == 23 and composition.entries == 11
    assert composition.token_ids == [*PREFIX, *random_ids(10), *random_ids(7)]


@pytest.mark.parametrize("offset", [0, 5, 9_000, 50_000])
def test_placement_at_an_offset_equals_rotating_the_extraction_there(backbone, offset):
    extractor = noisy_extractor(backbone, 3)
    (segment,) = segments_of(backbone, extractor, [random_ids(20)])
    prefix = torch.zeros(3, 2, 2, offset, backbone.head_dim)
    cache = Composition(backbone, prefix, (0,) * offset, (segment,)).open(room=0)
    placed = cache.arena[:, :, 0, :, offset:]
    positions = [offset + min(3 * j, 20) - 1 for j in range(1, 8)]
    expected = oracle_rotate(segment.kv[:, 0], positions, backbone.model)
    torch.testing.assert_close(placed[:, 0], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(placed[:, 1], segment.kv[:, 1])


def test_swapping_documents_moves_their_entries_and_nothing_else(llama):
    extractor = noisy_extractor(llama, 4)
    a, b = segments_of(llama, extractor, [random_ids(16, seed=1), random_ids(16, seed=2)])
    prefix = prefill(llama, PREFIX)
    one = Composition(llama, prefix.prefix, (), (a, b)).open(0).arena
    other = Composition(llama, prefix.prefix, (), (b, a)).open(0).arena
    assert torch.equal(one[:, 1, :, :, 6:10], other[:, 1, :, :, 10:14])
    assert torch.equal(one[:, 1, :, :, 10:14], other[:, 1, :, :, 6:10])
    assert not torch.allclose(one[:, 0, :, :, 6:10], other[:, 0, :, :, 10:14])
    torch.testing.assert_close(one[..., :6, :], other[..., :6, :])


def test_uncompressed_documents_in_place_equal_full_recompute(backbone):
    """The backbone's own KV, before RoPE, placed by the same path as C2KV."""
    ids = random_ids(37)
    segment = Segment(identity_of(backbone, ids, 1, "full"), *full_kv(backbone, [ids]))
    composition = Composition(backbone, prefill(backbone, []).prefix, (), (segment,))
    got = question_logits(composition, QUESTION)
    expected = backbone.model(torch.tensor([ids + QUESTION])).logits[0, 37:]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_documents_own_kv_does_not_depend_on_the_batch(backbone):
    documents = [random_ids(n, seed=n) for n in (1, 37, 5)]
    together = full_kv(backbone, documents)
    for ids, kv in zip(documents, together, strict=True):
        assert kv.shape[3] == len(ids)
        torch.testing.assert_close(kv, *full_kv(backbone, [ids]), atol=1e-5, rtol=1e-5)


def test_every_opened_cache_is_its_own(llama):
    (segment,) = segments_of(llama, noisy_extractor(llama, 4), [random_ids(12)])
    composition = Composition(llama, prefill(llama, PREFIX).prefix, tuple(PREFIX), (segment,))
    before = question_logits(composition, QUESTION)
    question_logits(composition, random_ids(30, seed=4))
    rows = composition.open(room=2, batch=3)
    assert torch.equal(rows.arena[:, :, 0, :, :9], rows.arena[:, :, 2, :, :9])
    assert torch.equal(question_logits(composition, QUESTION), before)


def test_appending_never_moves_the_prefix(llama):
    composition = prefill(llama, PREFIX)
    cache = composition.open(room=4)
    where = cache.arena.data_ptr()
    keys = torch.ones(1, 2, 2, llama.head_dim)
    seen, _ = cache.update(keys, keys, 0)
    assert seen.data_ptr() == where and seen.shape[2] == 8
    assert cache.get_seq_length() == 8
    cache.layers[0].crop(-2)
    assert cache.get_seq_length() == 6
    cache.update(torch.cat([keys] * 2, 2), torch.cat([keys] * 2, 2), 0)
    with pytest.raises(ContextOverflowError, match="room for 10 entries, not 12"):
        cache.update(keys, keys, 0)


def test_segments_of_another_model_are_refused(llama):
    other = backbone_of("mistral")
    qwen = backbone_of("qwen3")
    (segment,) = segments_of(qwen, noisy_extractor(qwen, 4), [random_ids(12)])
    prefix = prefill(llama, PREFIX).prefix
    with pytest.raises(ExtractorMismatchError, match="of shape"):
        Composition(llama, prefix, (), (segment,))
    moved = Segment(identity_of(qwen, random_ids(12), 4), torch.zeros(3, 2, 2, 3, 8))
    with pytest.raises(ExtractorMismatchError, match=r"made by weights .* extract"):
        Composition(other, prefix, (), (moved,))
