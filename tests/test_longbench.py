"""LongBench: official prompts and scores to the byte; documents of the paper's protocol."""

import hashlib
import json
import zipfile
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from c2kv.backbone import Backbone
from c2kv.cli.main import main
from c2kv.engine import Engine
from c2kv.errors import ConfigError, DataError, DocumentError
from c2kv.evaluation import metrics, protocols
from c2kv.evaluation.conditions import Condition
from c2kv.evaluation.longbench import (
    TASKS,
    group_texts,
    load_records,
    official_prompt,
    score,
    split_documents,
)
from tiny import tiny_model

# SHA-256 (shortened) of the texts in the benchmark's dataset2prompt.json.
OFFICIAL = {
    "narrativeqa": "aada7ed24b06abac",
    "qasper": "0fbdd123fe7f83d6",
    "multifieldqa_en": "20b4666a2de8a1f7",
    "hotpotqa": "9ec4ae308865bd0c",
    "2wikimqa": "9ec4ae308865bd0c",
    "musique": "9ec4ae308865bd0c",
    "gov_report": "91c25d585b189ced",
    "qmsum": "dca23b678fe0183b",
    "multi_news": "2af3f28c40b902e6",
    "trec": "0eff8bebdba99d91",
    "triviaqa": "00a802e6377e72fc",
    "samsum": "a68d884234907eef",
    "passage_count": "986550b6c61009c6",
    "passage_retrieval_en": "39b96b7fa52bdd2a",
}


def record(name="hotpotqa", **more):
    made = {
        "input": "Who built the mill?",
        "context": "Passage 1:\nMill\nAda built the mill.\n\n"
        "Passage 2:\nFerry\nIt crosses at noon.\n",
        "answers": ["Ada"],
        "length": 12,
        "dataset": name,
        "language": "en",
        "all_classes": None,
        "_id": "one",
    }
    return {**made, **more}


def test_prompts_are_the_official_ones_to_the_byte():
    assert set(TASKS) == set(OFFICIAL)
    for name, digest in OFFICIAL.items():
        assert hashlib.sha256(TASKS[name].prompt.encode()).hexdigest()[:16] == digest, name


def test_prompts_are_filled_as_they_are():
    braces = record(input="{x}?", context="a {context} b")
    assert "a {context} b" in official_prompt("hotpotqa", braces)
    assert official_prompt("trec", record(context="C", input="I")).endswith("\n\nC\nI")


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("the cat sat on the mat", "the cat is on the mat", 0.7999999950000002),
        ("a b a b a b", "a b", 0.999999995),  # this package counts a word once
        ("One sentence. Another one.", "Another one. One sentence.", 0.999999995),  # by sentence
        ("", "x", 0.0),
        ("...", "x", 0.0),
    ],
)
def test_rouge_is_that_of_the_package_rouge(prediction, answer, expected):
    assert metrics.rouge_l(prediction, answer) == pytest.approx(expected, abs=1e-12)


def test_classification_is_the_official_number_removal_and_all():
    classes = ["A", "AB", "ABC"]
    # Without the official script's slip (it skips the name after one removed) this would be 1.
    assert metrics.classification("it is ABC", "ABC", classes) == 1 / 2
    assert metrics.classification("AB", "AB", ["AB", "A"]) == 1.0
    assert metrics.classification("A or Z", "A", ["A", "Z"]) == 1 / 2
    assert metrics.classification("none", "A", ["A"]) == 0.0


def test_numbers_written_beside_the_right_one_cost():
    assert metrics.retrieval("Paragraph 3, or paragraph 13", "Paragraph 3") == 1 / 2
    assert metrics.retrieval("none of them", "Paragraph 3") == 0.0
    assert metrics.count("7", "7") == 1.0 and metrics.count("17", "7") == 0.0


def test_the_best_answer_counts_and_only_few_shot_tasks_take_the_first_line():
    some = record(answers=["Bob", "Ada Lovelace"])
    assert score("hotpotqa", "Ada Lovelace", some) == 1.0
    two_lines = "\nAda\nQuestion: what else?"
    assert score("triviaqa", two_lines, record("triviaqa")) == 1.0
    assert score("hotpotqa", two_lines, record()) < 0.5
    # A newline that was escaped is no line's end.
    assert score("triviaqa", "Ada\\nQuestion", record("triviaqa")) == 0.0
    classes = record("trec", answers=["Date"], all_classes=["Date", "Person"])
    assert score("trec", "Date\nPerson", classes) == 1.0
    assert {n for n, t in TASKS.items() if t.few_shot} == {"trec", "triviaqa", "samsum"}


