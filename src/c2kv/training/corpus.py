"""A corpus: a source's records, tokenised once, in an SQLite file that is read as it is needed."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from c2kv.errors import DataError
from c2kv.paths import cache_dir
from c2kv.prompt import PromptTemplate, render_document
from c2kv.training.recipe import DataSource
from c2kv.training.records import BadRecord, Record, read_records

_VERSION = 2
_SCHEMA = """
CREATE TABLE passages (id INTEGER PRIMARY KEY, key BLOB UNIQUE, text TEXT, pieces BLOB);
CREATE TABLE families (
  id INTEGER PRIMARY KEY, key BLOB UNIQUE, passages TEXT, origin TEXT, first INTEGER
);
CREATE TABLE questions (family INTEGER, question TEXT, answers TEXT, supporting TEXT);
CREATE INDEX of_family ON questions (family);
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER);
CREATE TABLE bad (record TEXT);
"""


@dataclass(frozen=True)
class Passage:
    """text without its title; pieces: token ids of the whole document, cut as at inference."""

    text: str
    pieces: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Asked:
    """A record's question. supporting: indices into its family's passages, None if unknown."""

    question: str
    answers: tuple[str, ...]
    supporting: tuple[int, ...] | None


@dataclass(frozen=True)
class Family:
    """Questions of a source over the same passages (ids of `Corpus.passage`), and what these
    were taken from."""

    passages: tuple[int, ...]
    origin: str
    questions: tuple[Asked, ...]


class HeldOut:
    """Questions, and passages that answer one, which training data must not ask or answer from.
    (As a distractor such a passage teaches none of its answers.)"""

    def __init__(self, sources: Sequence[DataSource] = ()):
        held: set[bytes] = set()
        for source in sources:
            for record in read_records(source.source, source.format, source.split, _ignore):
                held.update(map(_key, _texts(record)))
        self._held = held
        self.digest = hashlib.sha256(b"".join(sorted(held))).hexdigest()

    def allows(self, record: Record) -> bool:
        return self._held.isdisjoint(map(_key, _texts(record)))


def _texts(record: Record) -> list[str]:
    gold = record.supporting or range(len(record.documents))
    return [record.question.strip(), *(record.documents[i].text.strip() for i in gold)]


def _ignore(_: BadRecord) -> None:
    """Bad records are counted where the data itself is read."""


def _key(*texts: str) -> bytes:
    return hashlib.sha256("\0".join(texts).encode()).digest()[:16]


class Corpus:
    """questions, families: how many; bad: records that could not be used (unanswerable ones
    included), and first_bad: where and why; excluded: those that were held out."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            facts = dict(self._db.execute("SELECT name, value FROM facts"))
            ((self.bad,),) = self._db.execute("SELECT COUNT(*) FROM bad")
            self.first_bad = [r for (r,) in self._db.execute("SELECT record FROM bad LIMIT 1")]
        except sqlite3.Error as error:
            raise DataError(f"corpus '{path}' cannot be read ({error}); remove it") from error
        self.questions: int = facts["questions"]
        self.families: int = facts["families"]
        self.excluded: int = facts["excluded"]

    @classmethod
    def of(
        cls,
        source: DataSource,
        template: PromptTemplate,
        document_tokens: int,
        held_out: HeldOut,
    ) -> Corpus:
        """The corpus of a source, made on first use: kept in the cache folder, under a name that
        changes with the file, the tokenizer and everything else that decides what is in it.

        Raises what reading records raises."""
        what: list[Any] = [_VERSION, source.source, source.format, source.split]
        if (file := Path(source.source)).is_file():
            status = file.stat()
            what += [str(file.resolve()), status.st_size, status.st_mtime_ns]
        what += [template.tokenizer.backend_tokenizer.to_str(), template.digest]
        what += [document_tokens, held_out.digest]
        name = file.name.split(".")[0].replace(":", "-")
        path = cache_dir() / "corpora" / f"{name}-{_key(json.dumps(what)).hex()}.sqlite"
        if not path.exists():
            bad: list[BadRecord] = []
            records = read_records(source.source, source.format, source.split, bad.append)
            bar = tqdm(records, f"tokenising {name}", unit="record", leave=False, disable=None)
            build(path, bar, template, document_tokens, held_out, bad)
        return cls(path)

    def at(self, question: int) -> tuple[Family, int]:
        """The family that holds a question, and its place there; those of a family are numbered
        in a row."""
        query = "SELECT id, first FROM families WHERE first <= ? ORDER BY first DESC LIMIT 1"
        ((number, first),) = self._db.execute(query, (question,))
        return self.family(number), question - first

    def family(self, number: int) -> Family:
        query = "SELECT passages, origin FROM families WHERE id = ?"
        ((passages, origin),) = self._db.execute(query, (number,))
        query = (
            "SELECT question, answers, supporting FROM questions WHERE family = ? ORDER BY rowid"
        )
        asked = []
        for question, answers, supporting in self._db.execute(query, (number,)):
            where = json.loads(supporting)
            where = None if where is None else tuple(where)
            asked.append(Asked(question, tuple(json.loads(answers)), where))
        return Family(tuple(json.loads(passages)), origin, tuple(asked))

    def passage(self, number: int) -> Passage:
        query = "SELECT text, pieces FROM passages WHERE id = ?"
        ((text, raw),) = self._db.execute(query, (number,))
        return Passage(text, _unpack(raw))


