"""Reading data sets: every official and hub layout, and every bad record named."""

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from c2kv.cli import data
from c2kv.errors import DataError, MissingPackageError
from c2kv.training import records
from c2kv.training.formats import split_question
from c2kv.training.records import Passage, detect_format, read_records

FIXTURES = Path(__file__).parent / "fixtures"
FORMAT_OF = {
    "generic.jsonl": "generic",
    "hotpotqa.json": "hotpotqa",
    "2wikimultihopqa.json": "2wikimultihopqa",
    "musique.jsonl": "musique",
    "squad-1.1.json": "squad",
    "squad-2.0.json": "squad",
    "longmagpie.jsonl": "longmagpie",
}
GENERIC = {
    "id": "a",
    "documents": [{"title": None, "text": "T"}],
    "question": "Q",
    "answers": ["A"],
}


def read(source, *args):
    """(records, [(line, reason) of each bad one])."""
    bad = []
    found = list(read_records(source, *args, on_bad=bad.append))
    return found, [(b.line, b.reason) for b in bad]


def write_lines(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


# --- formats ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMAT_OF)
def test_the_format_is_detected_from_the_content(name, tmp_path):
    assert detect_format(FIXTURES / name) == FORMAT_OF[name]
    renamed = tmp_path / "data"
    renamed.write_bytes((FIXTURES / name).read_bytes())
    assert read(renamed) == read(FIXTURES / name) == read(FIXTURES / name, FORMAT_OF[name])


def test_hotpotqa():
    (bridge, comparison), bad = read(FIXTURES / "hotpotqa.json")
    assert not bad
    assert bridge.id == bridge.group == "5a8b57f25542995d1e6f1371"
    assert (bridge.dataset, bridge.task, bridge.answers) == ("hotpotqa", "qa", ("Teal",))
    assert bridge.question.startswith("What is the name of the ferry")
    # The empty paragraph is left out; sentences keep their own spaces.
    assert [p.title for p in bridge.documents] == ["Aldwick Mill", "Joan Farr", "Orley"]
    assert bridge.documents[0].text == (
        "Aldwick Mill is a watermill on the river Sorn. It was built in 1743."
    )
    assert bridge.supporting == (1, 2) and comparison.supporting == (0, 1)


def test_2wikimultihopqa_joins_sentences_with_spaces():
    (record,), bad = read(FIXTURES / "2wikimultihopqa.json")
    assert not bad and record.dataset == "2wikimultihopqa" and record.supporting == (0, 1)
    assert record.documents[0] == Passage(
        "The Quiet Sluice", "The Quiet Sluice is a 1931 silent film. It was directed by Edda Marsh."
    )


@pytest.mark.parametrize("sentences", ["sentences", "content", "rows", "text"])
@pytest.mark.parametrize("name", ["hotpotqa", "2wikimultihopqa"])
def test_hub_layouts_give_the_same_records(name, sentences, tmp_path):
    """Columns (hotpotqa/hotpot_qa), `content` columns, a list of objects, JSON as text."""
    official = json.loads((FIXTURES / f"{name}.json").read_text())
    rows = []
    for row in official:
        row["id"] = row.pop("_id")
        if sentences == "text":
            row |= {k: json.dumps(row[k]) for k in ("context", "supporting_facts")}
            row["evidences"] = "[]"  # only copies of 2WikiMultiHopQA hold JSON as text
        elif sentences == "rows":
            row["context"] = [{"title": t, "sentences": s} for t, s in row["context"]]
        else:
            titles, texts = zip(*row["context"], strict=True)
            row["context"] = {"title": list(titles), sentences: list(texts)}
            titles, numbers = zip(*row["supporting_facts"], strict=True)
            row["supporting_facts"] = {"title": list(titles), "sent_id": list(numbers)}
        rows.append(row)
    path = write_lines(tmp_path / "hub.jsonl", *rows)
    assert read(path, name) == read(FIXTURES / f"{name}.json")
    if sentences != "text":
        assert detect_format(path) == name


def test_gold_paragraphs_left_out_leave_supporting_unknown(tmp_path):
    row = json.loads((FIXTURES / "hotpotqa.json").read_text())[0]
    del row["context"][1]
    (record,), bad = read(write_lines(tmp_path / "fullwiki.jsonl", row))
    assert record.supporting is None and not bad


def test_musique_and_its_unanswerable_half():
    (record,), bad = read(FIXTURES / "musique.jsonl")
    assert bad == [(2, "unanswerable")]
    assert record.answers == ("Ines Bole", "I. Bole")  # the alias that repeats it is gone
    assert record.supporting == (1, 2) and record.group == "2hop__1_2"
    assert record.documents[0] == Passage("Sorn", "The Sorn is a river of 40 km.")


def test_squad_1():
    found, bad = read(FIXTURES / "squad-1.1.json")
    assert not bad and [r.answers[0] for r in found] == ["1743", "Joan Farr", "1802", "900"]
    assert found[0].answers == ("1743", "in 1743") and found[0].supporting == (0,)
    assert found[0].documents[0].title == "Aldwick Mill"
    assert [r.group for r in found] == ["Aldwick_Mill"] * 3 + ["Orley"]


def test_squad_2_reports_impossible_questions_by_number():
    found, bad = read(FIXTURES / "squad-2.0.json")
    assert [r.id for r in found] == ["5a1", "5a3"] and bad == [(2, "unanswerable")]


def test_squad_hub_layout(tmp_path):
    row = {"id": "1", "title": "Orley", "context": "Orley has 900 inhabitants."}
    row |= {"question": "How many?", "answers": {"text": ["900"], "answer_start": [10]}}
    none = {**row, "answers": {"text": [], "answer_start": []}}
    path = write_lines(tmp_path / "hub.jsonl", row, none)
    (record,), bad = read(path)
    assert detect_format(path) == "squad" and record.answers == ("900",)
    assert bad == [(2, "unanswerable")]


def test_longmagpie():
    (two, one), bad = read(FIXTURES / "longmagpie.jsonl")
    assert not bad
    assert [p.text for p in two.documents] == [
        "Salt pans are shallow ponds.\n\nSun and wind dry them.",
        "Mills turned grain into flour. The mill at Aldwick dates from 1743.",
    ]
    assert two.question == "How old is the mill at Aldwick, and what did Dr. Farr find in it?"
    assert two.answers == ("It was built in 1743. The text does not mention Dr. Farr.",)
    assert two.supporting is None and two.id.startswith("longmagpie-")
    assert one.documents == (Passage(None, "Teals are small ducks.\nThey winter in Orley."),)
    assert one.question == "Where do teals spend the winter?"


def test_longmagpie_other_layouts(tmp_path):
    """Bare lists (its own script's output), the single-document set, ShareGPT's names."""
    rows = [json.loads(line) for line in (FIXTURES / "longmagpie.jsonl").open()]
    expected = read(FIXTURES / "longmagpie.jsonl")
    assert read(write_lines(tmp_path / "bare.jsonl", *(r["messages"] for r in rows))) == expected
    names = {"user": "human", "assistant": "gpt"}
    turns = [
        [{"from": names[m["role"]], "value": m["content"]} for m in r["messages"]] for r in rows
    ]
    shared = [{"conversations": [{"from": "system", "value": "Hi."}, *t]} for t in turns]
    assert read(write_lines(tmp_path / "share.jsonl", *shared)) == expected
    single = {"context": "Teals are small ducks.\nThey winter in Orley."}
    single |= {"query": "Where do teals spend the winter?", "answer": "In Orley."}
    (record,), bad = read(write_lines(tmp_path / "single.jsonl", single))
    assert record == expected[0][1] and not bad


@pytest.mark.parametrize(
    ("text", "document", "question"),
    [
        ("It closed in 1802.Why did it close?", "It closed in 1802.", "Why did it close?"),
        ("It rains. Often.Is it? By how much?", "It rains. Often.", "Is it? By how much?"),
        ("She said “no.”Who did? Say why?", "She said “no.”", "Who did? Say why?"),
        ("See the list belowWhich item is last?", "See the list below", "Which item is last?"),
        (
            "It grew fast.How did it use LinkedIn to hire?",
            "It grew fast.",
            "How did it use LinkedIn to hire?",
        ),
        ("It lists all.Which KPIs does it list?", "It lists all.", "Which KPIs does it list?"),
        ("It is old. When was it built?", "It is old.", "When was it built?"),
        ("A mill.\n\nUser: What is it?", "A mill.", "What is it?"),
        ("Intro. More.\nWho is Mr. Bole?", "Intro. More.", "Who is Mr. Bole?"),
        ("What is this?", "", "What is this?"),
    ],
)
def test_the_question_is_cut_from_the_last_document(text, document, question):
    assert split_question(text) == (document, question)


def test_generic():
    (full, short), bad = read(FIXTURES / "generic.jsonl")
    assert not bad
    assert (full.id, full.dataset, full.group, full.supporting) == ("g0", "mills", "aldwick", (0,))
    assert full.documents == (
        Passage("Aldwick", "The mill was built in 1743."),
        Passage(None, "It has three floors."),
    )
    assert (short.dataset, short.answers, short.task) == ("generic", ("no",), "yesno")
    assert short.supporting is None


def test_derived_ids_and_groups_are_the_same_in_every_process():
    (_, short), _ = read(FIXTURES / "generic.jsonl")
    code = (
        "import sys; from c2kv.training.records import read_records\n"
        "record = list(read_records(sys.argv[1]))[1]; print(record.id, record.group)\n"
        "sys.exit('torch' in sys.modules)"  # reading data must not need torch
    )
    command = [sys.executable, "-c", code, str(FIXTURES / "generic.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [short.id, short.group]


# --- bad records -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": "  "}, "no 'question'"),
        ({"question": ["x"]}, "'question' is not text"),
        ({"answers": []}, "no answer"),
        ({"answers": [" "]}, "no answer"),
        ({"answers": [3]}, "an answer is not text"),
        ({"documents": []}, "no document"),
        ({"documents": None}, "no 'documents'"),
        ({"documents": [{"title": "T"}]}, "a document has no 'text'"),
        ({"documents": [{"text": ""}]}, "no document"),
        ({"supporting": [1]}, "supporting document 1 is missing or empty"),
        ({"supporting": [True]}, "'supporting' is not a list of document numbers"),
    ],
)
def test_bad_records_are_named_by_line(change, reason, tmp_path):
    path = write_lines(tmp_path / "x.jsonl", GENERIC, "", {**GENERIC, **change}, GENERIC)
    found, bad = read(path)
    assert len(found) == 2 and bad == [(3, reason)]
    with pytest.raises(DataError, match=rf"x\.jsonl:3: {reason}; mend or remove it"):
        list(read_records(path))


def test_lines_that_are_not_json_or_utf8_are_bad_records(tmp_path):
    path = tmp_path / "x.jsonl"
    good = json.dumps(GENERIC).encode()
    path.write_bytes(b"\n".join([b'{"id": ', good, b'"\xff"', b"[" * 100_000, b"7", good, b""]))
    found, bad = read(path)
    assert len(found) == 2 and [line for line, _ in bad] == [1, 3, 4, 5]
    assert [reason[:8] for _, reason in bad] == ["not JSON", "not UTF-", "not JSON", "the reco"]


def test_bad_elements_of_an_array_are_named_by_number(tmp_path):
    rows = json.loads((FIXTURES / "hotpotqa.json").read_text())
    rows[0]["context"][0] = ["Aldwick Mill"]
    rows.append({"_id": "test", "question": "Q?", "context": [["T", ["S"]]]})  # a test split
    path = tmp_path / "x.json"
    path.write_text(json.dumps(rows))
    found, bad = read(path)
    assert len(found) == 1
    assert bad == [(1, "'context' is not pairs of a title and sentences"), (3, "no answer")]
    with pytest.raises(DataError, match=r"x\.json: record 1: 'context'"):
        list(read_records(path))


@pytest.mark.parametrize("name", FORMAT_OF)
def test_damaged_values_give_reasons_not_crashes(name, tmp_path):
    """Every value, at any depth of a record, replaced by one of another kind."""

    def mutants(value):
        yield from (None, 5, True, "", "x", [], [5], {}, {"a": 1}, [[]], [{}])
        if isinstance(value, dict):
            for key in value:
                yield from ({**value, key: changed} for changed in mutants(value[key]))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                yield from ([*value[:i], changed, *value[i + 1 :]] for changed in mutants(item))

    text = (FIXTURES / name).read_text()
    row = json.loads(text.splitlines()[0] if name.endswith("l") else text)
    row = row[0] if isinstance(row, list) else row["data"][0] if "data" in row else row
    rows = list(mutants(row))
    path = tmp_path / "x.json"
    path.write_text(json.dumps(rows))
    found, bad = read(path, FORMAT_OF[name])
    assert found and len(bad) > 20 and all(reason for _, reason in bad)
    if FORMAT_OF[name] != "squad":  # whose articles hold several questions
        assert len(found) + len(bad) == len(rows)


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMAT_OF)
def test_gzip_is_read_whatever_the_name(name, tmp_path):
    for target in (tmp_path / f"{name}.gz", tmp_path / "packed"):
        target.write_bytes(gzip.compress((FIXTURES / name).read_bytes()))
        assert read(target) == read(FIXTURES / name)