def test_contexts_split_at_their_own_markers():
    assert split_documents("hotpotqa", record()["context"]) == [
        "Mill\nAda built the mill.",
        "Ferry\nIt crosses at noon.",
    ]
    paragraphs = "Paragraph 1: One.\n\nParagraph 2: Two.\nParagraph 12 is no start."
    assert split_documents("passage_count", paragraphs) == [
        "Paragraph 1: One.",
        "Paragraph 2: Two.\nParagraph 12 is no start.",
    ]
    assert split_documents("qasper", "One\nline.\n\nTwo.\n\n***") == ["One\nline.", "Two."]
    assert split_documents("qasper", "One.\nTwo.") == ["One.", "Two."]
    shots = "Dialogue: a\nSummary: b\nDialogue: c\nSummary: d"
    assert len(split_documents("samsum", shots)) == 2


def test_neighbours_are_grouped_up_to_a_segment():
    assert group_texts(list("abcd"), [4, 4, 9, 1], 8) == ["a\n\nb", "c", "d"]
    assert group_texts(["x"], [99], 8) == ["x"]


def test_records_that_lack_something_are_named(tmp_path):
    with pytest.raises(ConfigError, match="'hotpot' is unknown"):
        load_records("hotpot", str(tmp_path))
    with pytest.raises(DataError, match="is it LongBench's folder"):
        load_records("hotpotqa", str(tmp_path))
    broken = record()
    del broken["answers"]
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(record()) + "\n" + json.dumps(broken))
    with pytest.raises(DataError, match="hotpotqa 2: no 'answers'"):
        load_records("hotpotqa", str(tmp_path))
    assert len(load_records("hotpotqa", str(tmp_path), 1)) == 1


@pytest.fixture(scope="module")
def engine(embedded):
    """A tiny backbone with the embedded model's tokenizer and chat template."""
    model = tiny_model("llama", vocab_size=len(embedded.tokenizer))
    return Engine(Backbone(model, embedded.tokenizer, "tiny"), None, segment_tokens=32)