def build(
    path: Path,
    records: Iterable[Record],
    template: PromptTemplate,
    document_tokens: int,
    held_out: HeldOut,
    bad: Sequence[BadRecord] = (),
) -> None:
    """Write the corpus of `records` to `path`; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    db = sqlite3.connect(partial)
    try:
        db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + _SCHEMA)
        excluded = 0
        for record in records:
            if held_out.allows(record):
                _insert(db, record, template, document_tokens)
            else:
                excluded += 1
        sizes = db.execute("SELECT family, COUNT(*) FROM questions GROUP BY family ORDER BY family")
        first = 0
        for family, size in sizes.fetchall():
            db.execute("UPDATE families SET first = ? WHERE id = ?", (first, family))
            first += size
        db.execute("CREATE INDEX in_a_row ON families (first)")
        ((families,),) = db.execute("SELECT COUNT(*) FROM families")
        facts = {"questions": first, "families": families, "excluded": excluded}
        db.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
        db.executemany("INSERT INTO bad VALUES (?)", [(str(one),) for one in bad])
        db.commit()
        db.close()
        os.replace(partial, path)
    finally:
        db.close()
        partial.unlink(missing_ok=True)


def _insert(db: sqlite3.Connection, record: Record, template: PromptTemplate, limit: int) -> None:
    ids = []
    for passage in record.documents:
        key = _key(passage.title or "", passage.text)
        found = db.execute("SELECT id FROM passages WHERE key = ?", (key,)).fetchone()
        if found is None:
            content = render_document(passage.text, passage.title)
            pieces = _pack(template.document_pieces(content, limit))
            row = (key, passage.text, pieces)
            query = "INSERT INTO passages (key, text, pieces) VALUES (?, ?, ?) RETURNING id"
            found = db.execute(query, row).fetchone()
        ids.append(found[0])
    packed = json.dumps(ids)
    key = _key(packed)
    found = db.execute("SELECT id FROM families WHERE key = ?", (key,)).fetchone()
    if found is None:
        query = "INSERT INTO families (key, passages, origin) VALUES (?, ?, ?) RETURNING id"
        found = db.execute(query, (key, packed, record.group)).fetchone()
    asked = (record.question, json.dumps(record.answers), json.dumps(record.supporting))
    db.execute("INSERT INTO questions VALUES (?, ?, ?, ?)", (found[0], *asked))


def _pack(pieces: Sequence[Sequence[int]]) -> bytes:
    """Number of pieces, their lengths, their ids."""
    flat = [len(pieces), *map(len, pieces), *(token for piece in pieces for token in piece)]
    return np.array(flat, np.int32).tobytes()


def _unpack(raw: bytes) -> tuple[tuple[int, ...], ...]:
    count, *rest = np.frombuffer(raw, np.int32).tolist()
    pieces, at = [], count
    for length in rest[:count]:
        pieces.append(tuple(rest[at : at + length]))
        at += length
    return tuple(pieces)
