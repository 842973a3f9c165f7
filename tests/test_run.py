"""Runs: who works in their folder, what tells them apart, and samples that no batch can answer."""

import copy

import pytest
import torch
from transformers import AutoTokenizer

from c2kv.backbone import Backbone
from c2kv.cli.evaluate import _mean
from c2kv.cli.main import main
from c2kv.engine import Engine
from c2kv.errors import ConfigError, NumericalError
from c2kv.evaluation.batches import in_halves
from c2kv.evaluation.conditions import Condition
from c2kv.evaluation.qa import summarize
from c2kv.evaluation.run import Run, _tokenizer_digest, manifest, run_folder
from tiny import tiny_model


def test_two_processes_never_share_a_folder(tmp_path):
    with run_folder(tmp_path / "run") as folder:
        assert folder == tmp_path / "run"
        with pytest.raises(ConfigError, match="another process is at work in"), run_folder(folder):
            pass
    with run_folder(folder), run_folder(None) as temporary:
        assert temporary.is_dir()
    assert not temporary.exists()


def test_runs_go_on_elsewhere_only_where_they_tell_no_times(tmp_path, caplog):
    here = {"processor": "a", "threads": 2, "device": "cuda (H200, 140 GiB)"}
    there, elsewhere = {**here, "processor": "b"}, {**here, "device": "cpu"}
    for kind in ("qa", "longbench"):
        (tmp_path / kind).mkdir()
        Run(tmp_path / kind, {"kind": kind, "machine": here})
    with pytest.raises(ConfigError, match="another machine: processor"):
        Run(tmp_path / "longbench", {"kind": "longbench", "machine": there})
    with pytest.raises(ConfigError, match="another machine: device"):
        Run(tmp_path / "qa", {"kind": "qa", "machine": elsewhere})
    assert not caplog.records
    Run(tmp_path / "qa", {"kind": "qa", "machine": there})
    assert "begun on another machine" in caplog.text


@pytest.mark.embedded
def test_a_tokenizer_is_told_by_what_it_does_not_by_its_file(embedded_tokenizer, tmp_path):
    digest = _tokenizer_digest(embedded_tokenizer)
    embedded_tokenizer.save_pretrained(tmp_path)
    assert _tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path)) == digest
    other = copy.deepcopy(embedded_tokenizer)
    other.add_tokens(["millstone"])
    assert _tokenizer_digest(other) != digest


@pytest.mark.embedded
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_batch_is_a_setting_where_rounding_depends_on_it(embedded_tokenizer, dtype):
    model = tiny_model("llama", vocab_size=len(embedded_tokenizer)).to(dtype)
    engine = Engine(Backbone(model, embedded_tokenizer, "tiny"), None)
    described = manifest(engine, [Condition.of("reuse")], {"kind": "qa", "batch": 8})
    assert described.get("batch") == (None if dtype == torch.float32 else 8)


def test_samples_that_overflow_or_exhaust_memory_fail_alone():
    def answer(some):
        if "overflows" in some:
            raise NumericalError("not finite")
        if "too large" in some:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `create`")
        if "broken" in some:
            raise RuntimeError("shapes do not match")
        return [{"id": one} for one in some]

    rows = in_halves(answer, ["a", "overflows", "b", "too large"], lambda s, e: {"failed": s})
    assert rows == [{"id": "a"}, {"failed": "overflows"}, {"id": "b"}, {"failed": "too large"}]
    with pytest.raises(RuntimeError, match="shapes"):
        in_halves(answer, ["a", "broken"], lambda s, e: {"failed": s})


def row(f1, condition="c2kv", **more):
    scores = {"f1": f1, "nll": 2.0, "answer_tokens": 2, "entries": 9}
    return {"id": 0, "condition": condition, **scores, **more}


def test_scores_say_how_sure_they_are_and_means_are_over_all_samples_or_none():
    first = summarize([row(f) for f in (0.0, 0.5, 1.0, 0.5)])
    deviation = 100 * (2 * 0.25 / 3) ** 0.5
    assert first["c2kv"]["f1_margin"] == pytest.approx(1.96 * deviation / 2)
    second = summarize([row(f) for f in (0.2, 0.2, 0.2)])
    mean = _mean({"one": first, "two": second})["c2kv"]
    assert mean["f1"] == pytest.approx(35) and mean["scored"] == 7
    assert mean["f1_margin"] == pytest.approx(first["c2kv"]["f1_margin"] / 2)
    asked = [row(f, id=i) for i, f in enumerate((0.0, 0.5, 1.0))]
    asked += [row(f, "wrongdoc", id=i) for i, f in enumerate((0.0, 0.25, 0.5))]
    asked += [row(f, "reuse", id=i) for i, f in enumerate((0.0, 0.5, 1.0))]
    asked += [
        row(0.5, "wrongdoc:reuse", id=1),
        {"condition": "wrongdoc:reuse", "error": "", "id": 2},
    ]
    gaps = summarize(asked)
    assert gaps["c2kv"]["over_wrongdoc"] == 25  # by 0, 25 and 50: less spread than either has
    assert gaps["c2kv"]["over_wrongdoc_margin"] == pytest.approx(1.96 * 25 / 3**0.5)
    assert gaps["reuse"]["over_wrongdoc"] == 0 and "over_wrongdoc_margin" not in gaps["reuse"]
    assert not {"over_wrongdoc"} & {*gaps["wrongdoc"], *gaps["wrongdoc:reuse"]}
    failing = summarize([row(0.2), {"condition": "c2kv", "error": "too long"}])
    assert "f1_margin" not in failing["c2kv"]
    assert _mean({"one": first, "two": failing})["c2kv"] == {"scored": 5, "failed": 1}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("eval", "qa", "--conditions", "reuse,noctx,reuse", "x.jsonl"), "'reuse' is named twice"),
        (("bench", "--methods", "reuse,reuse"), "'reuse' is named twice"),
        (("bench", "--tokens", "64,128,64"), "'64' is named twice"),
        (("bench", "--store", "nowhere"), "'nowhere' is no folder"),
        (("eval", "qa", "hub:mills/questions"), "which split of 'hub:mills/questions'"),
    ],
)
def test_what_would_count_double_or_come_from_anywhere_is_refused(arguments, says, capsys):
    try:
        assert main([*arguments]) == 1
    except SystemExit as stop:
        assert stop.code == 2
    assert says in capsys.readouterr().err


def test_answers_from_values_that_are_not_finite_are_none(llama):
    from c2kv.decode import DecodingOptions, decode
    from c2kv.methods.recompute import prefill

    composition = prefill(llama, [1, 2, 3])
    composition.kv()[0, 1, 0, 0, 1] = torch.inf  # as float16 overflows
    with pytest.raises(NumericalError, match="overflows"):
        decode(composition, [[4, 5]], DecodingOptions(max_new_tokens=2))
