"""The engine end to end on the embedded model: reuse, reports, order, streaming, refusals."""

import pytest
import torch

from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.errors import (
    ConfigError,
    ContextOverflowError,
    DocumentError,
    MissingExtractorError,
    NumericalError,
)
from c2kv.extractor import Extractor
from c2kv.library import Compressed, SegmentLibrary, _batches
from c2kv.store import FolderStore

pytestmark = pytest.mark.embedded

TEXTS = {
    "mill": "The mill at Aldwick was built in 1743 by Joan Farr. It burnt down in 1802.",
    "boat": "The ferry Teal carries 14 cars. Its captain is called Odd Berg.",
}


@pytest.fixture(scope="module")
def extractor(embedded):
    return Extractor.from_backbone(embedded, ratio=4, variant="residual")


@pytest.fixture
def engine(embedded, extractor, tmp_path):
    return Engine(embedded, extractor, FolderStore(tmp_path / "store"))


@pytest.fixture
def documents(engine):
    return [engine.add(text, name=name) for name, text in TEXTS.items()]


def test_recompute_equals_generate_on_the_same_conversation(engine, documents, embedded):
    question = "In which year was the mill built?"
    answer = engine.ask(question, documents, method="recompute", max_new_tokens=16)
    text = engine.template.conversation(
        list(TEXTS.values()),
        "Answer the question from the documents above, as briefly as possible.\n\n"
        f"Question: {question}",
    )
    ids = embedded.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    out = embedded.model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    expected = [t for t in out.tolist() if t != embedded.tokenizer.eos_token_id]
    assert answer.token_ids == expected
    assert "1743" in answer.text
    report = answer.report
    assert report.method == "recompute" and report.ratio == 1 and report.segments == 0
    assert report.entries == report.source_tokens and report.extractor_digest is None
    assert not report.untrained and report.extract == 0


def test_reports_say_where_segments_came_from(engine, documents):
    def source(asked):
        r = asked.report
        return (r.segments_from_memory, r.segments_from_disk, r.segments_extracted)

    assert source(engine.ask("Who?", documents, max_new_tokens=2)) == (2, 0, 0)
    engine.forget()
    assert source(engine.ask("Who?", documents, max_new_tokens=2)) == (0, 2, 0)
    new = engine.document("A third one, about Mona.", name="third")
    answer = engine.ask("Who?", [new, documents[0]], max_new_tokens=2)
    assert source(answer) == (1, 0, 1)
    assert answer.report.extract > 0 and answer.report.ttft >= answer.report.extract


