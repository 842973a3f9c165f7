"""Evaluation: official scores on fixed strings; conditions that differ as they should."""

from dataclasses import replace

import pytest
import torch

from c2kv.engine import Engine
from c2kv.errors import ConfigError
from c2kv.evaluation import qa
from c2kv.evaluation.conditions import CONTROLS, DEFAULT, Condition
from c2kv.evaluation.controls import controlled
from c2kv.evaluation.metrics import f1, normalize
from c2kv.evaluation.qa import evaluate, make_cases, summarize
from c2kv.extractor import Extractor
from c2kv.training.records import Passage, Record


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("The Cat!", ["cat"], 1.0),
        ("a cat sat", ["the cat"], 2 / 3),
        ("cat cat", ["cat"], 2 / 3),
        ("dog", ["cat", "dog"], 1.0),
        ("", ["cat"], 0.0),
        ("theatre", ["the atre"], 0.0),
        ("1,234", ["1234"], 1.0),
        ("yes, it is", ["yes"], 0.5),
    ],
)
def test_f1_is_the_official_one(prediction, answers, score):
    assert f1(prediction, answers) == pytest.approx(score)


def test_normalization():
    assert normalize("  An  Apple-pie, the  END. ") == "applepie end"


RECORDS = [
    Record(
        id=place,
        dataset="mills",
        documents=(Passage(place, f"The mill at {place} was built in {1700 + number}."),),
        question=f"In which year was the mill at {place} built?",
        answers=(str(1700 + number),),
        supporting=(0,),
        group=place,
        task="qa",
    )
    for number, place in enumerate(("Aldwick", "Brone", "Carrow", "Delph", "Eastmere", "Farley"))
]


@pytest.fixture(scope="module")
def engine(embedded):
    return Engine(embedded, Extractor.from_backbone(embedded))


def rows_of(*given, **options):
    return [row for rows in evaluate(*given, **options) for row in rows]


EVERY = [Condition.of(name) for name in (*DEFAULT, "wrongdoc:recompute")]


@pytest.mark.embedded
def test_conditions_differ_as_they_should(engine):
    cases = make_cases(engine, RECORDS, limit=3, documents=2, seed=2)
    assert all(len(c.documents) == 2 for c in cases)
    for case in cases:
        own = {d.pieces for d in case.documents}
        assert own.isdisjoint(d.pieces for d in case.wrong)
    rows = rows_of(engine, cases, EVERY, max_new_tokens=20, batch=2)
    assert len(rows) == 3 * len(EVERY)
    summary = summarize(rows)
    assert summary["recompute"]["f1"] > 5 > summary["noctx"]["f1"]
    assert summary["recompute"]["nll"] < summary["noctx"]["nll"]
    assert summary["recompute"]["entries"] == summary["reuse"]["entries"]
    assert summary["c2kv"]["entries"] == summary["budget"]["entries"]
    assert summary["noctx"]["entries"] < summary["c2kv"]["entries"]
    assert summary["wrongdoc:recompute"]["nll"] > summary["recompute"]["nll"] + 0.3
    assert "kl" not in summary["recompute"]
    assert 0 < summary["reuse"]["kl"] < summary["noctx"]["kl"]
    assert summary["reuse"]["top1"] > summary["noctx"]["top1"]


@pytest.mark.embedded
def test_records_that_bring_their_own_distractors_keep_them(engine):
    passages = tuple(r.documents[0] for r in RECORDS[:3])
    records = [replace(RECORDS[0], documents=passages, supporting=(1,)), *RECORDS[3:]]
    cases = make_cases(engine, records, limit=4, documents=2)
    (case,) = [c for c in cases if c.id == "Aldwick"]
    named = {d.name for d in case.documents}
    assert len(named) == 2 and "Brone" in named and named < {"Aldwick", "Brone", "Carrow"}
    assert not {d.name for d in case.wrong} & {"Aldwick", "Brone", "Carrow"}


@pytest.mark.embedded
def test_scores_do_not_depend_on_the_batch(engine):
    cases = make_cases(engine, RECORDS, limit=3, documents=2)
    chosen = [Condition.of("recompute"), Condition.of("c2kv")]
    one, three = (
        sorted(
            rows_of(engine, cases, chosen, max_new_tokens=8, batch=batch),
            key=lambda row: (row["id"], row["condition"]),
        )
        for batch in (1, 3)
    )
    for a, b in zip(one, three, strict=True):
        assert a["prediction"] == b["prediction"] and a["id"] == b["id"]
        assert a["nll"] == pytest.approx(b["nll"], abs=1e-3)


