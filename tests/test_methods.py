"""Methods: exact where they must equal full recompute, and no more work than they claim."""

from contextlib import contextmanager

import pytest
import torch

from c2kv.document import Document
from c2kv.errors import ConfigError, MissingExtractorError
from c2kv.library import Compressed, SegmentLibrary, Uncompressed
from c2kv.methods import registry
from c2kv.methods.base import Materials
from c2kv.methods.recompute import Recompute, prefill
from conftest import backbone_of, noisy_extractor, random_ids

SPANS = (9, 1, 14)
PREFIX = tuple(random_ids(5, seed=90))


def documents_of(backbone, spans=SPANS, seed=0):
    return [
        Document(f"d{i}", (tuple(random_ids(n, seed=seed + 10 * i + n)),), backbone.digest)
        for i, n in enumerate(spans)
    ]


def materials_of(backbone):
    full = SegmentLibrary(backbone, Uncompressed(backbone), "t")
    compressed = SegmentLibrary(backbone, Compressed(backbone, noisy_extractor(backbone)), "t")
    return Materials(backbone, full, lambda variant: compressed)


def run(backbone, name, documents, prefix=PREFIX, materials=None):
    method = registry.build(name, materials or materials_of(backbone))
    return method.prefill(prefill(backbone, prefix), documents)


def kv(prefilled):
    """[layers, 2, kv_heads, entries, head_dim] of a prefilled composition, keys rotated."""
    return prefilled.composition.kv()


def logits(prefilled, question=(3, 1, 4)):
    composition = prefilled.composition
    cache = composition.open(room=len(question))
    positions = torch.arange(len(question))[None] + composition.question_position
    with torch.no_grad():
        return composition.backbone.forward(torch.tensor([question]), positions, cache)


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["recompute", "epic-2", "cacheblend-0.5"])
def test_what_is_computed_online_is_copied_for_no_question_but_a_second(llama, name):
    prefilled = run(llama, name, documents_of(llama))
    before = kv(prefilled).clone()
    first = prefilled.composition.open(room=4)
    assert first.arena.data_ptr() == kv(prefilled).data_ptr()
    second = prefilled.composition.open(room=4)
    assert second.arena.data_ptr() != first.arena.data_ptr()
    expected = logits(prefilled)  # a third
    for cache in (first, second):
        positions = torch.arange(3)[None] + prefilled.composition.question_position
        with torch.no_grad():
            close(llama.forward(torch.tensor([[3, 1, 4]]), positions, cache), expected)
    assert torch.equal(kv(prefilled), before)
    assert (
        run(llama, name, documents_of(llama)).composition.open(room=9999).get_seq_length()
        == (before.shape[3])
    )


@pytest.mark.parametrize(
    "name", ["epic-14", "epic-999", "cacheblend-1.0", "cacheblend-1-gradual", "cacheblend-1-oracle"]
)
def test_recomputing_everything_equals_full_recompute(backbone, name):
    documents = documents_of(backbone)
    expected = run(backbone, "recompute", documents)
    got = run(backbone, name, documents)
    assert got.composition.question_position == expected.composition.question_position
    close(kv(got), kv(expected))
    close(logits(got), logits(expected))


@pytest.mark.parametrize("name", ["reuse", "epic-0", "cacheblend-0-oracle"])
def test_one_document_without_prefix_needs_no_recomputing(backbone, name):
    documents = documents_of(backbone, spans=(23,))
    close(kv(run(backbone, name, documents, ())), kv(run(backbone, "recompute", documents, ())))


@pytest.mark.parametrize("name", ["epic-0", "cacheblend-0-oracle", "hybrid-all", "block-unchecked"])
def test_recomputing_nothing_equals_reuse(backbone, name):
    documents = documents_of(backbone)
    close(kv(run(backbone, name, documents)), kv(run(backbone, "reuse", documents)))


