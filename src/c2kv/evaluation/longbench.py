"""LongBench v1's English tasks: official prompts and scores, and how each splits into documents.

The prompts are part of the benchmark and stand as published (github.com/THUDM/LongBench, MIT),
misspelling included.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from c2kv.errors import ConfigError, DataError
from c2kv.evaluation import metrics
from c2kv.prompt import QA_INSTRUCTIONS

HUB = "THUDM/LongBench"
# Those of the C2KV comparison.
DEFAULT_TASKS = (
    *("hotpotqa", "2wikimqa", "musique"),
    *("multi_news", "samsum", "qmsum", "gov_report"),
)
# The paper's extractors are trained on the training splits of these: every table says so.
IN_DISTRIBUTION = ("hotpotqa", "2wikimqa")
NOTE = (
    "* in-distribution for extractors trained on HotpotQA and 2WikiMultiHopQA, as the paper's are; "
    "what others were stands above, or on their cards."
)

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based "
    "on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_QUESTION = QA_INSTRUCTIONS[0] + "\n\nQuestion: {input}"


@dataclass(frozen=True)
class Task:
    """prompt: the official one; question: of the `paper` protocol, after the documents; split:
    where documents start (None: at paragraphs); few_shot: no chat template is applied, and only
    the first line counts."""

    prompt: str
    max_new_tokens: int
    metric: str
    question: str = _QUESTION
    split: str | None = None
    few_shot: bool = False


TASKS = {
    "narrativeqa": Task(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        "Answer the question asconcisely as you can, using a single phrase if possible. Do not "
        "provide any explanation.\n\nStory: {context}\n\nNow, answer the question based on the "
        "story asconcisely as you can, using a single phrase if possible. Do not provide any "
        "explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        "f1",
    ),
    "qasper": Task(
        "You are given a scientific article and a question. Answer the question as concisely as "
        "you can, using a single phrase or sentence if possible. If the question cannot be "
        'answered based on the information in the article, write "unanswerable". If the question '
        'is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any '
        "explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as "
        "concisely as you can, using a single phrase or sentence if possible. If the question "
        "cannot be answered based on the information in the article, write "
        '"unanswerable". If the question is a yes/no question, answer "yes", "no", or '
        '"unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:',
        128,
        "f1",
        question="Answer the question from the documents above, as briefly as possible. If they do "
        'not say, write "unanswerable".\n\nQuestion: {input}',
    ),
    "multifieldqa_en": Task(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:",
        64,
        "f1",
    ),
    "hotpotqa": Task(_PASSAGES, 32, "f1", split=r"^Passage \d+:\n"),
    "2wikimqa": Task(_PASSAGES, 32, "f1", split=r"^Passage \d+:\n"),
    "musique": Task(_PASSAGES, 32, "f1", split=r"^Passage \d+:\n"),
    "gov_report": Task(
        "You are given a report by a government agency. Write a one-page summary of the report."
        "\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
        question="Write a one-page summary of the report above.",
    ),
    "qmsum": Task(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        512,
        "rouge_l",
        question="Answer the query from the meeting transcript above, in one or more sentences."
        "\n\nQuery: {input}",
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
        question="Write a one-page summary of all the news above.",
        split=r"^Passage \d+:\n",
    ),
    "trec": Task(
        "Please determine the type of the question below. Here are some examples of questions."
        "\n\n{context}\n{input}",
        64,
        "classification",
        question="Determine the type of the question below, as in the examples above.\n\n{input}",
        split=r"^(?=Question:)",
        few_shot=True,
    ),
    "triviaqa": Task(
        "Answer the question based on the given passage. Only give me the answer and do not output "
        "any other words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        "f1",
        question="Answer the question from the passage below, as in the examples above. Give only "
        "the answer.\n\n{input}",
        split=r"^(?=Passage:\n)",
        few_shot=True,
    ),
    "samsum": Task(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        128,
        "rouge_l",
        question="Summarize the dialogue below into a few short sentences, as in the examples "
        "above.\n\n{input}",
        split=r"^(?=Dialogue:)",
        few_shot=True,
    ),
    "passage_count": Task(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there are "
        "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
        "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
        "duplicates. The output format should only contain the number, such as 1, 2, 3, and so on."
        "\n\nThe final answer is: ",
        32,
        "count",
        question="Some of the paragraphs above may be duplicates. How many different ones are "
        "there? Give only the number.",
        split=r"^(?=Paragraph \d+:)",
    ),
    "passage_retrieval_en": Task(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}"
        "\n\nPlease enter the number of the paragraph that the abstract is from. The answer format "
        'must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        "retrieval",
        question="Which of the paragraphs above is this abstract from? Answer like "
        '"Paragraph 1".\n\nAbstract: {input}',
        split=r"^(?=Paragraph \d+:)",
    ),
}


def task(name: str) -> Task:
    """Raises ConfigError when there is none of that name."""
    if name not in TASKS:
        raise ConfigError(f"LongBench task '{name}' is unknown; use one of {', '.join(TASKS)}")
    return TASKS[name]


def score(name: str, prediction: str, record: dict[str, Any]) -> float:
    """The official score of one sample, 0 to 1: the best over its answers."""
    metric = task(name).metric
    if task(name).few_shot:
        prediction = prediction.lstrip("\n").split("\n")[0]
    best = 0.0
    for answer in record["answers"]:
        if metric == "f1":
            one = metrics.f1(prediction, [answer])
        elif metric == "classification":
            one = metrics.classification(prediction, answer, record["all_classes"])
        else:
            one = getattr(metrics, metric)(prediction, answer)
        best = max(best, one)
    return best


def official_prompt(name: str, record: dict[str, Any]) -> str:
    """The whole prompt, before any cutting and chat template."""
    return task(name).prompt.format(context=record["context"], input=record["input"])


def split_documents(name: str, context: str) -> list[str]:
    """A context as the texts of documents: at the task's own markers (which are dropped where
    they only count passages), else at paragraphs."""
    pattern = task(name).split
    if pattern is None:
        blank = "\n\n" in context
        parts = context.split("\n\n" if blank else "\n")
    else:
        parts = re.split(pattern, context, flags=re.MULTILINE)
    return [part.strip() for part in parts if any(map(str.isalnum, part))]


def load_records(name: str, source: str, limit: int | None = None) -> list[dict[str, Any]]:
    """A task's samples from the folder that holds `NAME.jsonl`, or from the hub (`hub`, or
    `hub:owner/name` of a copy).

    Raises DataError when a sample lacks what the task needs."""
    task(name)
    path = f"{source}/{name}.jsonl"
    try:
        if source == "hub" or source.startswith("hub:"):
            text = _from_hub(source.removeprefix("hub").removeprefix(":") or HUB, name)
        else:
            text = Path(path).read_text(encoding="utf-8")
        # Not splitlines: a context may hold other line separators.
        rows = [json.loads(line) for line in text.split("\n")[:limit] if line.strip()]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"cannot read '{path}' ({reason}); is it LongBench's folder?") from error
    for number, row in enumerate(rows, 1):
        needed = {"input", "context", "answers", "_id"}
        needed |= {"all_classes"} if TASKS[name].metric == "classification" else set()
        # The scores need some, of the form that the benchmark has.
        missing = needed - {key for key, value in row.items() if value not in (None, [])}
        if TASKS[name].metric == "retrieval" and not missing:
            good = all(re.search(r"Paragraph \d+", answer) for answer in row["answers"])
            missing = set() if good else {"answers"}
        if missing:
            raise DataError(f"'{source}', {name} {number}: no '{min(missing)}' in the sample")
    if not rows:
        raise DataError(f"'{source}' holds no samples of {name}")
    return rows


def _from_hub(repository: str, name: str) -> str:
    """A task's samples from the archive that the benchmark is published as. (Its loading script
    is of a kind that `datasets` no longer runs.) Raises OSError, ValueError or KeyError."""
    from huggingface_hub import hf_hub_download

    archive = hf_hub_download(repository, "data.zip", repo_type="dataset")
    with zipfile.ZipFile(archive) as files:
        return files.read(f"data/{name}.jsonl").decode()


def group_texts(
    texts: Sequence[str], lengths: Sequence[int], limit: int, joint: int = 0
) -> list[str]:
    """Neighbouring texts joined (each joint of `joint` tokens) while together they stay within
    `limit` tokens."""
    groups: list[list[str]] = []
    room = 0
    for text, length in zip(texts, lengths, strict=True):
        if groups and joint + length <= room:
            groups[-1].append(text)
            room -= joint + length
        else:
            groups.append([text])
            room = limit - length
    return ["\n\n".join(group) for group in groups]