@pytest.mark.embedded
def test_full_recompute_equals_generate_on_the_official_prompt(embedded, monkeypatch):
    engine = Engine(embedded, None)
    tokenizer = embedded.tokenizer
    answered, original = [], protocols.decode

    def decode(*args):
        (found,), times = original(*args)
        answered.append(found.token_ids)
        return [found], times

    monkeypatch.setattr(protocols, "decode", decode)
    newline = tokenizer("\n").input_ids[-1]
    for name in ("hotpotqa", "trec", "samsum"):
        one = record(name, all_classes=["Person"], answers=["Person"])
        (row,) = protocols.answer_official(engine, name, [one])
        prompt = official_prompt(name, one)
        if name == "hotpotqa":
            turns = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )  # this template has no thinking mode
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        ends = [embedded.model.generation_config.eos_token_id]
        more = {}
        if name == "samsum":  # as the official script ends it
            ends.append(newline)
            more = {"min_length": ids.shape[1] + 1, "eos_token_id": ends}
        length = TASKS[name].max_new_tokens
        out = embedded.model.generate(ids, max_new_tokens=length, do_sample=False, **more)
        expected = [token for token in out[0, ids.shape[1] :].tolist() if token not in ends]
        assert answered[-1] == expected and row["cut_tokens"] == 0
        assert row["prediction"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert row["cost"]["recomputed"] == (ids.shape[1] - 1) * embedded.num_layers
        assert row["ttft"] > row["question"]  # the prefill of the whole prompt is in it


@pytest.mark.embedded
def test_long_prompts_are_cut_in_the_middle_of_the_raw_prompt(engine):
    tokenizer = engine.backbone.tokenizer
    text = " ".join(map(str, range(200)))
    ids = tokenizer(text).input_ids
    cut, left_out = protocols.middle_cut(tokenizer, text, 21)
    assert cut == tokenizer.decode(ids[:10]) + tokenizer.decode(ids[-10:])
    assert left_out == len(ids) - 20
    assert protocols.middle_cut(tokenizer, text, len(ids)) == (text, 0)
    (row,) = protocols.answer_official(engine, "hotpotqa", [record(context=text)], max_length=60)
    assert row["cut_tokens"] > 0


@pytest.mark.embedded
def test_samsum_ends_at_a_newline_but_not_at_once(engine, monkeypatch):
    asked = []
    original = protocols.decode
    monkeypatch.setattr(
        protocols, "decode", lambda c, q, options: asked.append(options) or original(c, q, options)
    )
    newline = engine.backbone.tokenizer("\n").input_ids[-1]
    protocols.answer_official(engine, "samsum", [record("samsum")])
    samsum = asked.pop()
    protocols.answer_official(engine, "qmsum", [record("qmsum")])
    qmsum = asked.pop()
    assert newline in samsum.stop_ids and samsum.min_new_tokens == 1
    assert newline not in qmsum.stop_ids and qmsum.min_new_tokens == 0


@pytest.mark.embedded
def test_methods_read_the_same_documents_and_differ_in_cost(engine):
    methods = ["recompute", "reuse", "epic-4", "epic-999"]
    names = [*methods, "wrongdoc:reuse", "budget:epic-4", "noctx"]
    conditions = [Condition.of(name) for name in names]
    other = record(context="Passage 1:\nHay\nHay is dry.\n")
    rows = protocols.answer_paper(engine, "hotpotqa", [record()], conditions, [other])
    assert [row["condition"] for row in rows] == names
    assert len({row["prompt"] for row in rows[: len(methods)]}) == 1
    assert rows[4]["source_tokens"] < rows[0]["source_tokens"] > rows[6]["source_tokens"]
    with pytest.raises(ConfigError, match="needs two samples"):
        protocols.answer_paper(engine, "hotpotqa", [record()], conditions)
    by_name = {row["condition"]: row for row in rows}
    assert by_name["epic-999"]["prediction"] == by_name["recompute"]["prediction"]
    assert by_name["reuse"]["cost"]["recomputed"] == 0 < by_name["epic-4"]["cost"]["recomputed"]
    # What is kept was made before the request.
    assert by_name["reuse"]["cost"]["extracted"] == 0 < by_name["reuse"]["cost"]["segments"]


@pytest.mark.embedded
def test_documents_that_do_not_fit_lose_pieces_in_the_middle(engine):
    documents = [engine.document(f"Word {i} " * 20, str(i)) for i in range(9)]
    total = sum(d.tokens for d in documents)
    assert protocols.fit(documents, total) == (documents, 0)
    kept, cut = protocols.fit(documents, total // 2)
    assert sum(d.tokens for d in kept) == total - cut <= total // 2
    names = [d.name for d in kept]
    assert names[0] == "0" and names[-1] == "8" and "4" not in names
    documents = [engine.document(f"Word {i} " * 4, str(i)) for i in range(9)]
    assert all(len(d.pieces) == 1 for d in documents)
    one = documents[0].tokens  # more than half the room: one end is kept, the other is not
    kept, cut = protocols.fit(documents, one + one // 2)
    assert [d.name for d in kept] == ["0"] and cut == sum(d.tokens for d in documents[1:])
    with pytest.raises(DocumentError, match=f"fits into {one - 1} tokens"):
        protocols.fit(documents, one - 1)
    for protocol, methods, says in (
        ("official", ["recompute", "reuse"], "only recompute"),
        ("mixed", ["recompute"], "'mixed' is unknown"),
    ):
        with pytest.raises(ConfigError, match=says):
            protocols.check_protocol(protocol, methods)


@pytest.mark.embedded
def test_the_command_resumes_and_never_mixes_protocols(engine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("c2kv.cli.longbench.load_engine", lambda args: engine)
    rows = [record(_id=str(i)) for i in range(3)]
    (tmp_path / "hotpotqa.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = tmp_path / "run"
    command = ["eval", "longbench", "--tasks", "hotpotqa", "--out", str(out)]
    command += ["--data", str(tmp_path)]
    assert main([*command, "--methods", "recompute,reuse"]) == 0
    shown = capsys.readouterr().out
    assert "paper protocol" in shown and "hotpotqa*" in shown and "in-distribution" in shown
    samples = (out / "hotpotqa.jsonl").read_text().splitlines(keepends=True)
    assert len(samples) == 6 and all("cost" in json.loads(line) for line in samples)
    (out / "hotpotqa.jsonl").write_text("".join(samples[:3]))
    assert main([*command, "--methods", "recompute,reuse", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tasks"]["hotpotqa"]["reuse"]["scored"] == 3
    assert (out / "hotpotqa.jsonl").read_text().splitlines(keepends=True)[:2] == samples[:2]
    assert main([*command, "--protocol", "official"]) == 1
    assert "made with another" in capsys.readouterr().err


@pytest.mark.embedded
def test_failed_samples_are_recorded_and_fail_the_run(engine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("c2kv.cli.longbench.load_engine", lambda args: engine)
    rows = [record(_id="fine"), record(_id="empty", context="***"), record(_id="large")]
    rows[2]["context"] = "Passage 1:\nIt is large.\n"
    prefill = engine.prefill

    def full(documents, method):
        if "large" in engine.backbone.tokenizer.decode(documents[0].pieces[0]):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        return prefill(documents, method)

    monkeypatch.setattr(engine, "prefill", full)
    (tmp_path / "hotpotqa.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = tmp_path / "run"
    command = ["eval", "longbench", "--tasks", "hotpotqa", "--methods", "recompute", "--json"]
    command += ["--batch", "2"]
    assert main([*command, "--out", str(out), "--data", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "2 samples failed" in captured.err
    written = (out / "hotpotqa.jsonl").read_text()
    assert "has an empty context" in written and '"CUDA out of memory."' in written
    scores = json.loads(captured.out)["tasks"]["hotpotqa"]["recompute"]
    assert scores["scored"] == 1 and scores["failed"] == 2


@pytest.mark.embedded
def test_samples_that_cannot_be_wrong_documents_fail_that_control_alone(engine):
    conditions = [Condition.of(name) for name in ("reuse", "wrongdoc:reuse")]
    others = [record(_id="empty", context="***")]
    reuse, wrong = protocols.answer_paper(engine, "hotpotqa", [record()], conditions, others)
    assert "score" in reuse and "'empty' of hotpotqa has an empty context" in wrong["error"]


@pytest.mark.embedded
def test_prompts_beyond_the_models_positions_fail_alone(engine):
    limit = engine.backbone.max_positions
    long = record(_id="long", context="Passage 1:\n" + "word " * 2 * limit)
    rows = protocols.answer_official(engine, "hotpotqa", [long, record()], max_length=2 * limit)
    assert [row["id"] for row in rows if "error" in row] == ["long"]
    assert f"has {limit}" in rows[0]["error"] and "score" in rows[1]


@pytest.mark.embedded
def test_no_stop_token_is_chosen_too_early(engine):
    from c2kv.decode import DecodingOptions, decode
    from c2kv.methods.recompute import prefill

    composition = prefill(engine.backbone, [1, 2, 3])
    ((free,), _) = decode(composition, [[4]], DecodingOptions(max_new_tokens=3))
    first = free.token_ids[0]
    stopping = DecodingOptions(max_new_tokens=3, stop_ids=(first,))
    ((stopped,), _) = decode(composition, [[4]], stopping)
    assert stopped.token_ids == [] and stopped.finish_reason == "stop"
    held = DecodingOptions(max_new_tokens=3, stop_ids=(first,), min_new_tokens=2)
    ((longer,), _) = decode(composition, [[4]], held)
    assert len(longer.token_ids) >= 2 and first not in longer.token_ids[:2]
    assert torch.tensor(longer.token_ids).numel() <= 3


def test_what_the_command_cannot_use_is_refused(tmp_path, capsys):
    command = ["eval", "longbench", "--methods", "recompute"]
    assert main(command) == 1 and "give --data" in capsys.readouterr().err
    assert main([*command, "--data", str(tmp_path), "--max-length", "100"]) == 1
    assert "--max-length cuts official prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("hotpotqa", {"answers": []}, "no 'answers'"),
        ("trec", {"all_classes": None}, "no 'all_classes'"),
        ("passage_retrieval_en", {"answers": ["the first"]}, "no 'answers'"),
    ],
)
def test_samples_that_cannot_be_scored_are_named_before_any_work(tmp_path, name, change, says):
    rows = [record(name, answers=["Paragraph 1"], all_classes=["Person"]), record(name, **change)]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=f"{name} 2: {says}"):
        load_records(name, str(tmp_path))
    assert len(load_records(name, str(tmp_path), 1)) == 1


def test_records_come_from_the_hubs_archive(monkeypatch, tmp_path):
    """The benchmark is published as one archive beside a script that `datasets` refuses."""
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as files:
        lines = (json.dumps(record(_id=str(number))) + "\n" for number in range(4))
        files.writestr("data/hotpotqa.jsonl", "".join(lines))
    asked = []

    def download(*args, **kwargs):
        asked.append((args, kwargs))
        return archive

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    found = load_records("hotpotqa", "hub:THUDM/LongBench", 2)
    assert [r["_id"] for r in found] == ["0", "1"]
    assert load_records("hotpotqa", "hub", 2) == found
    assert asked == 2 * [(("THUDM/LongBench", "data.zip"), {"repo_type": "dataset"})]
    with pytest.raises(DataError, match=r"no item named 'data/qmsum\.jsonl'"):
        load_records("qmsum", "hub:THUDM/LongBench")


@pytest.mark.embedded
def test_answers_do_not_depend_on_the_batch(engine):
    """Three samples of other lengths, at once or one by one, by either protocol."""
    texts = ("Hay is dry.", "Straw is yellow and hollow, and of little weight.", "Rain. " * 50)
    records = [
        record("samsum", _id=str(i), context=f"Dialogue: {text}\n") for i, text in enumerate(texts)
    ]
    others = [*records[1:], records[0]]
    conditions = [
        Condition.of(name) for name in ("recompute", "reuse", "epic-4", "wrongdoc:reuse", "noctx")
    ]

    def answered(*rows):
        kept = ("id", "condition", "prompt", "prediction", "score", "finish_reason", "entries")
        every = [[row[name] for name in kept] for some in rows for row in some]
        return sorted(every, key=lambda row: row[:2])

    paper = partial(protocols.answer_paper, engine, "samsum")
    together = answered(paper(records, conditions, others))
    alone = [paper([one], conditions, [other]) for one, other in zip(records, others, strict=True)]
    assert together == answered(*alone) and len({row[3] for row in together}) > 3
    official = partial(protocols.answer_official, engine, "samsum")
    assert answered(official(records)) == answered(*(official([one]) for one in records))


@pytest.mark.embedded
def test_the_time_to_a_first_token_is_of_one_sample_alone(engine, monkeypatch):
    """Not a share of the batch's: that is no request's wait."""
    sizes, original = [], protocols.decode

    def decode(compositions, questions, options):
        sizes.append((len(questions), options.max_new_tokens))
        found, times = original(compositions, questions, options)
        return found, replace(times, compose=len(questions), question=10 * len(questions))

    monkeypatch.setattr(protocols, "decode", decode)
    records = [record(_id=str(i)) for i in range(3)]
    rows = protocols.answer_paper(engine, "hotpotqa", records, [Condition.of("reuse")])
    assert sizes == [(1, 1)] * 3 + [(3, 32)]
    assert all(1 <= row["ttft"] < 2 and row["question"] == 10 for row in rows)
    sizes.clear()
    (row,) = protocols.answer_paper(engine, "hotpotqa", records[:1], [Condition.of("reuse")])
    assert sizes == [(1, 32)]  # alone already
    assert 1 <= row["ttft"] < 2 and row["question"] == 10


@pytest.mark.embedded
def test_a_method_that_fails_fails_alone(engine, monkeypatch):
    whole = engine.prefill

    def prefill(documents, method):
        if method == "reuse":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        return whole(documents, method)

    monkeypatch.setattr(engine, "prefill", prefill)
    conditions = [Condition.of(name) for name in ("reuse", "recompute", "noctx")]
    rows = protocols.answer_paper(engine, "hotpotqa", [record()], conditions)
    assert [row.get("error") for row in rows] == ["CUDA out of memory.", None, None]
    assert [row["condition"] for row in rows] == ["reuse", "recompute", "noctx"]


@pytest.mark.embedded
def test_grouped_texts_are_one_segment_each(engine):
    lines = (f"Line {number} was about the budget." for number in range(200))
    documents = protocols.paper_documents(engine, "gov_report", record(context="\n".join(lines)))
    assert all(len(d.pieces) == 1 for d in documents) and len(documents) > 2
    framing = len(engine.template.document_ids("x")) - 1
    for one, other in pairwise(documents):
        assert one.tokens <= engine.segment_tokens < one.tokens + other.tokens - framing + 2


def test_wrong_documents_need_two_contexts_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("c2kv.cli.longbench.load_engine", lambda args: pytest.fail("loaded"))
    rows = [record(_id="a"), record(_id="b")]
    (tmp_path / "hotpotqa.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    command = ["eval", "longbench", "--tasks", "hotpotqa", "--methods", "c2kv,wrongdoc"]
    assert main([*command, "--data", str(tmp_path)]) == 1


@pytest.mark.embedded
def test_wrong_documents_are_those_of_the_next_sample(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("c2kv.cli.longbench.load_engine", lambda args: engine)
    rows = [record(_id=name, context=f"Passage 1:\n{name} is old.\n") for name in "abc"]
    (tmp_path / "hotpotqa.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    seen = []

    def answer(engine, name, rows, conditions, others):
        seen.append([(row["_id"], other["_id"]) for row, other in zip(rows, others, strict=True)])
        return [
            {"id": row["_id"], "condition": c.name, "error": "x"}
            for row in rows
            for c in conditions
        ]

    monkeypatch.setattr(protocols, "answer_paper", answer)
    command = ["eval", "longbench", "--tasks", "hotpotqa", "--methods", "reuse,wrongdoc:reuse"]
    assert main([*command, "--data", str(tmp_path), "--batch", "2"]) == 1
    assert seen == [[("a", "b"), ("b", "c")], [("c", "a")]]
