"""Probes: a string stands where it should, and is found only to the letter."""

import json
from pathlib import Path

import pytest

from c2kv.backbone import Backbone
from c2kv.cli.main import build_parser, main
from c2kv.engine import Engine
from c2kv.errors import ConfigError, DocumentError
from c2kv.evaluation.probes import found, make_probes, tabulate
from c2kv.extractor import Extractor
from tiny import tiny_model

ROOT = Path(__file__).parent.parent
TEXTS = [" ".join(f"{word}{i}" for i in range(200)) for word in ("ash", "birch", "cedar", "elm")]


@pytest.fixture(scope="module")
def engine(embedded_tokenizer):
    backbone = Backbone(
        tiny_model("llama", vocab_size=len(embedded_tokenizer)), embedded_tokenizer, "tiny"
    )
    return Engine(backbone, Extractor.from_backbone(backbone, 4))


@pytest.mark.embedded
def test_strings_stand_where_they_should(engine):
    probes = make_probes(engine, TEXTS, each=2, ratio=4)
    assert len(probes) == 3 * 2 * 2 * 2 and len({p.case.id for p in probes}) == 24
    decode = engine.backbone.tokenizer.decode
    for probe in probes:
        texts = [decode(d.pieces[0]) for d in probe.case.documents]
        (at,) = [i for i, text in enumerate(texts) if probe.expected in text]
        assert at == (0 if probe.place == "early document" else 3)
        assert all(probe.expected not in decode(d.pieces[0]) for d in probe.case.wrong)
        ids = probe.case.documents[at].pieces[0]
        end = next(
            i for i in range(1, len(ids) + 1) if probe.expected in decode(ids[:i])
        )  # tokens up to the string's last
        assert (end % 4 == 0) == (probe.end == "block end")
    again = make_probes(engine, TEXTS, each=2, ratio=4)
    assert [p.case for p in again] == [p.case for p in probes]
    whole = make_probes(engine, TEXTS, each=2, ratio=1)  # no blocks, no ends of blocks
    assert len(whole) == 12 and {p.end for p in whole} == {None}
    row = {"id": whole[0].case.id, "condition": "reuse", "prediction": ""}
    assert set(tabulate(whole, [row])["reuse"]) == {"all", "code", "early document"}
    with pytest.raises(ConfigError, match="2 texts make no 4"):
        make_probes(engine, TEXTS[:2], 1, 4)


@pytest.mark.embedded
def test_scores_are_shares_found_to_the_letter(engine):
    assert found("It is abc-1234.", "ABC-1234") == 1 and found("ABC 1234", "ABC-1234") == 0
    probes = make_probes(engine, TEXTS, each=1, ratio=4)
    rows = [
        {"id": p.case.id, "condition": "c2kv", "prediction": p.expected if p.kind == "code" else ""}
        for p in probes
    ]
    scores = tabulate(probes, rows)["c2kv"]
    assert scores["code"] == 100 and scores["name"] == 0
    assert scores["all"] == pytest.approx(100 / 3) == scores["block end"]


@pytest.mark.embedded
def test_the_command(engine, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("c2kv.cli.probes.load_engine", lambda args: engine)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    command = ["eval", "probes", "-n", "1", "--conditions", "recompute,c2kv", str(tmp_path)]
    assert main(command) == 0
    assert "block end" in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["found"]) == {"recompute", "c2kv"} and result["failed"] == {}
    # A run goes on where it was; what fails is named, and in no score.
    samples = (tmp_path / "run" / "probes.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "probes.jsonl").write_text("".join(samples[:5]))
    prefill, asked = engine.prefill, []

    def some(documents, method):
        asked.append(method)
        if method == "recompute":
            raise DocumentError("of no use")
        return prefill(documents, method)

    monkeypatch.setattr(engine, "prefill", some)
    assert main([*command, "--out", str(tmp_path / "run"), "--json"]) == 1
    captured = capsys.readouterr()
    done = len({json.loads(line)["id"] for line in samples[:5]} & _whole(samples[:5]))
    assert json.loads(captured.out)["failed"] == {"recompute": 12 - done}
    assert asked.count("c2kv") == 12 - done and f"{12 - done} samples failed" in captured.err


def _whole(lines):
    """Ids of the cases that have both conditions' samples."""
    ids = [json.loads(line)["id"] for line in lines]
    return {name for name in ids if ids.count(name) == 2}


def test_options_come_from_a_config_and_those_after_it_win(tmp_path):
    for path in sorted((ROOT / "recipes/eval").glob("*.yaml")):
        arguments = ["eval", "longbench", "--config", str(path), "-n", "3"]
        args = build_parser().parse_args(arguments)
        assert args.methods[0].name == "recompute" and args.limit == 3 and args.device == "cuda"
        assert args.segment_tokens == 1024 and "qmsum" in args.tasks
        args = build_parser().parse_args([*arguments, "--methods", "reuse"])
        assert [condition.name for condition in args.methods] == ["reuse"]
    assert path.name == "qwen3-4b-instruct-2507.yaml"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("metods: [reuse]", "'metods' is unknown"),
        ("methods: [magic]", "method 'magic' is unknown"),
        ("limit: 0", "not a whole number"),
        ("[1]", "no options"),
        ("a: [", "cannot read config"),
    ],
)
def test_wrong_configs_are_named(tmp_path, capsys, text, says):
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        build_parser().parse_args(["eval", "longbench", "--config", str(path)])
    assert says in capsys.readouterr().err


def test_a_config_may_name_several_extractors(tmp_path):
    path = tmp_path / "eval.yaml"
    path.write_text("extractor: [one, two]\n")
    args = build_parser().parse_args(["eval", "longbench", "--config", str(path)])
    assert args.extractor == ["one", "two"]
    given = ["eval", "longbench", "--config", str(path), "-x", "three", "-x", "four"]
    assert build_parser().parse_args(given).extractor == ["three", "four"]  # what is given wins
    path.write_text("extractor: one\n")
    args = build_parser().parse_args(["eval", "longbench", "--config", str(path)])
    assert args.extractor == ["one"]
