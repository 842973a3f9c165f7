"""Training samples: a corpus' records become groups of token ids, in the prompts inference uses.

A sample depends on (seed, index) alone, so any run can be resumed, or split over processes,
without replaying what came before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from c2kv.errors import ConfigError
from c2kv.prompt import (
    QA_INSTRUCTIONS,
    SYSTEM_PROMPTS,
    PromptTemplate,
    render_question,
)
from c2kv.training.corpus import Asked, Corpus, Family, Passage
from c2kv.training.loss import Group, Question

REPEAT_INSTRUCTIONS = (
    "Repeat the document above word for word.",
    "Write out the text above again.",
    "Copy the document above exactly.",
)

CONTINUE_INSTRUCTIONS = (
    "Continue the document above.",
    "Write what comes next in the text above.",
)

_ROUND = 1000


@dataclass(frozen=True)
class SampleOptions:
    """documents: fewest and most documents of a sample, gold ones and distractors from other
    groups of the data (more, where a question alone needs more); questions: most questions that
    share one extraction; document_tokens: longer documents are cut into pieces, as at inference;
    pieces: most neighbouring pieces kept of a gold document, among them one with an answer if any
    is (of a distractor one is kept); answer_tokens: longer answers are cut; passages and
    passage_tokens: number and length of a warm-up's passages."""

    documents: tuple[int, int] = (1, 4)
    questions: int = 4
    document_tokens: int = 512
    pieces: int = 4
    answer_tokens: int = 64
    passages: int = 8
    passage_tokens: int = 96

    def __post_init__(self) -> None:
        low, high = self.documents
        if not 1 <= low <= high:
            raise ConfigError(f"documents {low} to {high} is no range; give two counts like 1 4")


def _gold(family: Family, asked: Sequence[Asked]) -> list[int]:
    """The passages that questions need; all of them, where that is not known."""
    every = range(len(family.passages))
    return sorted({i for one in asked for i in (one.supporting or every)})


