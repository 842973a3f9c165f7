"""What requests cost: every figure is what its name says, and methods are compared fairly."""

import json
import time
from dataclasses import replace

import pytest
import torch

from c2kv.backbone import Backbone
from c2kv.cli.main import main
from c2kv.engine import Engine
from c2kv.errors import ConfigError
from c2kv.evaluation import latency
from c2kv.evaluation.latency import Spread, measure, random_documents
from c2kv.evaluation.memory import peak_bytes
from c2kv.evaluation.report.sections import read_sections
from c2kv.extractor import Extractor
from c2kv.methods.recompute import Recompute
from c2kv.methods.registry import FAMILIES, Family
from c2kv.store import FolderStore
from tiny import tiny_model

pytestmark = pytest.mark.embedded
METHODS = ["recompute", "reuse", "epic-2", "c2kv"]


@pytest.fixture
def engine(embedded_tokenizer, tmp_path):
    model = tiny_model("llama", vocab_size=len(embedded_tokenizer))
    backbone = Backbone(model, embedded_tokenizer, "tiny")
    extractor = Extractor.from_backbone(backbone, 4)
    return Engine(backbone, extractor, FolderStore(tmp_path / "store"), segment_tokens=64)


def test_documents_have_the_tokens_asked_for_and_share_nothing(engine):
    documents = random_documents(engine, 200, 3)
    assert sum(d.tokens for d in documents) == 200 and len(documents) == 3
    assert max(len(piece) for d in documents for piece in d.pieces) <= 64
    other = {piece for d in random_documents(engine, 200, 3, seed=1) for piece in d.pieces}
    assert other.isdisjoint(piece for d in documents for piece in d.pieces)


def test_costs_are_what_they_are_called(engine):
    ticks = []
    measured, failed = measure(engine, METHODS, 200, 3, 3, progress=lambda: ticks.append(1))
    costs = {c.method: c for c in measured}
    assert len(ticks) == len(METHODS) * (3 * 3 + 1) and not failed
    entry = engine.backbone.kv_bytes_per_entry
    prefix = len(engine.template.prefix_ids())
    full, reuse, c2kv = costs["recompute"], costs["reuse"], costs["c2kv"]
    assert full.stored_bytes == full.loaded_bytes == 0 and full.speedup == 1
    assert reuse.loaded_bytes == 200 * entry
    files = {entry.key: entry.nbytes for entry in engine.libraries.store.entries()}
    kept = engine.extract(random_documents(engine, 200, 3), "reuse").segments
    assert reuse.stored_bytes == sum(files[segment.key] for segment in kept) > reuse.loaded_bytes
    assert c2kv.entries - prefix == c2kv.loaded_bytes / entry < 200 / 3
    assert costs["epic-2"].recomputed > 0 == reuse.recomputed
    for cost in costs.values():
        assert cost.ready.least <= cost.ready.median <= cost.ready.most
        assert cost.speedup == pytest.approx(full.ready.median / cost.ready.median)
        assert cost.decode_tokens_per_second > 0 and cost.question > 0
    assert reuse.cold.median > reuse.ready.median and reuse.break_even is not None
    for cost in measure(engine, METHODS, 200, 3, 1, cold=False)[0]:  # medians do not add up
        assert cost.load + cost.blend + cost.compose == pytest.approx(cost.ready.median)


def test_a_method_beside_itself_is_as_fast(engine, monkeypatch):
    def build(name, parameters, materials):
        return Recompute()

    monkeypatch.setitem(FAMILIES, "twin", Family("twin", "full recompute again", build))
    (_, twin), _ = measure(engine, ["recompute", "twin"], 1500, 2, 11, cold=False)
    assert twin.speedup == pytest.approx(1, abs=0.25) and twin.cold is None


def test_anchors_of_all_documents_together_are_measured_too(engine, monkeypatch):
    maker = Extractor.from_backbone(engine.backbone, 4, "anchor")
    other = Engine(engine.backbone, [engine.extractor, maker], engine.libraries.store)
    (full, joint), _ = measure(other, ["recompute", "anchor-joint"], 200, 3, 1)
    assert joint.entries < full.entries and joint.disk is not None


def test_every_point_begins_with_nothing_stored_and_memory_is_memory(engine):
    first, _ = measure(engine, METHODS, 200, 2, 1)
    second, _ = measure(engine, METHODS, 400, 2, 1)  # its documents would hold the first's
    assert all(cost.cold.median > 0 for cost in (*first, *second))
    engine.libraries.forget()
    small = Engine(
        engine.backbone, engine.extractor, engine.libraries.store, segment_tokens=64, memory_bytes=1
    )
    (full,), failed = measure(small, ["recompute", "reuse"], 300, 2, 1)
    assert full.method == "recompute" and "more --memory" in failed["reuse"]


def test_cold_requests_leave_nothing_in_the_store(engine):
    measure(engine, ["recompute", "reuse", "c2kv"], 200, 2, 2)
    kept = {entry.key for entry in engine.libraries.store.entries()}
    for method in ("reuse", "c2kv"):
        engine.forget()
        assert engine.prefill(random_documents(engine, 200, 2), method).from_disk
    # The warm-up's, and those measured: of reuse and of c2kv.
    assert len(kept) == 2 * 2 * len({p for d in random_documents(engine, 200, 2) for p in d.pieces})


