"""Curves of training runs: training time alone, each step once, drawn side by side."""

import json

import pytest

from c2kv.cli.main import main
from c2kv.errors import DataError
from c2kv.training.curves import read_curve


def write(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def dev(step, gap):
    return {
        "step": step,
        "dev_gap": gap,
        "dev_nll_right": 3.0,
        "dev_nll_wrong": 3.0 + gap,
        "seconds": 500,
    }


def step(number, loss, seconds=60):
    return {"step": number, "loss": loss, "seconds": seconds}


@pytest.fixture
def run(tmp_path):
    """Interrupted after step 3, resumed from step 2."""
    rows = [
        {"source": "x", "records": 1},
        dev(0, 0.0),
        step(1, 5.0),
        step(2, 4.0),
        step(3, 9.0, 600),
    ]
    return write(tmp_path / "mine", [*rows, step(3, 3.0), step(4, 2.0), dev(4, 1.5)])


def test_evaluation_and_repeated_steps_take_no_time(run):
    curve = read_curve(run)
    assert curve.steps == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0)]
    assert [(minutes, at) for minutes, at, _ in curve.dev] == [(0, 0), (4, 4)]
    assert curve.dev[1][2]["dev_gap"] == 1.5


def test_the_command_prints_and_draws(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    other = write(tmp_path / "other", [dev(0, 0.1), step(1, 4.0)])
    path = tmp_path / "curves.svg"
    assert main(["curves", str(run), str(other), "--plot", str(path)]) == 0
    out = capsys.readouterr().out
    assert "mine" in out and "1.500" in out and "other" in out
    assert b"</svg>" in path.read_bytes()
    assert main(["curves", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "mine"


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(DataError, match="name a run's folder"):
        read_curve(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    with pytest.raises(DataError, match="damaged"):
        read_curve(tmp_path)
