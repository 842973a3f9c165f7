"""The one place that renders prompts: a chat template cut into reusable pieces of token ids.

A prompt is prefix + document pieces + question piece. Tokenised apart, the pieces must equal the
tokenisation of the whole conversation; `PromptTemplate.of` checks that or refuses the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from c2kv.errors import DocumentError, PromptError

# The first of each pool is the default; training draws from all of them.
SYSTEM_PROMPTS = (
    "You are a helpful assistant. Answer questions from the documents you are given.",
    "You answer questions using only the documents provided by the user.",
    "You are a careful reader. The user sends documents, then a question about them.",
    "Read the user's documents and answer the question that follows them.",
)
QA_INSTRUCTIONS = (
    "Answer the question from the documents above, as briefly as possible.",
    "Using the documents above, give a short answer to this question.",
    "Give only the answer, without explanation.",
    "Answer in a few words, based on the documents.",
)

_SENTINELS = ("c2kvDocumentOne", "c2kvDocumentTwo", "c2kvQuestion")
# Plain text around documents where no control tokens separate them. One newline each: two would
# tokenise differently at the end of a piece and in its middle.
_INLINE_LEAD = "The documents:\n"
_PLAIN_BEFORE = "Document:\n"
_PROBE_DOCUMENTS = (
    "The mill at Aldwick was built in 1743.\n\nIt has 3 floors (and a cellar).",
    "“Quoted” text – with ünïcode, 1,234.5 numbers; and a colon:",
    "- a list item\n- another one",
)
_PROBE_QUESTION = "When was the mill built?"


def render_document(text: str, title: str | None = None) -> str:
    """The content of a document's message: its title, if any, on a line of its own."""
    return f"{_clean(title)}\n{_clean(text)}" if title else _clean(text)


def render_question(question: str, instruction: str = QA_INSTRUCTIONS[0]) -> str:
    """The content of the question's message."""
    return f"{instruction}\n\nQuestion: {question.strip()}" if instruction else question.strip()


def _clean(text: str) -> str:
    return text.replace("\r\n", "\n").strip()