def test_hybrid_puts_full_documents_before_compressed_ones(llama):
    documents = documents_of(llama)
    got = run(llama, "hybrid-1", documents)
    assert got.composition.entries == 5 + 9 + 1 + 4
    assert [s.ratio for s in got.composition.segments] == [1, 4, 4]
    close(kv(run(llama, "hybrid-0", documents)), kv(run(llama, "c2kv", documents)))
    close(kv(got)[..., :14, :], kv(run(llama, "reuse", documents))[..., :14, :])


def test_hybrid_takes_the_documents_chosen_where_they_stand(llama):
    documents = documents_of(llama)
    got = run(llama, "hybrid-at-1-3", documents).composition
    assert [s.ratio for s in got.segments] == [1, 4, 1]
    assert got.token_ids == [*PREFIX, *(t for d in documents for t in d.pieces[0])]
    other = run(llama, "hybrid-at-2-9", documents).composition
    assert [s.ratio for s in other.segments] == [4, 1, 4]


@pytest.mark.parametrize("name", ["epic-3", "cacheblend-0.4", "cacheblend-0.3-gradual"])
def test_recomputed_tokens_never_see_later_positions(backbone, name):
    """Two prompts that differ in the last document alone agree in everything before it."""
    first = documents_of(backbone)
    other = [*first[:2], documents_of(backbone, seed=77)[2]]
    before = 5 + SPANS[0] + SPANS[1]
    materials = materials_of(backbone)
    if name.startswith("epic"):
        one, two = (kv(run(backbone, name, d, materials=materials)) for d in (first, other))
        assert torch.equal(one[..., :before, :], two[..., :before, :])
        assert not torch.equal(one[..., before:, :], two[..., before:, :])
        return
    # Which tokens are chosen depends on all of them; those of both must agree up to there.
    method = registry.build(name, materials)
    method._select = lambda reused, layer, at, hidden, count: torch.arange(len(at))[::2]
    one, two = (kv(method.prefill(prefill(backbone, PREFIX), d)) for d in (first, other))
    assert torch.equal(one[..., :before, :], two[..., :before, :])


def test_a_recomputed_token_equals_the_dense_oracles(llama):
    """EPIC against its definition: one causal pass in which only chosen tokens are new."""
    documents = documents_of(llama)
    got = kv(run(llama, "epic-2", documents))
    ids = [*PREFIX, *(t for d in documents for t in d.pieces[0])]
    reused = kv(run(llama, "reuse", documents))
    chosen = [5, 6, 14, 15, 16]
    expected = reused.clone()
    # Token by token, in order: each runs through all layers against what precedes it.
    for at in chosen:
        cache = run(llama, "recompute", documents).composition.open(room=0)
        arena = cache.arena[:, :, 0, :, : len(ids)]
        arena[:] = expected
        cache.crop(-(len(ids) - at))
        with torch.no_grad():
            llama.forward(torch.tensor([[ids[at]]]), torch.tensor([[at]]), cache)
        expected = arena.clone()
    close(got, expected)


def test_cacheblend_goes_on_with_the_tokens_that_deviate_most(llama):
    documents = documents_of(llama)
    exact, reused, got = (
        kv(run(llama, name, documents)) for name in ("recompute", "reuse", "cacheblend-0.25")
    )
    close(got[:2], exact[:2])  # layers 0 and 1: fresh keys and values of every token stay
    deviation = (exact - reused)[1, 1, :, 5:].square().sum(dim=(0, 2))
    chosen = deviation.topk(6).indices.sort().values + 5
    rest = [i for i in range(29) if i not in chosen.tolist()]
    changed = (got[2] != reused[2]).any(dim=0).any(dim=0).any(dim=-1)
    assert changed[chosen].all() and not changed[rest].any()


def test_blending_never_gets_worse_than_reuse_on_deviation(llama):
    documents = documents_of(llama, spans=(30, 30, 30))
    exact = kv(run(llama, "recompute", documents))
    off = {
        name: (kv(run(llama, name, documents)) - exact).norm().item()
        for name in ("reuse", "cacheblend-0.5", "cacheblend-0.9", "epic-8", "epic-29")
    }
    assert off["cacheblend-0.9"] < off["cacheblend-0.5"] < off["reuse"]
    assert off["epic-29"] < off["epic-8"] < off["reuse"]