def test_reports_count_what_was_placed(engine, documents, extractor, embedded):
    report = engine.ask("Who?", documents, max_new_tokens=3).report
    prefix = len(engine.template.prefix_ids())
    assert report.segments == report.documents == 2
    assert report.source_tokens == prefix + sum(d.tokens for d in documents)
    assert report.entries == prefix + sum(-(-d.tokens // 4) for d in documents)
    assert report.kv_bytes == report.entries * 30 * 2 * 3 * 64 * 4
    assert report.untrained and report.extractor_digest == extractor.digest
    assert report.backbone_digest == embedded.digest


def test_answers_do_not_depend_on_where_segments_came_from(engine, documents):
    fresh = engine.ask("What is the captain called?", documents, max_new_tokens=12)
    engine.forget()
    loaded = engine.ask("What is the captain called?", documents, max_new_tokens=12)
    assert fresh.token_ids == loaded.token_ids
    turned = engine.ask("What is the captain called?", documents[::-1], max_new_tokens=12)
    assert turned.report.segments_extracted == 0


def test_a_damaged_segment_is_extracted_again_and_said_so(engine, documents):
    expected = engine.ask("Who?", documents, max_new_tokens=8).token_ids
    engine.forget()
    path = next(engine.library.store.root.glob("??/*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    again = engine.ask("Who?", documents, max_new_tokens=8)
    assert again.token_ids == expected
    assert again.report.segments_from_disk == 1 and again.report.segments_extracted == 1


def test_a_batch_of_questions_equals_one_at_a_time(engine, documents):
    questions = [
        "Who built the mill?",
        "How many cars?",
        "What is the name of the captain, please?",
    ]
    for method in ("c2kv", "recompute"):
        batch = engine.ask(questions, documents, method=method, max_new_tokens=12)
        alone = [engine.ask(q, documents, method=method, max_new_tokens=12) for q in questions]
        assert [a.token_ids for a in batch] == [a.token_ids for a in alone]
        assert batch[0].report.batch == 3


def test_streamed_text_is_the_answer(engine, documents):
    pieces = []
    answer = engine.ask(
        "Repeat: naïve café 🙂",
        documents,
        method="recompute",
        max_new_tokens=20,
        on_text=lambda index, text: pieces.append(text),
    )
    assert "".join(pieces).strip() == answer.text and len(pieces) > 1


def test_long_documents_become_several_segments(embedded, extractor):
    engine = Engine(embedded, extractor, segment_tokens=64)
    document = engine.document("One sentence. " * 60, name="long")
    assert len(document.pieces) > 2 and max(map(len, document.pieces)) <= 64
    report = engine.ask("What?", [document, document], max_new_tokens=2).report
    assert report.segments == 2 * len(document.pieces)
    assert report.segments_extracted == len(document.pieces)


def test_positions_overflow_before_any_work(engine, monkeypatch):
    document = engine.document("word " * 9000)
    monkeypatch.setattr(engine.library, "get", lambda *_: pytest.fail("extracted"))
    with pytest.raises(ContextOverflowError, match="'smollm2-135m' has 8192"):
        engine.ask("What?", [document])


@pytest.mark.parametrize("text", ["", "  \n", "\u200b\u200b", "*** --- ***"])
def test_documents_without_content_are_refused_by_name(engine, text):
    with pytest.raises(DocumentError, match="document 'notes'"):
        engine.add(text, name="notes")


def test_bad_requests_are_refused(engine, documents):
    with pytest.raises(ConfigError, match="method 'magic' is unknown"):
        engine.ask("Who?", documents, method="magic")
    for question in ("", ["Who?", " "], []):
        with pytest.raises(DocumentError, match="ask something"):
            engine.ask(question, documents)
    other = Document("alien", ((1, 2),), "another model's digest")
    with pytest.raises(DocumentError, match="'alien' was read by another model"):
        engine.ask("Who?", [other])


def test_without_an_extractor_only_compressed_answers_are_refused(embedded):
    engine = Engine(embedded, None)
    document = engine.document(TEXTS["mill"])
    assert (
        "1743"
        in engine.ask(
            "When was the mill built?", [document], method="reuse", max_new_tokens=16
        ).text
    )
    with pytest.raises(MissingExtractorError, match="--untrained"):
        engine.ask("When?", [document])


def test_extraction_that_is_not_finite_is_refused_and_not_stored(embedded, tmp_path):
    broken = Extractor.from_backbone(embedded)
    broken.layers[3].v_proj.weight.data[0, 0] = float("inf")
    store = FolderStore(tmp_path)
    library = SegmentLibrary(embedded, Compressed(embedded, broken), "t", store)
    with pytest.raises(NumericalError, match="not finite"):
        library.get([[1, 2, 3]])
    assert store.entries() == []


def test_memory_is_bounded(embedded, extractor):
    library = SegmentLibrary(embedded, Compressed(embedded, extractor), "t", memory_bytes=1)
    library.get([[1, 2, 3], [4, 5]])
    assert library.get([[4, 5], [1, 2, 3]]).from_memory == 1


def test_extraction_batches_group_like_lengths_within_the_limit():
    lengths = [(0, 3000), (1, 10), (2, 2000), (3, 12), (4, 5000)]
    assert list(_batches(lengths)) == [[1, 3], [2], [0], [4]]


def test_extraction_in_a_batch_equals_alone(embedded, extractor):
    library = SegmentLibrary(embedded, Compressed(embedded, extractor), "t")
    pieces = [list(range(5, 40)), list(range(90, 200)), [7]]
    together = library.get(pieces).segments
    for piece, segment in zip(pieces, together, strict=True):
        library.forget()
        (alone,) = library.get([piece]).segments
        torch.testing.assert_close(segment.kv, alone.kv, atol=1e-3, rtol=1e-4)
        assert (
            segment.kv.is_contiguous() and segment.kv.untyped_storage().nbytes() == segment.nbytes
        )