@dataclass(frozen=True)
class PromptTemplate:
    """The fixed text around prefix, documents and question, and the tokenizer that reads it.

    layout: `chat` (each document its own user message), `inline` (all in one user message, for
    templates that refuse consecutive ones) or `plain` (no chat template)."""

    tokenizer: Any = field(repr=False, compare=False)
    layout: str
    system: str
    prefix: str
    document_before: str
    document_after: str
    question_before: str
    question_after: str
    lead: str = ""  # inline: plain text between the template's prefix and the first document

    @classmethod
    def of(cls, tokenizer: Any, system: str = SYSTEM_PROMPTS[0]) -> PromptTemplate:
        """Cut the tokenizer's chat template. Raises PromptError if its pieces, tokenised apart,
        differ from the whole, or if the template fails."""
        if not system.strip():
            raise PromptError("the system prompt is empty; give one line, or keep the default")
        if not getattr(tokenizer, "chat_template", None):
            template = _plain(tokenizer, system)
        else:
            template = _chat(tokenizer, system) or _inline(tokenizer, system)
        template._check()
        return template

    @property
    def digest(self) -> str:
        """SHA-256 of the fixed texts (the system prompt left out: documents never see it)."""
        total = hashlib.sha256()
        for text in (self.layout, self.document_before, self.document_after):
            raw = text.encode()
            total.update(len(raw).to_bytes(8, "little") + raw)
        return total.hexdigest()

    def prefix_ids(self) -> list[int]:
        """Token ids of the system turn, BOS included where the template has one."""
        return self._literal(self.prefix)

    def document_ids(self, content: str) -> list[int]:
        """Token ids of one document's piece. Special tokens spelled in it are plain text."""
        return self._piece(self.document_before, content, self.document_after)[0]

    def closing_ids(self) -> list[int]:
        """Token ids that end every document's message; empty where its end is plain text."""
        after = self.document_after
        return [] if self._is_plain_text(after) else self._literal(after)

    def document_pieces(self, content: str, limit: int) -> list[list[int]]:
        """The document's piece cut into parts of at most `limit` tokens, at the last paragraph
        end that keeps a part at least half full, else sentence end, else token. The parts,
        joined, are exactly `document_ids(content)`."""
        ids, starts = self._piece(self.document_before, content, self.document_after)
        return cut(ids, _break_strengths(_clean(content), starts), limit)

    def question_ids(self, content: str) -> list[int]:
        """Token ids of the question's piece, up to where the answer starts."""
        return self._piece(self.question_before, content, self.question_after)[0]

    def conversation(self, documents: Sequence[str], question: str) -> str:
        """The whole prompt as text, rendered by the chat template itself where there is one."""
        documents, question = [_clean(d) for d in documents], _clean(question)
        framed = "".join(self.document_before + d + self.document_after for d in documents)
        if self.layout == "plain":
            return self.prefix + framed + self.question_before + question + self.question_after
        users = [*documents, question]
        if self.layout == "inline":
            users = [self.lead + framed + question]
        if (text := _render(self.tokenizer, self.system, users)) is None:
            raise PromptError("the chat template refused this conversation; check its text")
        return text

    def _literal(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids if text else []

    def _piece(self, before: str, content: str, after: str) -> tuple[list[int], list[int]]:
        """Ids, and for each the start in `content` of its text (negative before it)."""
        content = _clean(content)
        if not content:
            raise DocumentError("the text is empty; leave the document (or question) out")
        head = [] if self._is_plain_text(before) else self._literal(before)
        tail = [] if self._is_plain_text(after) else self._literal(after)
        # Plain surroundings are read together with the text, control tokens apart. What comes
        # before always ends a line: that newline is read too, and its tokens dropped, because
        # some tokenizers treat the start of a string in a way of their own.
        lead = "\n" + ("" if head else before)
        encoded = self.tokenizer(
            lead + content + ("" if tail else after),
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
        )
        offsets = [start for start, _ in encoded.offset_mapping]
        first = next(i for i, start in enumerate(offsets) if start > 0)
        starts = [min(start - len(lead), len(content)) for start in offsets[first:]]
        return (
            head + encoded.input_ids[first:] + tail,
            [-1] * len(head) + starts + [len(content)] * len(tail),
        )

    def _is_plain_text(self, text: str) -> bool:
        return not any(token in text for token in self.tokenizer.get_added_vocab())

    def _check(self) -> None:
        documents = [d.strip() for d in _PROBE_DOCUMENTS]
        whole = self._literal(self.conversation(documents, _PROBE_QUESTION))
        pieces = self.prefix_ids()
        for document in documents:
            pieces += self.document_ids(document)
        pieces += self.question_ids(_PROBE_QUESTION)
        if pieces == whole:
            return
        paired = zip([*pieces, None], [*whole, None], strict=False)
        at = next(i for i, (piece, joint) in enumerate(paired) if piece != joint)
        shown = [self.tokenizer.decode(ids[at : at + 4]) for ids in (pieces, whole)]
        raise PromptError(
            f"the {self.layout} template's pieces tokenise differently from the whole at token "
            f"{at}: {shown[0]!r} apart, {shown[1]!r} joined; documents cannot be reused with it"
        )


def cut(ids: list[int], strengths: list[int], limit: int) -> list[list[int]]:
    """Cut `ids` into parts of at most `limit`. strengths[i] says how good a cut before token i
    is (2 paragraph, 1 sentence, 0 neither); the strongest, then latest, cut in the second half
    of a part wins."""
    if limit < 1:
        raise DocumentError(f"segment length {limit} is not positive; use 512, say")
    parts, start = [], 0
    while len(ids) - start > limit:
        window = range(start + max(1, limit // 2), start + limit + 1)
        end = max(window, key=lambda i: (strengths[i], i))
        parts.append(ids[start:end])
        start = end
    return [*parts, ids[start:]]


def _break_strengths(content: str, starts: list[int]) -> list[int]:
    strengths = []
    for start in starts:
        before = content[max(0, start - 40) : start] if start > 0 else ""
        text = before.rstrip()
        if not text or start >= len(content):
            strengths.append(0)
        elif "\n\n" in before[len(text) :]:
            strengths.append(2)
        elif text[-1] in ".!?。！？" and (
            before != text or content[start].isspace() or text[-1] in "。！？"
        ):
            strengths.append(1)
        else:
            strengths.append(0)
    return strengths


def _render(tokenizer: Any, system: str, users: Sequence[str], answer: bool = True) -> str | None:
    """The conversation as text, or None if the template refuses it."""
    from jinja2.exceptions import TemplateError

    turns = [{"role": "system", "content": system}] if system else []
    turns += [{"role": "user", "content": content} for content in users]
    try:
        # Templates without a thinking mode ignore the switch.
        return tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=answer, enable_thinking=False
        )
    except (TemplateError, LookupError, TypeError, ValueError, ArithmeticError):
        return None  # a template is a program: these are its ways to say no


def _chat(tokenizer: Any, system: str) -> PromptTemplate | None:
    """The chat layout, or None if the template refuses or merges consecutive user messages."""
    one, two, question = _SENTINELS
    prefix = _render(tokenizer, system, [], answer=False)
    text = _render(tokenizer, system, [one, two, question])
    if prefix is None or text is None or not text.startswith(prefix):
        return None
    if any(text.count(s) != 1 for s in _SENTINELS):
        return None
    before, rest = text[len(prefix) :].split(one)
    between, rest = rest.split(two)
    last, after_question = rest.split(question)
    if not before or not between.endswith(before) or last != between:
        return None
    return PromptTemplate(
        tokenizer=tokenizer,
        layout="chat",
        system=system,
        prefix=prefix,
        document_before=before,
        document_after=between[: -len(before)],
        question_before=before,
        question_after=after_question,
    )


def _inline(tokenizer: Any, system: str) -> PromptTemplate:
    question, lead = _SENTINELS[2], _INLINE_LEAD
    text = _render(tokenizer, system, [question])
    if text is None:  # some templates have no system role: it opens the user message then
        system, lead = "", f"{system}\n{lead}"
        text = _render(tokenizer, system, [question])
    if text is None or text.count(question) != 1:
        raise PromptError(
            "the chat template refuses, drops or repeats a single user message; "
            "give a tokenizer with a working template, or one without any"
        )
    prefix, after = text.split(question)
    return PromptTemplate(
        tokenizer=tokenizer,
        layout="inline",
        system=system,
        prefix=prefix + lead,
        lead=lead,
        document_before=_PLAIN_BEFORE,
        document_after="\n",
        question_before="",
        question_after=after,
    )


def _plain(tokenizer: Any, system: str) -> PromptTemplate:
    return PromptTemplate(
        tokenizer=tokenizer,
        layout="plain",
        system=system,
        prefix=(tokenizer.bos_token or "") + (system or "Documents") + "\n",
        document_before=_PLAIN_BEFORE,
        document_after="\n",
        question_before="",
        question_after="\nAnswer:",
    )
