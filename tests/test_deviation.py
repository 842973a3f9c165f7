"""KV deviation: zero where a method is exact, falling with what is recomputed."""

import json

import pytest

from c2kv.backbone import Backbone
from c2kv.cli.main import main
from c2kv.engine import Engine
from c2kv.errors import ConfigError
from c2kv.evaluation.deviation import SWEEP, deviations
from tiny import tiny_model

TEXTS = ("The mill was built in 1743, of stone.", "The ferry crosses at noon. " * 8)


@pytest.fixture
def engine(embedded_tokenizer):
    model = tiny_model("llama", vocab_size=len(embedded_tokenizer))
    return Engine(Backbone(model, embedded_tokenizer, "tiny"), None)


@pytest.mark.embedded
def test_deviation_is_nothing_when_exact_and_falls_with_recomputing(engine):
    documents = [engine.document(text, str(i)) for i, text in enumerate(TEXTS)]
    rows = {
        row.method: row for row in deviations(engine, documents, (*SWEEP, "epic-99", "recompute"))
    }
    assert rows["recompute"].deviation == 0 and rows["recompute"].recomputed == 1
    for exact in ("cacheblend-1.0", "epic-99"):
        assert rows[exact].deviation < 1e-5 and rows[exact].recomputed == 1
    assert rows["reuse"].recomputed == 0 < rows["reuse"].deviation
    for sweep in (SWEEP[1:8], SWEEP[8:]):
        values = [rows[name].deviation for name in sweep]
        assert values == sorted(values, reverse=True) and values[0] < rows["reuse"].deviation
    assert len(rows["reuse"].by_layer) == engine.backbone.num_layers
    assert rows["reuse"].by_layer[0] < 1e-5  # layer 0's KV depends on the token alone


@pytest.mark.embedded
def test_methods_with_fewer_entries_have_no_deviation(engine):
    documents = [engine.document(TEXTS[0])]
    with pytest.raises(ConfigError, match="naive-norm-4"):
        list(deviations(engine, documents, ["naive-norm-4"]))


@pytest.mark.embedded
def test_the_command(engine, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("c2kv.cli.deviation.load_engine", lambda args: engine)
    (tmp_path / "mill.txt").write_text(TEXTS[0])
    arguments = ["deviation", "--methods", "reuse,epic-2", str(tmp_path / "mill.txt")]
    assert main(arguments) == 0
    assert "epic-2" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in result["methods"]] == ["reuse", "epic-2"]
    out = ["--out", str(tmp_path / "run")]
    assert main([*arguments, *out]) == 0
    (tmp_path / "mill.txt").write_text(TEXTS[1])
    assert main([*arguments, *out]) == 1
    assert "made with another documents" in capsys.readouterr().err
    for ending, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        pytest.importorskip("matplotlib")
        path = tmp_path / f"figure.{ending}"
        assert main([*arguments, "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(start)
    with pytest.raises(SystemExit):
        main([*arguments, "--plot", "figure.pdf"])
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert kept["methods"] == result["methods"] and kept["manifest"]["kind"] == "deviation"
