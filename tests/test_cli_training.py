"""c2kv train and c2kv eval, from recipe to scores, on a tiny model in a folder."""

import json

import pytest

from c2kv.cli.main import main
from c2kv.training.records import read_records
from test_training import cache, data  # noqa: F401
from tiny import tiny_model

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def model(embedded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", vocab_size=len(embedded.tokenizer)).save_pretrained(folder)
    embedded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(model, data, tmp_path):  # noqa: F811
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {model}\noutput: {tmp_path / 'run'}\ndata: [{{source: {data}}}]\n"
        "stages: [{steps: 1, mix: {reconstruct: 1}}, {steps: 2}]\n"
        "groups: 1\nquestions: 2\ndocuments: [1, 2]\npassages: 2\npassage_tokens: 8\n"
        "warmup_steps: 1\nvariant: residual\n"
    )
    return path


def test_a_dry_run_prints_the_plan_and_writes_nothing(recipe, tmp_path, capsys):
    assert main(["train", str(recipe), "--set", "ratio=8", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "ratio: 8" in out and "learning_rate: 5.0e-05" in out
    assert "of the backbone" in out and "3 of 1 groups" in out and "about" in out
    assert not (tmp_path / "run").exists()


def test_a_trained_extractor_answers_and_is_measured(
    recipe,
    data,  # noqa: F811
    model,
    tmp_path,
    capsys,
    monkeypatch,
):
    assert main(["train", str(recipe)]) == 0
    extractor = tmp_path / "run" / "extractor"
    assert str(extractor) in capsys.readouterr().out
    options = ["-m", str(model), "-x", str(extractor)]
    arguments = ["eval", "qa", *options, "-n", "3", "--per-question", "2", "--max-new-tokens", "4"]
    out = tmp_path / "scores"
    assert main([*arguments, "--out", str(out), "--json", str(data)]) == 0
    result = json.loads(capsys.readouterr().out)
    described = result["manifest"]
    assert described["untrained"] == ["random"] and result["sets"]["train"] == result["mean"]
    assert set(described["extractors"]) == {"c2kv", "wrongdoc", "budget", "shuffled", "random"}
    assert described["extractors"]["wrongdoc"]["trained_on"] == ["train"]
    assert described["extractors"]["random"]["trained_on"] == []
    assert json.loads((out / "manifest.json").read_text()) == described
    assert not (tmp_path / "store").exists()
    assert set(result["mean"]) >= {"recompute", "c2kv", "wrongdoc", "budget"}
    assert len((out / "train.jsonl").read_text().splitlines()) == 3 * 8
    assert json.loads((out / "summary.json").read_text()) == result
    # An interrupted run goes on: what is there is kept, half a batch is answered again.
    lines = (out / "train.jsonl").read_text().splitlines(keepends=True)
    first = json.loads(lines[0])["id"]
    mine = [line for line in lines if json.loads(line)["id"] == first]
    torn = (lines[2][:20] + "é").encode()[:-1]  # within a character
    (out / "train.jsonl").write_bytes(("".join(mine) + lines[1]).encode() + torn)
    assert main([*arguments, "--out", str(out), "--json", str(data)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["mean"]["c2kv"]["f1"] == result["mean"]["c2kv"]["f1"]
    assert again["mean"]["c2kv"]["nll"] == pytest.approx(result["mean"]["c2kv"]["nll"], abs=1e-3)
    resumed = (out / "train.jsonl").read_text().splitlines(keepends=True)
    assert resumed[: len(mine)] == mine and len(resumed) == 3 * 8
    assert main([*arguments, "--seed", "5", "--out", str(out), str(data)]) == 1
    assert "made with another seed" in capsys.readouterr().err
    assert main([*arguments, "--conditions", "recompute,c2kv", str(data)]) == 0
    table = capsys.readouterr().out
    asked = []
    records = list(read_records(data))
    monkeypatch.setattr(
        "c2kv.training.records.read_records",
        lambda source, split: asked.append((source, split)) or records,
    )
    few = [*arguments, "--conditions", "recompute", "--json", "hub:someone/questions"]
    few += ["--split", "validation"]
    assert main(few) == 0 and asked == [("hub:someone/questions", "validation")]
    hub = json.loads(capsys.readouterr().out)
    assert hub["sets"]["questions"]["recompute"] == result["sets"]["train"]["recompute"]
    assert len(hub["manifest"]["data"]["hub:someone/questions (validation)"]) == 64
    assert "mean of the sets" in table and "recompute" in table and "wrongdoc" not in table


def test_errors_are_one_line(recipe, tmp_path, capsys):
    for arguments, says in (
        (["--set", "data=[{source: gone.jsonl}]"], "gone.jsonl"),
        (["--set", "model=./nowhere"], "./nowhere"),
        (["--set", "ratio=99"], "ratio 99"),
    ):
        assert main(["train", str(recipe), *arguments]) == 1
        err = capsys.readouterr().err
        assert says in err and err.startswith("c2kv: error:") and err.count("\n") == 1