@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_naive_stride_keeps_the_last_entry_of_each_block(backbone, ratio):
    documents = documents_of(backbone)
    got = run(backbone, f"naive-stride-{ratio}", documents)
    full = kv(run(backbone, "reuse", documents))
    kept, first = list(range(5)), 5
    for span in SPANS:
        ends = [min(end, span) for end in range(ratio, span + ratio, ratio)]
        kept += [first + end - 1 for end in ends]
        first += span
    close(kv(got), full[..., kept, :])
    assert got.composition.question_position == 29


def test_naive_norm_keeps_the_largest_values_of_each_head(llama):
    documents = documents_of(llama, spans=(10,))
    got, full = kv(run(llama, "naive-norm-4", documents)), kv(run(llama, "reuse", documents))
    for layer in range(3):
        for head in range(2):
            values = full[layer, 1, head, 5:]
            top = values.norm(dim=-1).topk(3).indices.sort().values + 5
            close(got[layer, :, head, 5:], full[layer, :, head, top])


@contextmanager
def counted(backbone):
    """Token·layer products of every MLP and every key projection run within."""
    counts, hooks = {"mlp": 0, "k_proj": 0}, []
    for layer in backbone.layers:
        for name, module in (("mlp", layer.mlp), ("k_proj", layer.self_attn.k_proj)):

            def add(_, inputs, __, name=name):
                counts[name] += inputs[0].shape[:-1].numel()

            hooks.append(module.register_forward_hook(add))
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("recompute", (5 + 24) * 3),
        ("reuse", 0),
        ("c2kv", 0),
        ("epic-2", 5 * 3),
        ("cacheblend-0.25", 24 + 6 * 2),
        ("cacheblend-0.25-gradual", 24 + 12 + 9),
        ("cacheblend-0.25-layer2", 24 * 2 + 6),
        ("hybrid-1", 0),
        ("naive-norm-4", 0),
    ],
)
def test_methods_do_the_work_they_claim_and_no_more(llama, name, products):
    documents, materials = documents_of(llama), materials_of(llama)
    method = registry.build(name, materials)
    prefix = prefill(llama, PREFIX)
    method.prepare(documents)
    with counted(llama) as counts:
        got = method.prefill(prefix, documents)
    assert counts["mlp"] == got.recomputed == products
    # CacheBlend also projects keys and values of all tokens it chooses from.
    chosen_from = {"cacheblend-0.25-gradual": 24 + 12}.get(name, 24 * name.startswith("cache"))
    assert counts["k_proj"] == products + chosen_from
    assert got.extracted == 0 and got.from_memory + got.from_disk == len(
        [] if name == "recompute" else documents
    )


@pytest.mark.parametrize("name", ["reuse", "naive-stride-2", "naive-norm-2", "c2kv"])
def test_what_computes_nothing_spends_no_time_on_it(llama, name):
    documents = documents_of(llama)
    method = registry.build(name, materials_of(llama))
    method.prepare(documents)
    got = method.prefill(prefill(llama, PREFIX), documents)
    assert got.blend == got.extract == got.recomputed == 0 < got.load


def test_blending_refuses_kernels_without_masks(monkeypatch):
    backbone = backbone_of("llama")
    method = registry.build("epic-2", materials_of(backbone))
    prefix, documents = prefill(backbone, PREFIX), documents_of(backbone)
    method.prepare(documents)
    monkeypatch.setattr(backbone.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ConfigError, match="load the model with sdpa"):
        method.prefill(prefix, documents)


def test_what_is_stored_is_what_is_loaded(llama):
    documents = documents_of(llama)
    entry = llama.kv_bytes_per_entry
    for name, entries in (
        ("recompute", 0),
        ("reuse", 24),
        ("epic-2", 24),
        ("c2kv", 3 + 1 + 4),
        ("hybrid-1", 9 + 1 + 4),
    ):
        method = registry.build(name, materials_of(llama))
        stored = method.prepare(documents)
        got = method.prefill(prefill(llama, PREFIX), documents)
        assert stored.nbytes == got.loaded_bytes == entries * entry, name