class Sampler:
    """Draws groups from corpora. A family's questions share an extraction."""

    def __init__(
        self,
        sources: Sequence[tuple[Corpus, float | None]],
        template: PromptTemplate,
        options: SampleOptions,
        seed: int = 0,
    ):
        """sources: corpora, and how often they are drawn (None: by their number of questions)."""
        self.template = template
        self.options = options
        self._seed = seed
        systems = [PromptTemplate.of(template.tokenizer, s) for s in SYSTEM_PROMPTS]
        self.prefixes = [tuple(system.prefix_ids()) for system in systems]
        self._corpora = [corpus for corpus, _ in sources]
        weights = [
            float(c.questions) if weight is None else weight * bool(c.questions)
            for c, weight in sources
        ]
        self._weights = list(accumulate(weights))
        self._orders: dict[tuple[int, int], NDArray[np.int64]] = {}
        if not self._weights or not self._weights[-1]:
            raise ConfigError("there are no training records; check the data files and weights")
        # How often each corpus is drawn in a round of about this many samples: by its weight.
        shares = [max(1, round(_ROUND * w / self._weights[-1])) if w else 0 for w in weights]
        self._round = np.repeat(np.arange(len(shares)), shares)

    def _draw(self, rng: random.Random) -> tuple[Corpus, Family]:
        """A corpus, and one of its families, as often as it has questions."""
        (corpus,) = rng.choices(self._corpora, cum_weights=self._weights)
        family, _ = corpus.at(int(rng.random() * corpus.questions))
        return corpus, family

    def _next(self, index: int) -> tuple[Corpus, Family, int]:
        """A corpus, and the family and place of the question whose turn it is at sample `index`:
        none has two turns before all of its corpus had one. Corpora are drawn in shuffled rounds,
        so that what each had before is known without replaying it."""
        past, at = divmod(index, len(self._round))
        order = np.random.default_rng([self._seed, past]).permutation(self._round)
        which = int(order[at])
        before = past * np.count_nonzero(self._round == which) + np.count_nonzero(
            order[:at] == which
        )
        corpus = self._corpora[which]
        epoch, place = divmod(int(before), corpus.questions)
        if (which, epoch) not in self._orders:
            self._orders.pop((which, epoch - 1), None)
            order = np.random.default_rng([self._seed, which, epoch]).permutation(corpus.questions)
            self._orders[which, epoch] = order
        return corpus, *corpus.at(int(self._orders[which, epoch][place]))

    def qa(self, index: int) -> Group:
        """Multi-document question answering: the paper's samples."""
        rng = random.Random(f"{self._seed}/qa/{index}")
        corpus, family, turn = self._next(index)
        others = [*family.questions[:turn], *family.questions[turn + 1 :]]
        more = rng.sample(others, min(len(others), self.options.questions - 1))
        asked = [family.questions[turn], *more]
        gold = _gold(family, asked)
        if len(gold) > self.options.documents[1]:  # too many together: ask one question
            gold = _gold(family, asked := asked[:1])
        passages = [corpus.passage(family.passages[i]) for i in gold]
        documents = [self._window(p, rng, asked[0].answers, self.options.pieces) for p in passages]
        asked = [one for one in asked if self._evident(one.answers, passages, documents)]
        count = rng.randint(*self.options.documents)
        for passage in self._distractors(rng, corpus, family, gold, count - len(gold)):
            documents.append(self._window(passage, rng, (), 1))
        numbers = iter(range(sum(map(len, documents))))
        numbered = [[next(numbers) for _ in document] for document in documents]
        questions = []
        for one in asked:
            order = list(numbered)
            rng.shuffle(order)
            content = render_question(one.question, rng.choice(QA_INSTRUCTIONS))
            ids = self.template.question_ids(content)
            answer = self._answer(one.answers[0])
            prefix = rng.choice(self.prefixes)
            questions.append(Question(prefix, tuple(chain(*order)), tuple(ids), answer))
        return Group(tuple(chain(*documents)), tuple(questions))

    def _distractors(
        self, rng: random.Random, corpus: Corpus, family: Family, gold: list[int], count: int
    ) -> list[Passage]:
        """Up to `count` passages: the family's own other ones, then ones of other origins in its
        corpus (in any corpus, where it has no others); none twice."""
        taken = {corpus.passage(family.passages[i]) for i in gold}
        own = [p for i, p in enumerate(family.passages) if i not in gold]
        rng.shuffle(own)
        found: list[Passage] = []
        for _ in range(20 * max(0, count)):  # small data may hold too few
            if len(found) == count:
                break
            if own:
                passage = corpus.passage(own.pop())
            else:
                source, other = corpus, corpus.family(1 + rng.randrange(corpus.families))
                if other.origin == family.origin:
                    source, other = self._draw(rng)
                passage = source.passage(rng.choice(other.passages))
            if passage not in taken:
                taken.add(passage)
                found.append(passage)
        return found

    def passages(self, index: int, repeat: bool) -> Group:
        """Warm-ups, from short passages and their entries alone: repeat each word for word, or
        go on where it was cut."""
        rng = random.Random(f"{self._seed}/{'repeat' if repeat else 'continue'}/{index}")
        pieces: list[tuple[int, ...]] = []
        questions = []
        prefix = self.prefixes[0]
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
        """A stretch of at most `tokens` tokens of a document that answers a question (others may
        be held out), and what follows its first `cut` of them (or its first half, if it is
        shorter)."""
        while True:
            corpus, family = self._draw(rng)
            answering = [family.passages[i] for i in _gold(family, family.questions)]
            ids = self._tokens(corpus.passage(rng.choice(answering)).text)
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
        """The answer as the model would write it, its end-of-turn token included; only as much
        of a long one as is learned, and then no end."""
        ids = self._tokens(text.strip())
        limit = self.options.answer_tokens
        return (
            (*ids, self.template.tokenizer.eos_token_id) if len(ids) <= limit else (*ids[:limit],)
        )

    def _window(
        self, passage: Passage, rng: random.Random, hints: Sequence[str], limit: int
    ) -> tuple[tuple[int, ...], ...]:
        """At most `limit` neighbouring pieces of a passage, one that holds a hint among them if
        any does."""
        pieces = passage.pieces
        if len(pieces) <= limit:
            return pieces
        holding = [i for i, piece in enumerate(pieces) if self._holds(piece, hints)]
        at = rng.choice(holding or range(len(pieces)))
        start = min(max(0, at - rng.randrange(limit)), len(pieces) - limit)
        return pieces[start : start + limit]

    def _evident(
        self,
        answers: Sequence[str],
        passages: Sequence[Passage],
        kept: Sequence[tuple[tuple[int, ...], ...]],
    ) -> bool:
        """Whether what is kept of the passages still holds an answer that they hold. (Answers in
        other words than theirs cannot be told.)"""
        cut = [p for p, pieces in zip(passages, kept, strict=True) if len(pieces) < len(p.pieces)]
        if not any(self._holds(piece, answers) for p in cut for piece in p.pieces):
            return True
        return any(self._holds(piece, answers) for pieces in kept for piece in pieces)

    def _holds(self, piece: tuple[int, ...], texts: Sequence[str]) -> bool:
        text = self.template.tokenizer.decode(piece)
        return any(one in text for one in texts)