def test_truncated_gzip_is_an_error_after_what_was_whole(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    rows = [{**GENERIC, "id": str(i), "question": f"Q{i * i}"} for i in range(5000)]
    packed = gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode())
    path.write_bytes(packed[: len(packed) // 2])
    found = []
    with pytest.raises(DataError, match=r"x\.jsonl\.gz' is damaged or cut short .* again"):
        found.extend(read_records(path))  # extend keeps what came before the error
    path.write_bytes(packed[:-3] + b"\0\0\0")
    with pytest.raises(DataError, match="damaged"):
        list(read_records(path))


def test_a_truncated_array_is_an_error(tmp_path):
    path = tmp_path / "x.json"
    text = (FIXTURES / "hotpotqa.json").read_text().strip()
    for cut, where in ((-1, "after record 2"), (-30, "no JSON in record 2"), (1, "record 1")):
        path.write_text(text[:cut])
        with pytest.raises(DataError, match=f"cut short.*{where}.*fetch it again"):
            list(read_records(path))


def test_two_arrays_in_one_file_are_refused_not_half_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text((FIXTURES / "hotpotqa.json").read_text() * 2)
    with pytest.raises(DataError, match="more after its 2 records"):
        list(read_records(path))


def test_arrays_are_decoded_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_CHUNK", 7)
    for name in ("hotpotqa.json", "2wikimultihopqa.json", "squad-1.1.json", "squad-2.0.json"):
        small, _ = read(FIXTURES / name)
        path = tmp_path / name
        path.write_text("\ufeff " + (FIXTURES / name).read_text(), encoding="utf-8")
        assert read(path)[0] == small and small


def test_reading_is_lazy(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", GENERIC, "{", GENERIC)
    assert next(read_records(path)).id == "a"  # the bad second line is not reached
    array = tmp_path / "x.json"
    array.write_text("[" + json.dumps(GENERIC) + "," + " " * (3 << 20) + "{")
    assert next(read_records(array)).id == "a"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "x.jsonl", "is empty; fetch"),
        (b" \n\n", "x.json", "is empty; fetch"),
        (b"[]", "x.json", "holds no records; check"),
        (gzip.compress(b""), "x.jsonl.gz", "is empty; fetch"),
        (b"", "x.jsonl.gz", "named .gz but is empty"),
        (b'{"id": 1}', "x.jsonl.gz", "named .gz but is not gzip; rename"),
        (b"\x1f\x8b\x08\x00garbage", "x.gz", "damaged or cut short"),
        (b"\x89PNG\0\0", "x.jsonl", "is binary; give JSON"),
        ('{"id": "ü"}'.encode("utf-16"), "x.jsonl", "is binary"),
        (b'[{"id": "\xff"}]', "x.json", "not UTF-8 text; convert"),
        (b"title,question\na,b\n", "x.csv", "no readable record: line 1 is not JSON"),
        (
            b'{"input": "a", "context": "b"}\n',
            "x.jsonl",
            "no known format .*input, context.*musique",
        ),
        (b"7\n", "x.jsonl", "no known format"),
    ],
)
def test_unreadable_files_are_named_in_one_line(content, name, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_records(path))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_missing_paths_and_wrong_options(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*No such file.*check the path"):
        list(read_records(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        list(read_records(tmp_path))
    with pytest.raises(DataError, match="format 'squat' is unknown; use auto, generic, hotpotqa"):
        read_records(FIXTURES / "generic.jsonl", "squat")
    with pytest.raises(DataError, match="split"):
        list(read_records(FIXTURES / "generic.jsonl", split="train"))


@pytest.mark.parametrize("name", ["longmagpie.jsonl", "generic.jsonl", "musique.jsonl"])
def test_parquet(name, tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in (FIXTURES / name).open()]
    columns = dict.fromkeys(key for row in rows for key in row)
    rows = [{key: row.get(key) for key in columns} for row in rows]
    if name == "generic.jsonl":  # a column has one type
        rows[1]["documents"] = [{"text": text} for text in rows[1]["documents"]]
    path = tmp_path / "x.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=1)
    assert read(path) == read(FIXTURES / name)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="damaged or not parquet"):
        list(read_records(path))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingPackageError, match=r"'pyarrow'; run: pip install 'c2kv\[train\]'"):
        list(read_records(path))


# --- the hub ---------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for datasets.load_dataset; `calls` records what was asked of it."""
    state = SimpleNamespace(rows=[], calls=[], error=None)

    def load_dataset(*args, **settings):
        state.calls.append((args, settings))
        if state.error:
            raise state.error
        return iter(state.rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return state


def test_hub_data_sets_are_streamed(hub):
    row = json.loads((FIXTURES / "hotpotqa.json").read_text())[0]
    titles, texts = zip(*row["context"], strict=True)
    hub.rows = [
        {
            "id": row["_id"],
            "question": row["question"],
            "answer": row["answer"],
            "type": "bridge",
            "level": "medium",
            "supporting_facts": {"title": ["Joan Farr", "Orley"], "sent_id": [0, 1]},
            "context": {"title": list(titles), "sentences": list(texts)},
        },
        {"id": "2", "question": "Q", "answer": None, "context": {"title": [], "sentences": []}},
    ]
    found, bad = read("hub:hotpotqa/hotpot_qa:distractor", "auto", "validation")
    assert found == read(FIXTURES / "hotpotqa.json")[0][:1] and bad == [(2, "no document")]
    args, settings = hub.calls[0]
    assert args == ("hotpotqa/hotpot_qa", "distractor")
    assert settings == {"split": "validation", "streaming": True}
    assert detect_format("hub:hotpotqa/hotpot_qa") == "hotpotqa"
    assert hub.calls[-1] == (("hotpotqa/hotpot_qa", None), {"split": "train", "streaming": True})


def test_hub_failures_are_one_line(hub, monkeypatch):
    hub.error = ConnectionError("Couldn't reach the hub.\nTraceback …")
    with pytest.raises(DataError, match=r"hub:a/b' \(split train\): Couldn't reach the hub; check"):
        list(read_records("hub:a/b"))
    with pytest.raises(DataError, match="no hub data set; write hub:owner/name"):
        list(read_records("hub:../a/b"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"'datasets'; run: pip install 'c2kv\[train\]'"):
        list(read_records("hub:a/b"))


# --- c2kv data inspect -----------------------------------------------------------------------


@pytest.fixture
def inspect(capsys):
    """Runs `c2kv data inspect`; returns (exit code, stdout)."""

    def call(*argv):
        parser = argparse.ArgumentParser()
        data.add_commands(parser.add_subparsers())
        args = parser.parse_args(["data", "inspect", *map(str, argv)])
        return args.run(args), capsys.readouterr().out

    return call


def test_inspect_reports_formats_lengths_and_samples(inspect):
    code, out = inspect(FIXTURES / "hotpotqa.json", FIXTURES / "generic.jsonl", "--samples", "1")
    assert code == 0
    assert "hotpotqa.json: format hotpotqa, 2 records of 2 groups, 0 bad" in out
    assert "generic.jsonl: format generic, 2 records of 2 groups, 0 bad" in out
    assert "data sets: mills 1, generic 1" in out
    assert out.count("--- sample 1 ---") == 2 and "sample 2" not in out
    assert "Document 1: Joan Farr\nJoan Farr (born 1711" in out
    assert "Answer: 1743 | in 1743" in out


def test_inspect_json_gives_exact_lengths(inspect, tmp_path):
    rows = [
        {**GENERIC, "id": "same", "documents": ["w " * (i + 1)] * (1 + i % 3)} for i in range(20)
    ]
    code, out = inspect(write_lines(tmp_path / "x.jsonl", *rows), "--json", "--samples", "0")
    (report,) = json.loads(out)
    assert code == 0 and report["records"] == 20 and report["repeated_ids"] == 19
    assert report["documents_per_record"] == {"min": 1, "median": 2, "max": 3}
    lengths = sorted(i + 1 for i in range(20) for _ in range(1 + i % 3))
    p95 = lengths[36]  # 39 documents: the 38th is at or above 0.95 * 39 = 37.05
    assert report["words_per"]["document"]["min"] == 1
    assert report["words_per"]["document"]["max"] == 20
    assert report["words_per"]["document"]["p95"] in (p95, lengths[37])
    assert report["words_per"]["question"] == {"min": 1, "median": 1, "p95": 1, "max": 1}
    assert report["samples"] == []


def test_inspect_names_bad_records_and_exits_1(inspect, tmp_path):
    path = write_lines(tmp_path / "x.jsonl", GENERIC, *["{}"] * 6, {**GENERIC, "answers": []})
    code, out = inspect(path)
    assert code == 1 and "1 records of 1 groups, 7 bad" in out
    assert f"bad: {path}:2: no 'documents'" in out and f"{path}:7" not in out
    assert "bad in all: 6 no 'documents', 1 no answer" in out
    code, out = inspect(FIXTURES / "squad-2.0.json", "--json")
    (report,) = json.loads(out)
    assert code == 1 and report["bad"]["reasons"] == {"unanswerable": 1}
    assert report["bad"]["records"] == [f"{FIXTURES / 'squad-2.0.json'}: record 2: unanswerable"]


def test_inspect_shortens_long_samples_except_in_json(inspect, tmp_path):
    path = write_lines(tmp_path / "x.jsonl", {**GENERIC, "documents": ["word " * 2000]})
    assert "[… " in inspect(path)[1]
    (report,) = json.loads(inspect(path, "--json")[1])
    assert report["samples"][0].count("word") == 2000


@pytest.mark.embedded
def test_inspect_with_a_model_counts_tokens_and_renders_its_prompt(inspect):
    code, out = inspect(FIXTURES / "generic.jsonl", "-m", "smollm2-135m", "--json")
    (report,) = json.loads(out)
    assert code == 0 and report["tokens_per"]["document"]["max"] > 7
    prompt = report["samples"][0]
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith(
        "Question: When was the mill built?<|im_end|>\n<|im_start|>assistant\n1743"
    )
    assert "<|im_start|>user\nAldwick\nThe mill was built in 1743.<|im_end|>" in prompt


def test_parsing_arguments_does_not_import_torch():
    code = (
        "import argparse, sys; from c2kv.cli import data\n"
        "data.add_commands(argparse.ArgumentParser().add_subparsers())\n"
        "sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
