"""What the README promises: its Python example runs, and its commands exist."""

import re
import shlex
from pathlib import Path

import pytest

from c2kv.cli.main import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.embedded
def test_the_python_example_runs_and_is_short(tmp_path, monkeypatch, capsys, embedded):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 8
    monkeypatch.setattr("c2kv.engine.load_backbone", lambda *_, **__: embedded)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "untrained=False" in shown
    said = re.search(r"# (\w+) Report", code)
    assert said and shown.startswith(f"{said[1]} Report(method='c2kv'")
    assert list((tmp_path / "segments").rglob("*.safetensors"))


def test_every_command_shown_parses():
    blocks = "\n".join(README.split("```")[1::2])
    commands = re.findall(r"^c2kv (.*)", blocks, re.M)
    assert len(commands) >= 6
    for command in commands:
        build_parser().parse_args(shlex.split(command, comments=True))


def test_files_the_readme_points_to_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