@pytest.mark.parametrize("name", ["reuse", "epic-3", "cacheblend-0.5", "c2kv", "naive-norm-4"])
def test_documents_in_a_batch_or_alone_give_the_same(backbone, name):
    documents = documents_of(backbone)
    together, alone = materials_of(backbone), materials_of(backbone)
    for document in documents:
        registry.build(name, alone).prepare([document])
    one, two = (run(backbone, name, documents, materials=m) for m in (together, alone))
    assert two.extracted == 0 < one.extracted
    close(kv(one), kv(two))


@pytest.mark.parametrize(
    "name",
    [
        *("epic", "epic-x", "epic-3-4", "cacheblend", "cacheblend-a", "cacheblend-0.1-magic"),
        *("cacheblend-.-layer1", "cacheblend-0.1-layer2-oracle", "naive-4", "naive-stride"),
        *("reuse-1", "recompute-1", "c2kv-fancy", "random-1", "block-loosely", "naive-norm--2"),
        *("hybrid", "hybrid-x", "hybrid-at", "hybrid-at-0", "hybrid-1-2"),
    ],
)
def test_wrong_parameters_say_how_names_are_written(llama, name):
    with pytest.raises(ConfigError, match="write "):
        registry.build(name, materials_of(llama))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("magic-3", "use one of: recompute, reuse, epic-K"),
        ("cacheblend-1.5", "1.5 is no share"),
        ("cacheblend-0.1-layer9", "check layer is one of 1 to 2"),
        ("naive-norm-65", "ratio 65"),
        ("block", "not marked as fine-tuned"),
    ],
)
def test_bad_names_are_refused(llama, name, says):
    with pytest.raises(ConfigError, match=says):
        registry.build(name, materials_of(llama))


def test_a_checkpoint_fine_tuned_for_blocks_is_taken(monkeypatch):
    backbone = backbone_of("llama")
    monkeypatch.setattr(backbone.config, "c2kv_block_attention", "full", raising=False)
    documents = documents_of(backbone)
    close(kv(run(backbone, "block", documents)), kv(run(backbone, "reuse", documents)))


def test_methods_can_be_added(llama, monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    registry.register("mine", "mine", "a method of my own", lambda *_: Recompute())
    assert registry.build("mine", materials_of(llama)).name == "recompute"
    with pytest.raises(ConfigError, match="cannot name a method"):
        registry.register("my-own", "my-own", "", lambda *_: Recompute())


def test_the_registry_imports_no_torch():
    import subprocess
    import sys

    script = "import sys\nfrom c2kv.methods import registry\nregistry.check('epic-3')\n"
    script += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_methods_of_extractors_need_one(embedded):
    from c2kv.engine import Engine

    engine = Engine(embedded, None)
    assert engine.method("reuse").ratio == 1
    other = Engine(backbone_with(embedded), None)
    for name in ("c2kv", "hybrid-1"):
        with pytest.raises(MissingExtractorError):
            other.method(name)


def backbone_with(embedded):
    """A tiny backbone that no extractor in the box is for."""
    from c2kv.backbone import Backbone
    from tiny import tiny_model

    return Backbone(tiny_model("llama", vocab_size=len(embedded.tokenizer)), embedded.tokenizer)


def test_anchors_read_together_or_apart(llama):
    library = SegmentLibrary(llama, Compressed(llama, noisy_extractor(llama, 4, "anchor")), "t")
    materials = Materials(llama, materials_of(llama).full, lambda variant: library)
    documents = documents_of(llama, spans=(8, 12))
    apart, joint = (
        run(llama, n, documents, materials=materials) for n in ("anchor", "anchor-joint")
    )
    assert apart.composition.entries == joint.composition.entries == 5 + 2 + 3
    assert [s.span for s in joint.composition.segments] == [20]
    for name in ("c2kv", "hybrid-1"):
        with pytest.raises(ConfigError, match="use the method anchor"):
            registry.build(name, materials)
    first = slice(0, 5 + 2)
    close(kv(apart)[..., first, :], kv(joint)[..., first, :])
    assert not torch.allclose(kv(apart), kv(joint), atol=1e-2)
