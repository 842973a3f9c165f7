"""The extractors in the box: whole, within bounds, found by backbone, ratio and variant."""

import json
from pathlib import Path

import pytest
import torch

from c2kv.engine import Engine
from c2kv.errors import ConfigError, MissingExtractorError
from c2kv.evaluation.conditions import Condition
from c2kv.evaluation.qa import Case, evaluate, summarize
from c2kv.extractor import Extractor, ExtractorConfig, box
from c2kv.models import EMBEDDED_DIGEST
from conftest import backbone_of, noisy_extractor

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def boxed(tmp_path, monkeypatch):
    """A box of three extractors for one backbone, and the engine loader of that backbone."""
    backbone = backbone_of("llama")
    for name, ratio, variant, ratios in (
        ("first", 4, "residual", ()),
        ("plain", 4, "plain", ()),
        ("many", 4, "residual", (2, 4, 8)),
    ):
        extractor = noisy_extractor(backbone, ratio=ratio, variant=variant)
        values = {**extractor.config.__dict__, "ratios": ratios}
        extractor.config = ExtractorConfig(**values)
        extractor.save_pretrained(tmp_path / name, steps=3)
    monkeypatch.setattr(box, "FOLDER", tmp_path)
    monkeypatch.setattr(box, "NAMES", ("first", "plain", "many"))
    return backbone


def found(backbone, *asked):
    folder = box.find(backbone.digest, *asked)
    return folder and folder.name


def test_the_first_that_fits_is_found(boxed):
    assert found(boxed) == "first"
    assert found(boxed, None, "plain") == "plain"
    assert found(boxed, 8) == "many" and found(boxed, 4) == "first"
    assert found(boxed, 8, "plain") is None and found(backbone_of("qwen3")) is None


@pytest.fixture
def load(embedded, monkeypatch):
    monkeypatch.setattr("c2kv.engine.load_backbone", lambda *_, **__: embedded)
    return lambda *args, **kwargs: Engine.load("smollm2-135m", *args, **kwargs)


@pytest.mark.embedded
def test_without_one_that_fits_methods_of_extractors_say_what_to_do(load, monkeypatch):
    monkeypatch.setattr(box, "NAMES", ())
    engine = load()
    assert engine.extractor is None
    with pytest.raises(MissingExtractorError, match="--untrained"):
        engine.ask("Why?", [engine.document("It was late.")])
    with pytest.raises(MissingExtractorError, match="ratio 8 and plain"):
        load(ratio=8, variant="plain")


@pytest.mark.embedded
def test_an_extractor_is_used_only_as_it_was_trained(load, tmp_path, embedded):
    Extractor.from_backbone(embedded, 4).save_pretrained(tmp_path / "x", steps=1)
    assert load(tmp_path / "x", ratio=4, variant="plain").library.maker.ratio == 4
    with pytest.raises(ConfigError, match="trained for ratio 4, not 8"):
        load(tmp_path / "x", ratio=8)
    with pytest.raises(ConfigError, match="is plain, not residual"):
        load(tmp_path / "x", variant="residual")
    with pytest.raises(ConfigError, match="choose one"):
        load(tmp_path / "x", untrained=True)


@pytest.mark.embedded
def test_methods_find_the_variant_they_name_among_several(embedded):
    """The first of several serves methods that name none."""
    made = [Extractor.from_backbone(embedded, 4, v) for v in ("residual", "plain", "plain")]
    with torch.no_grad():
        made[2].embedding.add_(1)
    engine = Engine(embedded, made)
    makers = {n: engine.method(n).maker for n in ("c2kv", "c2kv-residual", "c2kv-plain", "random")}
    assert engine.extractor is made[0] and makers["c2kv"] is makers["c2kv-residual"]
    assert makers["c2kv"].digest == made[0].digest
    assert makers["c2kv-plain"].digest == made[1].digest not in (made[0].digest, made[2].digest)
    assert makers["random"].variant == "residual"
    with pytest.raises(MissingExtractorError, match="anchor"):
        engine.method("anchor")


@pytest.mark.embedded
def test_several_are_loaded_in_order(load, tmp_path, embedded):
    for variant in ("plain", "residual"):
        Extractor.from_backbone(embedded, 4, variant).save_pretrained(tmp_path / variant, steps=1)
    engine = load([tmp_path / "residual", str(tmp_path / "plain")])
    assert engine.extractor.config.variant == "residual"
    assert engine.method("c2kv-plain").maker.variant == "plain"


def test_one_for_several_ratios_takes_each_of_them(boxed):
    extractor = Extractor.from_pretrained("many", boxed)
    for ratio in (2, 4, 8):
        extractor.use_ratio(ratio)
        assert extractor.config.ratio == ratio
    with pytest.raises(ConfigError, match="2, 4, 8, not 16"):
        extractor.use_ratio(16)
    with pytest.raises(ConfigError, match="ratio 3 is not among"):
        ExtractorConfig(**{**extractor.config.__dict__, "ratio": 3})
    with pytest.raises(ConfigError, match="trained_on"):
        ExtractorConfig(**{**extractor.config.__dict__, "trained_on": (3,)})


@pytest.mark.parametrize("name", box.NAMES)
def test_what_is_in_the_box_is_whole(name):
    folder = box.box()[name]
    extractor = Extractor.from_pretrained(name)  # its digest is checked here
    assert extractor.trained and extractor.config.backbone_digest == EMBEDDED_DIGEST
    learnt = set(extractor.config.trained_on)
    assert "squad" in learnt and learnt.isdisjoint({"2wikimultihopqa", "qmsum", "clapnq"})
    weights = folder / "extractor.safetensors"
    assert weights.stat().st_size <= 40e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    for section in ("## Data", "## Training", "## Results", "## Limits"):
        assert section in card, section


@pytest.mark.embedded
@pytest.mark.parametrize("name", box.NAMES)
def test_what_is_in_the_box_reads(name, embedded):
    """Answers cost clearly less with the documents that hold them than with others."""
    engine = Engine(embedded, Extractor.from_pretrained(name, embedded))
    texts = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*/*.txt")}
    documents = {file: engine.document(text, file) for file, text in texts.items()}
    lines = (EXAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()[::3]
    cases = []
    for asked in map(json.loads, lines):
        holding = tuple(documents[file] for file in asked["documents"])
        others = [documents[file] for file in documents if file not in asked["documents"]]
        question, answers = asked["question"], tuple(asked["answers"])
        wrong = tuple(others[len(cases) % 4 :][: len(holding)])
        cases.append(Case(asked["id"], holding, wrong, question, answers))
    conditions = [Condition.of("c2kv"), Condition.of("wrongdoc")]
    rows = [r for some in evaluate(engine, cases, conditions, 1, batch=7) for r in some]
    scores = summarize(rows)
    assert scores["c2kv"]["scored"] == scores["wrongdoc"]["scored"] == len(lines)
    assert scores["wrongdoc"]["nll"] - scores["c2kv"]["nll"] > 0.5


def test_the_box_holds_what_it_lists():
    assert sorted(box.NAMES) == sorted(p.name for p in box.FOLDER.glob("*/"))