@pytest.mark.embedded
def test_a_case_that_does_not_fit_fails_alone(engine, monkeypatch):
    cases = make_cases(engine, RECORDS, limit=3, documents=2)
    long = engine.document("word " * 300)
    cases[1] = replace(cases[1], documents=(long, long))
    monkeypatch.setattr(engine.backbone, "max_positions", 400)
    chosen = [Condition.of("recompute"), Condition.of("reuse")]
    (rows,) = evaluate(engine, cases, chosen, max_new_tokens=4)
    failed = [row for row in rows if "error" in row]
    assert {row["id"] for row in failed} == {cases[1].id} and len(failed) == 2
    assert "400" in failed[0]["error"]
    summary = summarize(rows)
    assert summary["reuse"]["scored"] == 2 and summary["reuse"]["failed"] == 1
    assert all("kl" in row for row in rows if row["condition"] == "reuse" and "error" not in row)
    # One that recompute could not answer has no reference; the others keep theirs.
    chosen = [Condition.of("recompute"), Condition.of("noctx")]
    (rows,) = evaluate(engine, cases, chosen, max_new_tokens=4)
    with_kl = {row["id"] for row in rows if "kl" in row}
    assert with_kl == {cases[0].id, cases[2].id}


@pytest.mark.embedded
def test_repeated_ids_are_told_apart(engine):
    records = [*RECORDS[:3], replace(RECORDS[3], id="Brone")]
    cases = make_cases(engine, records, limit=4, documents=1)
    assert sorted(c.id for c in cases) == ["Aldwick", "Brone", "Brone#2", "Carrow"]


@pytest.mark.embedded
def test_the_budget_is_whole_messages_of_as_many_tokens(engine):
    text = "The mill stands by the river. " * 12
    documents = [engine.document(text), engine.document("Hay.")]
    cut, method = controlled(engine, Condition.of("budget"), documents, ())
    assert method == "recompute"
    closing = tuple(engine.template.closing_ids())
    assert closing and documents[0].pieces[0][-len(closing) :] == closing
    for document, whole in zip(cut, documents, strict=True):
        assert document.tokens == -(-whole.tokens // 4)
    long = cut[0].pieces[0]
    assert long[-len(closing) :] == closing
    assert long[: -len(closing)] == documents[0].pieces[0][: len(long) - len(closing)]
    # Of a hybrid: the documents it keeps whole stay whole.
    mixed, _ = controlled(engine, Condition.of("budget:hybrid-1"), [documents[1], *documents], ())
    assert mixed == [documents[1], *cut]
    mixed, _ = controlled(engine, Condition.of("budget:hybrid-at-2"), documents, ())
    assert mixed == [cut[0], documents[1]]


@pytest.mark.embedded
def test_gold_documents_are_never_left_out(engine):
    passages = tuple(r.documents[0] for r in RECORDS[:2])
    records = [replace(RECORDS[0], documents=passages, supporting=None), *RECORDS[2:]]
    (case,) = [c for c in make_cases(engine, records, 5, documents=1) if c.id == "Aldwick"]
    assert {d.name for d in case.documents} == {"Aldwick", "Brone"}


def test_conditions_are_methods_or_controls_of_them():
    assert Condition.of("epic-32") == Condition("epic-32", None, "epic-32")
    assert Condition.of("wrongdoc").method == "c2kv"
    assert Condition.of("wrongdoc:reuse") == Condition("wrongdoc:reuse", "wrongdoc", "reuse")
    for name in ("magic", "wrongdoc:magic", "magic:reuse"):
        with pytest.raises(ConfigError, match="magic"):
            Condition.of(name)
    assert all(Condition.of(name).control == name for name in CONTROLS)


@pytest.mark.embedded
def test_what_memory_does_not_hold_is_answered_in_halves_or_fails(engine, monkeypatch):
    cases = make_cases(engine, RECORDS, limit=2, documents=2)
    answer = qa.decode

    def full(compositions, *rest):
        if compositions[0].entries > 60:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        return answer(compositions, *rest)

    monkeypatch.setattr(qa, "decode", full)
    chosen = [Condition.of("recompute"), Condition.of("noctx")]
    (rows,) = evaluate(engine, cases, chosen, max_new_tokens=4)
    failed = [row for row in rows if "error" in row]
    assert [row["condition"] for row in failed] == ["recompute"] * 2
    assert {row["error"] for row in failed} == {"CUDA out of memory."}
    assert all("f1" in row for row in rows if row["condition"] == "noctx")

    def small(compositions, *rest):
        if len(compositions) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return answer(compositions, *rest)

    monkeypatch.setattr(qa, "decode", answer)
    (whole,) = evaluate(engine, cases, chosen, max_new_tokens=4)
    monkeypatch.setattr(qa, "decode", small)
    (rows,) = evaluate(engine, cases, chosen, max_new_tokens=4)
    kept = ("id", "condition", "prediction", "f1")
    assert [[row[n] for n in kept] for row in rows] == [[row[n] for n in kept] for row in whole]
    assert {row["batch"] for row in rows} == {1} and {row["batch"] for row in whole} == {2}


@pytest.mark.embedded
def test_documents_are_made_before_they_are_asked_about(engine):
    """Methods of one library cost alike, whoever came first."""
    engine.forget()
    cases = make_cases(engine, RECORDS, limit=1, documents=2)
    conditions = [Condition.of(name) for name in ("reuse", "epic-2")]
    (rows,) = evaluate(engine, cases, conditions, max_new_tokens=2)
    assert [row["cost"]["extracted"] for row in rows] == [0, 0]
    assert [row["cost"]["from_memory"] for row in rows] == [2, 2]
    assert rows[0]["cost"]["extract"] > 0
