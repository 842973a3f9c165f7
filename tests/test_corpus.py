"""Corpora: records come back as they were, made once, without what is held out."""

import json

import pytest

from c2kv.errors import DataError
from c2kv.prompt import PromptTemplate, render_document
from c2kv.training import corpus as module
from c2kv.training.corpus import Corpus, HeldOut
from c2kv.training.recipe import DataSource
from c2kv.training.records import read_records

pytestmark = pytest.mark.embedded

LONG = "The river rose. " * 40


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Corpora are made in a cache of the test's own."""
    monkeypatch.setattr(module, "cache_dir", lambda: tmp_path / "cache")


@pytest.fixture
def template(embedded_tokenizer):
    return PromptTemplate.of(embedded_tokenizer)


def record(number, documents, group, **more):
    return {
        "id": str(number),
        "dataset": "made",
        "split": "train",
        "documents": [{"title": title, "text": text} for title, text in documents],
        "question": f"Question {number}?",
        "answers": [f"answer {number}", "another"],
        "supporting": None,
        "group": group,
        "task": "qa",
        **more,
    }


@pytest.fixture
def file(tmp_path):
    """Two families, their questions interleaved, one passage shared; and a record without an
    answer."""
    one, two, both = ("A", "Alder grows here."), (None, LONG), ("C", "Chalk lies below.")
    records = [
        record(1, [one, both], "x", supporting=[1]),
        record(2, [two, both], "y"),
        record(3, [one, both], "x", supporting=[0, 1]),
        record(4, [one], "x", answers=[]),
    ]
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def of(file, template, tokens=64, held_out=None):
    return Corpus.of(DataSource(str(file)), template, tokens, held_out or HeldOut())


def test_records_come_back_as_they_were(file, template):
    corpus = of(file, template)
    assert (corpus.questions, corpus.families, corpus.bad, corpus.excluded) == (3, 2, 1, 0)
    (where,) = corpus.first_bad
    assert where.startswith(f"{file}:4: ")
    first, second = corpus.family(1), corpus.family(2)
    assert [corpus.at(i) for i in range(3)] == [(first, 0), (first, 1), (second, 0)]
    assert [q.question for q in first.questions] == ["Question 1?", "Question 3?"]
    assert [q.supporting for q in first.questions] == [(1,), (0, 1)]
    assert first.questions[1].answers == ("answer 3", "another")
    assert (first.origin, second.origin) == ("x", "y")
    assert second.questions[0].supporting is None
    assert first.passages[1] == second.passages[1]  # stored once
    records = list(read_records(file, on_bad=lambda _: None))
    for family, original in ((first, records[0]), (second, records[1])):
        for number, passage in zip(family.passages, original.documents, strict=True):
            stored = corpus.passage(number)
            content = render_document(passage.text, passage.title)
            pieces = template.document_pieces(content, 64)
            assert stored.text == passage.text
            assert stored.pieces == tuple(map(tuple, pieces))
    assert len(corpus.passage(second.passages[0]).pieces) > 2


def test_a_corpus_is_made_once_and_again_when_what_it_rests_on_changes(file, template, monkeypatch):
    path = of(file, template).path
    with monkeypatch.context() as patch:
        patch.setattr(module, "build", lambda *_: pytest.fail("made again"))
        assert of(file, template).path == path
    assert of(file, template, tokens=32).path != path
    file.write_text(file.read_text() + json.dumps(record(5, [("D", "Dew falls.")], "z")) + "\n")
    again = of(file, template)
    assert again.path != path and again.questions == 4


def test_what_is_held_out_is_left_out_and_counted(file, template, tmp_path):
    held = tmp_path / "held.jsonl"
    # What question 3 is answered from, under another question and title. (Question 1 has it as a
    # distractor.)
    held.write_text(json.dumps(record(9, [("Q", "Alder grows here.")], "q")) + "\n")
    corpus = of(file, template, held_out=HeldOut([DataSource(str(held))]))
    assert (corpus.questions, corpus.excluded) == (2, 1)
    held.write_text(json.dumps(record(9, [("Q", "Chalk lies below.")], "q")) + "\n")
    corpus = of(file, template, held_out=HeldOut([DataSource(str(held))]))
    assert (corpus.questions, corpus.excluded) == (0, 3)
    many = [("Q", "Quartz is hard."), ("C", "Chalk lies below.")]
    held.write_text(json.dumps(record(9, many, "q", supporting=[0])) + "\n")
    corpus = of(file, template, held_out=HeldOut([DataSource(str(held))]))
    assert (corpus.questions, corpus.excluded) == (3, 0)
    held.write_text(json.dumps(record(2, [("Q", "Nothing else.")], "q")) + "\n")
    corpus = of(file, template, held_out=HeldOut([DataSource(str(held))]))
    assert (corpus.questions, corpus.excluded) == (2, 1)


def test_a_failure_leaves_no_corpus_and_a_damaged_one_is_named(file, template, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "_pack", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            of(file, template)
    folder = module.cache_dir() / "corpora"
    assert not list(folder.iterdir())
    path = of(file, template).path
    path.write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match="remove it"):
        of(file, template)
