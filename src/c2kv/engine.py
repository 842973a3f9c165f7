"""Engine, the facade users meet: add documents, then ask questions about any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from c2kv.backbone import Backbone
from c2kv.composition import check_positions
from c2kv.decode import Decoded, DecodingOptions, DecodingTimes, decode
from c2kv.document import Document
from c2kv.errors import DocumentError
from c2kv.extractor import Extractor
from c2kv.libraries import Libraries, choose_extractor
from c2kv.library import DEFAULT_MEMORY_BYTES, Retrieval, SegmentLibrary
from c2kv.methods.base import Method, Prefilled
from c2kv.methods.recompute import prefill
from c2kv.models import load_backbone
from c2kv.prompt import SYSTEM_PROMPTS, PromptTemplate, render_document, render_question
from c2kv.report import Report
from c2kv.rotary import warm_up
from c2kv.store import FolderStore

DEFAULT_SEGMENT_TOKENS = 512


@dataclass(frozen=True)
class Answer:
    """The text of an answer, its tokens, and the report of how it came about."""

    text: str
    token_ids: list[int]
    report: Report


class Engine:
    """A frozen backbone, an extractor, and the segments of the documents added so far.

    >>> engine = Engine.load("smollm2-135m", untrained=True)  # doctest: +SKIP
    >>> handbook = engine.add(open("handbook.txt").read())  # doctest: +SKIP
    >>> engine.ask("Who founded the firm?", [handbook]).text  # doctest: +SKIP
    """

    def __init__(
        self,
        backbone: Backbone,
        extractor: Extractor | Sequence[Extractor] | None,
        store: FolderStore | None = None,
        system: str = SYSTEM_PROMPTS[0],
        segment_tokens: int = DEFAULT_SEGMENT_TOKENS,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ):
        """extractor: of several, methods that name a variant use the first of it, others the
        first of all. memory_bytes: of segments kept in memory, of each kind in use."""
        extractors = [extractor] if isinstance(extractor, Extractor) else list(extractor or ())
        self.backbone = backbone
        self.template = PromptTemplate.of(backbone.tokenizer, system)
        self.extractor = extractors[0] if extractors else None
        self.segment_tokens = segment_tokens
        self.libraries = Libraries(backbone, extractors, self.template.digest, store, memory_bytes)
        self._prefix = prefill(backbone, self.template.prefix_ids())
        warm_up(backbone.dtype, backbone.device)

    @property
    def library(self) -> SegmentLibrary:
        """The compressed segments. Raises MissingExtractorError without an extractor."""
        return self.libraries.compressed()

    def method(self, name: str) -> Method:
        """A method of `c2kv.methods.registry` by name, ready for this engine's documents."""
        return self.libraries.method(name)

    @property
    def untrained(self) -> bool:
        """Whether compressed answers mean nothing: the extractor was never trained."""
        return self.extractor is not None and not self.extractor.trained

    @classmethod
    def load(
        cls,
        model: str,
        extractor: str | Path | Sequence[str | Path] | None = None,
        *,
        untrained: bool = False,
        ratio: int | None = None,
        variant: str | None = None,
        store: str | Path | None = None,
        dtype: str = "auto",
        device: str = "auto",
        system: str = SYSTEM_PROMPTS[0],
        segment_tokens: int = DEFAULT_SEGMENT_TOKENS,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> Engine:
        """Load a backbone and an extractor: a folder, the name of one in the box, or a hub id (or
        several); by default, the first in the box that is for this backbone (and `ratio` and
        `variant`).

        ratio: one of those the extractor was trained for. untrained: make a fresh extractor of
        `ratio` and `variant` (default 4, plain) instead; its answers from compressed documents
        mean nothing, and say so. Without any, only methods that need no extractor work.
        memory_bytes: of segments kept in memory, of each kind in use. Raises every error of
        `load_backbone` and `Extractor.from_pretrained`."""
        backbone = load_backbone(model, dtype=dtype, device=device)
        one = extractor is None or isinstance(extractor, str | Path)
        sources: Any = [extractor] if one else extractor
        chosen = [choose_extractor(backbone, s, untrained, ratio, variant) for s in sources]
        made = [x for x in chosen if x is not None]
        opened = None if store is None else FolderStore(store)
        return cls(backbone, made, opened, system, segment_tokens, memory_bytes)

    def forget(self) -> None:
        """Drop all segments that memory holds (not the store): the next request reads from disk."""
        self.libraries.forget()

    def document(self, text: str, name: str = "", title: str | None = None) -> Document:
        """Tokenise and cut a document, without extracting it. Raises DocumentError if empty."""
        try:
            if not any(map(str.isalnum, text)):
                raise DocumentError("it holds no letter or digit to read; leave it out")
            content = render_document(text, title)
            pieces = self.template.document_pieces(content, self.segment_tokens)
        except DocumentError as error:
            raise DocumentError(f"document '{name}': {error}" if name else str(error)) from error
        return Document(name, tuple(map(tuple, pieces)), self.backbone.digest)

    def add(self, text: str, name: str = "", title: str | None = None) -> Document:
        """A document, extracted and stored, ready to be asked about."""
        document = self.document(text, name, title)
        self.extract([document])
        return document

    def extract(self, documents: Sequence[Document], method: str = "c2kv") -> Retrieval:
        """Make sure that all a method keeps of the documents is stored."""
        return self.method(method).prepare(documents)

    @overload
    def ask(self, question: str, documents: Sequence[Document], **kwargs: Any) -> Answer: ...
    @overload
    def ask(
        self, question: Sequence[str], documents: Sequence[Document], **kwargs: Any
    ) -> list[Answer]: ...
    def ask(
        self,
        question: str | Sequence[str],
        documents: Sequence[Document],
        *,
        method: str = "c2kv",
        on_text: Callable[[int, str], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> Answer | list[Answer]:
        """Answer one question, or several as one batch over the same composition.

        options: those of DecodingOptions; `on_text(index, text)` streams each answer.
        Raises DocumentError for empty questions, ContextOverflowError before decoding."""
        single = isinstance(question, str)
        questions = [question] if isinstance(question, str) else list(question)
        ids, drawn = self.check(questions, documents, **options)
        prefilled = self.prefill(documents, method)
        streams = [_TextStream(self.backbone.tokenizer) for _ in ids]

        def on_token(row: int, token: int) -> None:
            if on_text is not None and (text := streams[row].push(token)):
                on_text(row, text)

        decoded, times = decode(prefilled.composition, ids, drawn, on_token, cancelled)
        answers = []
        for row, (one, asked) in enumerate(zip(decoded, ids, strict=True)):
            if on_text is not None and (rest := streams[row].flush()):
                on_text(row, rest)
            text = self.backbone.tokenizer.decode(one.token_ids, skip_special_tokens=True)
            report = self._report(method, documents, prefilled, one, times, len(asked), len(ids))
            answers.append(Answer(text.strip(), one.token_ids, report))
        return answers[0] if single else answers

    def prefill(self, documents: Sequence[Document], method: str = "c2kv") -> Prefilled:
        """The composition of these documents, in this order, by this method."""
        for document in documents:
            if document.backbone != self.backbone.digest:
                raise DocumentError(
                    f"document '{document.name}' was read by another model "
                    f"({document.backbone[:16]}); read it with this engine"
                )
        return self.method(method).prefill(self._prefix, documents)

    def check(
        self, questions: Sequence[str], documents: Sequence[Document], **options: Any
    ) -> tuple[list[list[int]], DecodingOptions]:
        """What `ask` checks before any work: the questions' token ids and the options.

        Raises DocumentError for empty questions, ConfigError for bad options,
        ContextOverflowError when positions would not suffice."""
        drawn = DecodingOptions.of(self.backbone, **options)
        ids = [self.template.question_ids(render_question(q)) for q in questions if q.strip()]
        if len(ids) != len(questions) or not ids:
            raise DocumentError("a question is empty; ask something")
        spans = len(self._prefix.prefix_ids) + sum(d.tokens for d in documents)
        check_positions(self.backbone, spans, max(map(len, ids)) + drawn.max_new_tokens)
        return ids, drawn

    def _report(
        self,
        method: str,
        documents: Sequence[Document],
        prefilled: Prefilled,
        decoded: Decoded,
        times: DecodingTimes,
        question_tokens: int,
        batch: int,
    ) -> Report:
        composition, used = prefilled.composition, self.method(method)
        maker = used.maker
        return Report(
            method=method,
            model=self.backbone.name,
            backbone_digest=self.backbone.digest,
            extractor_digest=(maker and maker.digest) or None,
            untrained=maker is not None and maker.untrained,
            ratio=used.ratio,
            dtype=str(self.backbone.dtype).removeprefix("torch."),
            device=str(self.backbone.device),
            documents=len(documents),
            segments=prefilled.segments,
            segments_from_memory=prefilled.from_memory,
            segments_from_disk=prefilled.from_disk,
            segments_extracted=prefilled.extracted,
            source_tokens=composition.question_position,
            entries=composition.entries,
            kv_bytes=composition.nbytes,
            loaded_bytes=prefilled.loaded_bytes,
            recomputed=prefilled.recomputed,
            ttft=prefilled.seconds + times.compose,
            load=prefilled.load,
            extract=prefilled.extract,
            blend=prefilled.blend,
            compose=prefilled.place + times.compose,
            question_prefill=times.question,
            question_tokens=question_tokens,
            new_tokens=len(decoded.token_ids),
            decode_tokens_per_second=times.step_tokens / times.steps if times.step_tokens else None,
            batch=batch,
            finish_reason=decoded.finish_reason,
        )


class _TextStream:
    """Turns tokens into text as it becomes certain: a character may need several tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._sent = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return "" if text.endswith("\ufffd") else self._take(text)

    def flush(self) -> str:
        return self._take(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _take(self, text: str) -> str:
        new, self._sent = text[self._sent :], len(text)
        return new
