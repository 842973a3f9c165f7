"""What a record is, and how one raw row of each known data set becomes one.

A raw row is a JSON object (or parquet/hub row) as the data set's authors published it. Readers
raise ValueError with the reason when a row cannot become a record; the caller names the place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

UNANSWERABLE = "unanswerable"  # the reason given for questions marked so by their data set


@dataclass(frozen=True)
class Passage:
    """One document of a record."""

    title: str | None
    text: str


@dataclass(frozen=True)
class Record:
    """A question over documents, with every accepted answer (the first is the reference).

    supporting: indices of the documents that hold the answer, None where that is not known.
    group: what the documents were taken from (an article, a story); distractors for this record
    come from other groups. task: `qa`, `yesno`, `summ` …"""

    id: str
    dataset: str
    documents: tuple[Passage, ...]
    question: str
    answers: tuple[str, ...]
    supporting: tuple[int, ...] | None
    group: str
    task: str = "qa"

    def __post_init__(self) -> None:
        if not self.documents:
            raise ValueError("no document")
        if not self.question:
            raise ValueError("no question")
        if not self.answers:
            raise ValueError("no answer")
        last = len(self.documents) - 1
        if wrong := [i for i in self.supporting or () if not 0 <= i <= last]:
            raise ValueError(f"supporting document {wrong[0]} is not one of 0 to {last}")


def detect(row: Any) -> str | None:
    """The name of the format that a raw row is in, or None."""
    if isinstance(row, list):
        return "longmagpie" if any(_is_turn(turn) for turn in row) else None
    if not isinstance(row, dict):
        return None
    fields = set(row)
    if fields & {"messages", "conversations"} or {"context", "query", "answer"} <= fields:
        return "longmagpie"
    if "question" not in fields:
        return None
    if "documents" in fields:
        return "generic"
    if "paragraphs" in fields:
        return "musique"
    if {"context", "evidences"} <= fields:
        return "2wikimultihopqa"
    if "context" in fields and not isinstance(row["context"], str):
        return "hotpotqa"
    return "squad" if "context" in fields else None


def parse_generic(row: Any) -> Record:
    """The project's own JSONL: `documents` ({title, text} or plain strings), `question`,
    `answers` (or one `answer`); optional `id`, `dataset`, `supporting`, `group`, `task`."""
    row = _object(row)
    passages = []
    for document in _list(row, "documents"):
        if isinstance(document, str):
            document = {"text": document}
        passages.append(_passage(_object(document, "a document"), "text"))
    return _record(
        _optional(row, "dataset") or "generic",
        row,
        passages,
        answers=row["answers"] if row.get("answers") is not None else row.get("answer"),
        supporting=_indices(row.get("supporting")),
        group=_optional(row, "group"),
        task=_optional(row, "task") or "qa",
    )


def parse_hotpotqa(row: Any) -> Record:
    """HotpotQA: `context` [[title, [sentence, …]], …], `supporting_facts` [[title, sentence
    number], …]; on the hub both are columns, {title: […], sentences: [[…], …]}."""
    return _multihop("hotpotqa", row)


def parse_2wikimultihopqa(row: Any) -> Record:
    """2WikiMultiHopQA: HotpotQA's layout with `evidences` besides; some hub copies name the
    sentences `content`, or hold the nested fields as JSON text."""
    return _multihop("2wikimultihopqa", row)


def parse_musique(row: Any) -> Record:
    """MuSiQue: `paragraphs` [{idx, title, paragraph_text, is_supporting}, …], `answer`,
    `answer_aliases`; `answerable` false (in the full version) is reported as unanswerable."""
    row = _object(row)
    if row.get("answerable") is False:
        raise ValueError(UNANSWERABLE)
    paragraphs = [_object(p, "a paragraph") for p in _list(row, "paragraphs")]
    gold = [i for i, p in enumerate(paragraphs) if p.get("is_supporting") is True]
    known = all(isinstance(p.get("is_supporting"), bool) for p in paragraphs)
    return _record(
        "musique",
        row,
        [_passage(p, "paragraph_text") for p in paragraphs],
        answers=[*_strings(row.get("answer")), *_strings(row.get("answer_aliases"))],
        supporting=gold if known else None,
        group=_optional(row, "id"),
    )


def parse_squad(row: Any) -> Record:
    """One question of SQuAD 1.1 or 2.0: `context`, `title`, and `answers` as [{text, …}, …]
    (official) or {text: […]} (hub). No answers, or `is_impossible`: unanswerable."""
    row = _object(row)
    answers = row.get("answers")
    if isinstance(answers, dict):
        answers = answers.get("text")
    elif isinstance(answers, list):
        answers = [_object(a, "an answer").get("text") for a in answers]
    if row.get("is_impossible") is True or answers == []:
        raise ValueError(UNANSWERABLE)
    article = _optional(row, "title")
    title = article.replace("_", " ") if article else None
    passage = Passage(title, _text(row, "context"))
    return _record("squad", row, [passage], answers, supporting=[0], group=article)


def parse_longmagpie(row: Any) -> Record:
    """LongMagpie (caskcsg, github.com/caskcsg/longcontext): a user message of documents joined by
    lines `===Document Separator===` with the question glued to the end of the last one, and the
    assistant's answer.

    Read from `messages` ({role, content}, or {from, value} in `conversations`), from a bare list
    of messages, which its own script writes, or from the single-document set's `context`,
    `query`, `answer`. Which document the question is about is not recorded."""
    if isinstance(row, dict) and not row.keys() & {"messages", "conversations"}:
        passages = [Passage(None, _text(row, "context"))]
        question = _text(row, "query")
        return _record("longmagpie", row, passages, row.get("answer"), question=question)
    turns = row
    if isinstance(row, dict):
        turns = _list(row, "messages" if "messages" in row else "conversations")
    if not isinstance(turns, list) or not all(_is_turn(turn) for turn in turns):
        raise ValueError("messages are not a list of role and content")
    said = [(t.get("role", t.get("from")), t.get("content", t.get("value"))) for t in turns]
    said = [(role, content) for role, content in said if role != "system"]
    if [role for role, _ in said] not in (["user", "assistant"], ["human", "gpt"]):
        raise ValueError("messages are not one of the user's and one of the assistant's")
    (_, user), (_, answer) = said
    if not isinstance(user, str):
        raise ValueError("the user's message is not text")
    *texts, last = _SEPARATOR.split(user)
    tail, question = split_question(last)
    passages = [Passage(None, text.strip()) for text in [*texts, tail]]
    fields = row if isinstance(row, dict) else {}
    return _record("longmagpie", fields, passages, answer, question=question)


FORMATS: dict[str, Callable[[Any], Record]] = {
    "generic": parse_generic,
    "hotpotqa": parse_hotpotqa,
    "2wikimultihopqa": parse_2wikimultihopqa,
    "musique": parse_musique,
    "squad": parse_squad,
    "longmagpie": parse_longmagpie,
}

_SEPARATOR = re.compile(r"^[ \t]*===Document Separator===[ \t]*$", re.MULTILINE)
# LongMagpie's script drops queries beyond this many characters, or of more than one line.
_LONGEST_QUESTION = 1500
_SENTENCE_END = re.compile(r"[.!?]['\"”’)\]]*(\s*)(?=[\"“(]?[A-Z])")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"“.])(?:[A-Za-z]|Dr|Mr|Mrs|Ms|St|Jr|Sr|No|Prof|Gen|Inc|vs|etc)$"
)
_OPENERS = (
    "What|How|Why|When|Where|Who|Whose|Which|Can|Could|Does|Did|Are|Was|Were|Has|Have|Had|"
    "Will|Would|Should|For|From|According|Based|Along|Besides|After|Before|During"
)
# Words end in the short ones too: LinkedIn, KPIs.
_GLUED_WORD = re.compile(
    rf"(?<=[\w.!?:;,)\]])(?=(?:{_OPENERS})\b)|(?<=[.!?:;,)\]])(?=(?:Do|Is|In|At|On)\b)"
)


def split_question(text: str) -> tuple[str, str]:
    """Cut the last document's text from the question that was appended to it; the text comes
    back empty where there is only a question.

    LongMagpie's questions are one line, appended with nothing in between (`…in 1743.When was`).
    So the cut falls in the last line: where the last sentence or question word is glued to what
    stands before it, else before the last sentence."""
    text = text.strip()
    start = text.rfind("\n") + 1
    line = text[start:]
    ends = [m for m in _SENTENCE_END.finditer(line) if not _ABBREVIATION.search(line[: m.start()])]
    cuts = [m.end() for m in ends if not m[1]]
    cuts = sorted([*cuts, *(m.end() for m in _GLUED_WORD.finditer(line))])
    if not cuts or len(line) - cuts[-1] > _LONGEST_QUESTION:
        cuts = [m.end() for m in ends]
    at = start + (cuts[-1] if cuts else 0)
    question = re.sub(r"^User:\s*", "", text[at:])  # left by the model; its authors drop it too
    return text[:at].strip(), question.strip()


def _multihop(dataset: str, row: Any) -> Record:
    row = _object(row)
    passages, titles = [], []
    for title, sentences in _pairs(row, "context", ("sentences", "content")):
        if not isinstance(sentences, list) or not all(isinstance(s, str) for s in sentences):
            raise ValueError("the sentences of a context paragraph are not a list of text")
        # HotpotQA's sentences carry their own spaces, 2WikiMultiHopQA's do not.
        spaced = any(sentence[:1].isspace() for sentence in sentences[1:])
        titles.append(title)
        text = ("" if spaced else " ").join(sentences).strip()
        passages.append(Passage(_blank_to_none(title), text))
    supporting = None
    if row.get("supporting_facts"):
        gold = {title for title, _ in _pairs(row, "supporting_facts", ("sent_id",))}
        if gold <= set(titles):  # the full-wiki setting leaves gold paragraphs out
            supporting = [i for i, title in enumerate(titles) if title in gold]
    name = _optional(row, "_id") or _optional(row, "id")
    return _record(dataset, {**row, "id": name}, passages, row.get("answer"), supporting, name)


def _pairs(row: dict[str, Any], name: str, others: Sequence[str]) -> list[tuple[str, Any]]:
    """[(title, other)] from [[title, other], …], {title: […], other: […]} or [{title, other}, …],
    or JSON text of one of these."""
    value = row.get(name)
    if isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, dict):
        other = next((value[o] for o in others if o in value), None)
        titles = value.get("title")
        if not isinstance(titles, list) or not isinstance(other, list):
            raise ValueError(f"the columns of '{name}' are not lists")
        if len(titles) != len(other):
            raise ValueError(f"the columns of '{name}' differ in length")
        value = list(zip(titles, other, strict=True))
    if not isinstance(value, list):
        raise ValueError(f"no '{name}'" if value is None else f"'{name}' is not a list")
    pairs = []
    for item in value:
        if isinstance(item, dict):
            item = (item.get("title"), next((item[o] for o in others if o in item), None))
        if not isinstance(item, list | tuple) or len(item) != 2 or not isinstance(item[0], str):
            raise ValueError(f"'{name}' is not pairs of a title and {others[0]}")
        pairs.append((item[0], item[1]))
    return pairs


def _record(
    dataset: str,
    row: dict[str, Any],
    passages: Sequence[Passage],
    answers: Any,
    supporting: Sequence[int] | None = None,
    group: str | None = None,
    task: str = "qa",
    question: str | None = None,
) -> Record:
    """Build a Record: empty passages dropped, answers stripped and made unique, id and group
    derived from the texts where the row has none."""
    if question is None:
        question = _text(row, "question")
    kept = [i for i, passage in enumerate(passages) if passage.text]
    gold = None
    if supporting is not None:
        if lost := set(supporting) - set(kept):
            raise ValueError(f"supporting document {min(lost)} is missing or empty")
        gold = tuple(new for new, old in enumerate(kept) if old in set(supporting))
    texts = [passages[i].text for i in kept]
    return Record(
        id=_optional(row, "id") or f"{dataset}-{_digest([question, *texts])}",
        dataset=dataset,
        documents=tuple(passages[i] for i in kept),
        question=question,
        answers=tuple(dict.fromkeys(_strings(answers))),
        supporting=gold,
        group=group or _digest(texts),
        task=task,
    )


def _digest(texts: Sequence[str]) -> str:
    """Same texts, same 16 hex digits, in every process."""
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:16]


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and bool({"role", "from"} & turn.keys())


def _object(value: Any, what: str = "the record") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")
    return value


def _list(row: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(value := row.get(name), list):
        raise ValueError(f"no '{name}'" if value is None else f"'{name}' is not a list")
    return value


def _text(row: dict[str, Any], name: str) -> str:
    if (text := _optional(row, name)) is None:
        raise ValueError(f"no '{name}'")
    return text


def _optional(row: dict[str, Any], name: str) -> str | None:
    """A field's stripped text; None if it is missing, null or blank. Numbers are read as text."""
    value = row.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"'{name}' is not text")
    return _blank_to_none(value)


def _blank_to_none(text: str | None) -> str | None:
    return (text or "").strip() or None


def _passage(row: dict[str, Any], field: str) -> Passage:
    if field not in row:
        raise ValueError(f"a document has no '{field}'")
    return Passage(_optional(row, "title"), _optional(row, field) or "")


def _strings(value: Any) -> list[str]:
    """One text or a list of them, stripped, blank ones left out."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(v, str) for v in values):
        raise ValueError("an answer is not text")
    return [v.strip() for v in values if v.strip()]


def _indices(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise ValueError("'supporting' is not a list of document numbers")
    return value
