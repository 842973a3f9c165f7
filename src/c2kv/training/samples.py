"""Training samples: records become groups of token ids, in the prompts inference uses.

A sample depends on (seed, index) alone, so any run can be resumed, or split over processes,
without replaying what came before.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from c2kv.errors import ConfigError
from c2kv.prompt import (
    QA_INSTRUCTIONS,
    SYSTEM_PROMPTS,
    PromptTemplate,
    render_document,
    render_question,
)
from c2kv.training.loss import Group, Question
from c2kv.training.records import Passage, Record

REPEAT_INSTRUCTIONS = (
    "Repeat the document above word for word.",
    "Write out the text above again.",
    "Copy the document above exactly.",
)


CONTINUE_INSTRUCTIONS = (
    "Continue the document above.",
    "Write what comes next in the text above.",
)


@dataclass(frozen=True)
class SampleOptions:
    """documents: fewest and most documents of a sample, gold ones and distractors from other
    groups of the data; questions: most questions that share one extraction; document_tokens:
    longer documents are cut, as at inference, and the piece with the answer is kept; passages
    and passage_tokens: number and length of a warm-up's passages."""

    documents: tuple[int, int] = (1, 4)
    questions: int = 4
    document_tokens: int = 512
    answer_tokens: int = 64
    passages: int = 8
    passage_tokens: int = 96

    def __post_init__(self) -> None:
        low, high = self.documents
        if not 1 <= low <= high:
            raise ConfigError(f"documents {low} to {high} is no range; give two counts like 1 4")


class Sampler:
    """Draws groups from sources of records. Records of a source whose documents are the same
    form a family, and share their questions."""

    def __init__(
        self,
        sources: Sequence[tuple[Sequence[Record], float | None]],
        template: PromptTemplate,
        options: SampleOptions,
        seed: int = 0,
    ):
        """sources: records, and how often they are drawn (None: by their number)."""
        self.template = template
        self.options = options
        self._seed = seed
        self._systems = [PromptTemplate.of(template.tokenizer, s) for s in SYSTEM_PROMPTS]
        self._sources: list[tuple[list[list[Record]], list[int]]] = []
        for records, _ in sources:
            families: dict[tuple[Passage, ...], list[Record]] = defaultdict(list)
            for record in records:
                families[record.documents].append(record)
            found = list(families.values())
            self._sources.append((found, list(accumulate(map(len, found)))))
        weights = [float(len(r)) if w is None else w * bool(r) for r, w in sources]
        self._weights = list(accumulate(weights))
        if not self._weights or not self._weights[-1]:
            raise ConfigError("there are no training records; check the data files and weights")

    def _draw(self, rng: random.Random) -> tuple[list[list[Record]], list[Record]]:
        """A source's families, and one of them."""
        families, sizes = rng.choices(self._sources, cum_weights=self._weights)[0]
        return families, rng.choices(families, cum_weights=sizes)[0]

    def qa(self, index: int) -> Group:
        """Multi-document question answering: the paper's samples."""
        rng = random.Random(f"{self._seed}/qa/{index}")
        families, family = self._draw(rng)
        asked = rng.sample(family, min(len(family), self.options.questions))
        first = asked[0]
        needed = sorted({i for r in asked for i in (r.supporting or range(len(r.documents)))})
        gold = needed[: self.options.documents[1]]
        texts = [render_document(p.text, p.title) for p in (first.documents[i] for i in gold)]
        hints = [a for r in asked for a in r.answers]
        pieces = [self._piece(text, rng, hints) for text in texts]
        count = rng.randint(*self.options.documents)
        for text in self._distractors(rng, families, first, gold, count - len(pieces)):
            pieces.append(self._piece(text, rng, []))
        questions = []
        for record in asked:
            order = list(range(len(pieces)))
            rng.shuffle(order)
            content = render_question(record.question, rng.choice(QA_INSTRUCTIONS))
            ids = self.template.question_ids(content)
            answer = self._answer(record.answers[0])
            prefix = tuple(rng.choice(self._systems).prefix_ids())
            questions.append(Question(prefix, tuple(order), tuple(ids), answer))
        return Group(tuple(pieces), tuple(questions))

    def _distractors(
        self,
        rng: random.Random,
        families: list[list[Record]],
        record: Record,
        gold: list[int],
        count: int,
    ) -> list[str]:
        """Up to `count` texts: the record's own other documents, then ones of other groups of
        its source (of any source, where it has no others); none twice."""
        taken = {record.documents[i] for i in gold}
        own = [p for i, p in enumerate(record.documents) if i not in gold]
        rng.shuffle(own)
        found: list[Passage] = []
        for _ in range(20 * max(0, count)):  # small data may hold too few
            if len(found) == count:
                break
            if own:
                passage = own.pop()
            else:
                other = rng.choice(families)[0]
                if other.group == record.group:
                    _, (other, *_) = self._draw(rng)
                passage = rng.choice(other.documents)
            if passage not in taken:
                taken.add(passage)
                found.append(passage)
        return [render_document(p.text, p.title) for p in found]

    def passages(self, index: int, repeat: bool) -> Group:
        """Warm-ups, from short passages and their entries alone: repeat each word for word, or
        go on where it was cut."""
        rng = random.Random(f"{self._seed}/{'repeat' if repeat else 'continue'}/{index}")
        pieces: list[tuple[int, ...]] = []
        questions = []
        prefix = tuple(self._systems[0].prefix_ids())
        for number in range(self.options.passages):
            length = self.options.passage_tokens
            text, rest = self._passage(rng, length if repeat else 2 * length, length)
            pieces.append(tuple(self.template.document_ids(text)))
            instructions = REPEAT_INSTRUCTIONS if repeat else CONTINUE_INSTRUCTIONS
            ids = self.template.question_ids(rng.choice(instructions))
            answer = tuple(self._tokens(text if repeat else rest))
            questions.append(Question(prefix, (number,), tuple(ids), answer))
        return Group(tuple(pieces), tuple(questions))

    def _passage(self, rng: random.Random, tokens: int, cut: int) -> tuple[str, str]:
        """A stretch of at most `tokens` tokens of some document, and what follows its first
        `cut` of them (or its first half, if it is shorter)."""
        while True:
            _, (record, *_) = self._draw(rng)
            ids = self._tokens(rng.choice(record.documents).text)
            start = rng.randrange(max(1, len(ids) - tokens))
            ids = ids[start : start + tokens]
            at = min(cut, len(ids) // 2) if tokens > cut else len(ids)
            text, rest = (self.template.tokenizer.decode(i).strip() for i in (ids[:at], ids[at:]))
            if any(map(str.isalnum, text)) and (rest or tokens == cut):
                return text, rest

    def _tokens(self, text: str) -> list[int]:
        tokenizer = self.template.tokenizer
        return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def _answer(self, text: str) -> tuple[int, ...]:
        """The answer as the model would write it, its end-of-turn token included."""
        ids = self._tokens(text.strip())[: self.options.answer_tokens]
        return (*ids, self.template.tokenizer.eos_token_id)

    def _piece(self, text: str, rng: random.Random, hints: Sequence[str]) -> tuple[int, ...]:
        pieces = self.template.document_pieces(text, self.options.document_tokens)
        if len(pieces) == 1:
            return tuple(pieces[0])
        decoded = [self.template.tokenizer.decode(piece) for piece in pieces]
        holding = [p for p, t in zip(pieces, decoded, strict=True) if any(h in t for h in hints)]
        return tuple(rng.choice(holding or pieces))