def test_what_makes_no_comparison_is_refused(engine):
    with pytest.raises(ConfigError, match="add recompute"):
        measure(engine, ["reuse"], 100, 2)
    with pytest.raises(ConfigError, match="2 tokens make no 3 documents"):
        measure(engine, ["recompute"], 2, 3)
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_the_command(engine, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("c2kv.cli.bench.load_engine", lambda args: engine)
    command = ["bench", "--methods", "recompute,c2kv", "--tokens", "64,128", "--repeats", "1"]
    assert main([*command, "--out", str(tmp_path / "run"), "--counts", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("recompute") == 3 and "pays after" in shown  # the legend names it once
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [c["source_tokens"] for c in result["costs"]] == [64, 64, 128, 128]
    assert result["manifest"]["kind"] == "bench" and result["failed"] == []
    # Another run's results are never written over.
    assert main([*command, "--out", str(tmp_path / "run"), "--counts", "3"]) == 1
    assert "made with another counts" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result


def test_a_point_that_fails_loses_no_other(engine, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("c2kv.cli.bench.load_engine", lambda args: engine)
    monkeypatch.setattr(engine.backbone, "max_positions", 400)
    command = ["bench", "--methods", "recompute,c2kv", "--tokens", "64,512", "--repeats", "1"]
    out = tmp_path / "run"
    assert main([*command, "--no-cold", "--out", str(out), "--counts", "2"]) == 1
    assert "512 tokens in 2 documents" in capsys.readouterr().err
    result = json.loads((out / "summary.json").read_text())
    assert [c["source_tokens"] for c in result["costs"]] == [64, 64]
    first, second = result["failed"]
    assert (first["method"], second["method"]) == ("recompute", "c2kv")
    assert first["source_tokens"] == 512 and "400" in first["error"]
    (section,) = read_sections([out])
    assert f"FAILED: recompute failed with 512 tokens in 2 documents: {first['error']}" in (
        section.text
    )

    # Trying again loses nothing of it, whatever happens.
    def fail(*arguments):
        raise ConfigError("the disk is full")

    kept = [*result["costs"], {**result["costs"][0], "source_tokens": 512}]
    (out / "summary.json").write_text(json.dumps({**result, "costs": kept}))
    with monkeypatch.context() as patch:
        patch.setattr(latency, "measure", fail)
        assert main([*command, "--no-cold", "--out", str(out), "--counts", "2"]) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert json.loads((out / "summary.json").read_text())["costs"] == kept
    # What was measured stays; what failed is tried again.
    monkeypatch.setattr(engine.backbone, "max_positions", 4000)
    measured, points = latency.measure, []

    def measure(engine, methods, tokens, *rest):
        points.append(tokens)
        return measured(engine, methods, tokens, *rest)

    monkeypatch.setattr(latency, "measure", measure)
    assert main([*command, "--no-cold", "--out", str(out), "--counts", "2"]) == 0
    again = json.loads((out / "summary.json").read_text())
    assert points == [512] and again["costs"][:2] == result["costs"] and not again["failed"]
    assert [c["source_tokens"] for c in again["costs"]] == [64, 64, 512, 512]
    capsys.readouterr()
    assert main([*command, "--no-cold", "--out", str(out), "--counts", "2", "--json"]) == 0
    assert points == [512] and json.loads(capsys.readouterr().out) == again


def test_a_method_that_fails_takes_no_other_with_it(engine, monkeypatch):
    whole, turns = engine.prefill, []

    def prefill(documents, method):
        turns.append(method)
        if method == "reuse" and turns.count("reuse") > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        return whole(documents, method)

    monkeypatch.setattr(engine, "prefill", prefill)
    costs, failed = measure(engine, ["recompute", "reuse", "c2kv"], 200, 2, 2)
    assert failed == {"reuse": "CUDA out of memory."} and turns.count("reuse") == 4
    assert [cost.method for cost in costs] == ["recompute", "c2kv"] and costs[1].speedup > 0
    monkeypatch.setattr(
        engine, "prefill", lambda d, m: prefill(d, "reuse" if m == METHODS[0] else m)
    )
    costs, failed = measure(engine, ["recompute", "c2kv"], 200, 2, 1)
    assert list(failed) == ["recompute"] and [cost.speedup for cost in costs] == [None]


def test_preparing_pays_off_after_as_many_requests_as_it_takes(engine):
    (full, reuse), _ = measure(engine, ["recompute", "reuse"], 64, 2, repeats=1)
    ready, cold = Spread(1.0, 1.0, 1.0), Spread(9.0, 9.0, 9.0)
    cost = replace(reuse, ready=ready, cold=cold)
    # 8 seconds spent once, 4 saved by every request.
    assert latency._compared(cost, 5.0).break_even == 2.0
    assert latency._compared(cost, 5.0).speedup == 5.0
    assert latency._compared(cost, 0.5).break_even is None  # slower than what it replaces
    assert latency._compared(replace(cost, cold=None), 5.0).break_even is None
    assert full.speedup == 1.0


def test_peak_memory_is_what_was_held_at_most():
    pytest.importorskip("psutil")
    with peak_bytes(torch.device("cpu")) as peak:
        held = torch.ones(64 * 2**20)  # 256 MiB
        time.sleep(0.05)
        del held
        time.sleep(0.05)
    assert 250 * 2**20 < peak() < 400 * 2**20
    # Nor is memory overlooked that the allocator still has from earlier.
    torch.ones(4 * 2**20)  # from now on the allocator keeps blocks of up to 16 MiB
    blocks = [torch.ones(2**20) for _ in range(64)]  # 4 MiB each, freed but for the last
    last = blocks.pop()
    del blocks
    with peak_bytes(torch.device("cpu")) as peak:
        held = [torch.ones(2**20) for _ in range(16)]
        time.sleep(0.05)
    assert 60 * 2**20 < peak() < 120 * 2**20 and len(held) == 16 and last.sum() == 2**20
