"""Decoding: equal to transformers' generate, batch equals one at a time, options and limits."""

import pytest
import torch

from c2kv.composition import Composition
from c2kv.decode import DecodingOptions, decode
from c2kv.errors import ConfigError, ContextOverflowError, DocumentError
from c2kv.methods.recompute import prefill
from conftest import noisy_extractor, random_ids
from test_composition import segments_of

DOCUMENT = random_ids(50, seed=3)
QUESTIONS = [random_ids(n, seed=n) for n in (9, 4, 17, 9)]


def composed(backbone):
    segments = segments_of(backbone, noisy_extractor(backbone, 4), [random_ids(41), DOCUMENT])
    prefix = prefill(backbone, random_ids(7))
    return Composition(backbone, prefix.prefix, prefix.prefix_ids, segments)


def generate(backbone, ids, **settings):
    out = backbone.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), pad_token_id=0, **settings
    )
    return out[0, len(ids) :].tolist()


def test_full_recompute_equals_generate_token_for_token(backbone):
    options = DecodingOptions(max_new_tokens=24)
    (got,), _ = decode(prefill(backbone, DOCUMENT), [QUESTIONS[0]], options)
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    assert got.token_ids == generate(backbone, DOCUMENT + QUESTIONS[0], **settings)


def test_repetition_penalty_sees_the_source_tokens_as_generate_does(llama):
    options = DecodingOptions(max_new_tokens=24, repetition_penalty=1.7)
    (got,), _ = decode(prefill(llama, DOCUMENT), [QUESTIONS[0]], options)
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    expected = generate(llama, DOCUMENT + QUESTIONS[0], repetition_penalty=1.7, **settings)
    assert got.token_ids == expected
    plain, _ = decode(prefill(llama, DOCUMENT), [QUESTIONS[0]], DecodingOptions(max_new_tokens=24))
    assert plain[0].token_ids != expected


@pytest.mark.parametrize("sample", [False, True])
def test_a_batch_of_questions_equals_one_at_a_time(backbone, sample):
    composition = composed(backbone)
    options = DecodingOptions(max_new_tokens=16, sample=sample, temperature=0.7, top_k=20, seed=5)
    batch, _ = decode(composition, QUESTIONS, options)
    for question, together in zip(QUESTIONS, batch, strict=True):
        (alone,), _ = decode(composition, [question], options)
        assert together.token_ids == alone.token_ids
    assert batch[0].token_ids != batch[1].token_ids


def test_questions_over_their_own_compositions_equal_one_at_a_time(backbone):
    compositions = [composed(backbone), prefill(backbone, DOCUMENT), prefill(backbone, [5]), None]
    compositions[3] = compositions[0]
    options = DecodingOptions(max_new_tokens=16, repetition_penalty=1.3)
    batch, _ = decode(compositions, QUESTIONS, options)
    for composition, question, together in zip(compositions, QUESTIONS, batch, strict=True):
        (alone,), _ = decode(composition, [question], options)
        assert together.token_ids == alone.token_ids


def test_seeds_decide_samples(llama):
    composition = composed(llama)

    def draw(seed):
        options = DecodingOptions(max_new_tokens=16, sample=True, temperature=3.0, seed=seed)
        return decode(composition, QUESTIONS[:1], options)[0][0].token_ids

    assert draw(1) == draw(1) != draw(2)


def test_rows_stop_on_their_own(llama):
    composition = composed(llama)
    free, _ = decode(composition, QUESTIONS, DecodingOptions(max_new_tokens=12))
    stop = free[0].token_ids[5]
    options = DecodingOptions(max_new_tokens=12, stop_ids=(stop,))
    stopped, _ = decode(composition, QUESTIONS, options)
    for before, after in zip(free, stopped, strict=True):
        if stop in before.token_ids:
            assert after.token_ids == before.token_ids[: before.token_ids.index(stop)]
            assert after.finish_reason == "stop"
        else:
            assert after.token_ids == before.token_ids and after.finish_reason == "length"


def test_tokens_stream_and_cancellation_keeps_what_came(llama):
    seen = []
    decoded, _ = decode(
        composed(llama),
        QUESTIONS[:2],
        DecodingOptions(max_new_tokens=50),
        on_token=lambda row, token: seen.append((row, token)),
        cancelled=lambda: len(seen) >= 8,
    )
    assert [d.finish_reason for d in decoded] == ["cancelled", "cancelled"]
    assert [t for row, t in seen if row == 1] == decoded[1].token_ids
    assert len(decoded[0].token_ids) == 4


def test_options_come_from_the_generation_config(llama):
    config = llama.model.generation_config
    options = DecodingOptions.of(llama, temperature=0.5, top_p=None)
    eos = config.eos_token_id
    assert options.stop_ids == (eos,) and options.temperature == 0.5 and not options.sample


def test_positions_beyond_the_model_are_refused_before_decoding(llama):
    limit = llama.max_positions
    composition = prefill(llama, DOCUMENT)
    with pytest.raises(ContextOverflowError, match=f"has {limit}; ask"):
        decode(composition, QUESTIONS[:1], DecodingOptions(max_new_tokens=limit - 58))


def test_bad_requests_are_refused(llama):
    composition = prefill(llama, DOCUMENT)
    for questions in ([], [[]]):
        with pytest.raises(DocumentError, match="ask something"):
            decode(composition, questions, DecodingOptions())


@pytest.mark.parametrize(
    "option",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.5},
        {"temperature": 0},
        {"temperature": float("nan")},
        {"top_p": 5},
        {"top_p": -1},
        {"top_k": -1},
        {"min_p": 7},
        {"repetition_penalty": -1},
        {"seed": 2**64},
    ],
)
def test_options_out_of_range_are_refused_by_name(option):
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=f"{name} {value} is not usable"):
        DecodingOptions(sample=True, **option)


def test_tokens_are_counted_only_for_rows_that_still_decode(llama):
    composition = composed(llama)
    free, _ = decode(composition, QUESTIONS, DecodingOptions(max_new_tokens=12))
    options = DecodingOptions(max_new_tokens=12, stop_ids=(free[0].token_ids[3],))
    decoded, times = decode(composition, QUESTIONS, options)
    emitted = sum(len(d.token_ids) for d in decoded)
    first = sum(bool(d.token_ids) for d in decoded)
    assert times.step_tokens == emitted - first < 4 * 11
