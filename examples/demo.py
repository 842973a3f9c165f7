"""The demo: documents become segments, are stored, composed in any order, and answered from.

Run it by `make demo`. Everything printed is measured in this run.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm
from transformers.utils import logging

from c2kv import Engine
from c2kv.cli.common import human_bytes, human_seconds, table

HERE = Path(__file__).parent
ASKED = ("single-01", "single-03", "exact-01")


def main():
    logging.disable_progress_bar()
    questions = [json.loads(line) for line in (HERE / "questions.jsonl").read_text().splitlines()]
    asked = [q for q in questions if q["id"] in ASKED]
    print("Loading the embedded model (fetched and converted on the first run) …")
    with tempfile.TemporaryDirectory() as store:
        engine = Engine.load("smollm2-135m", untrained=True, store=store)

        documents, start = [], time.perf_counter()
        for path in tqdm(sorted((HERE / "documents").glob("*.txt")), "extracting", leave=False):
            documents.append(engine.add(path.read_text(encoding="utf-8"), path.name))
        seconds = time.perf_counter() - start
        stored = engine.library.store
        tokens = sum(d.tokens for d in documents)
        entries = sum(s.entries for s in stored.entries())
        print(
            f"\n1. Read once: {len(documents)} documents, {tokens} tokens, became "
            f"{len(stored.entries())} segments of {entries} entries "
            f"({human_bytes(stored.nbytes)} on disk) in {human_seconds(seconds)}."
        )

        print("\n2. Composed in two orders, from the same segments, and asked as one batch:")
        texts = [q["question"] for q in asked]
        engine.forget()
        answers = {
            "c2kv, from disk": engine.ask(texts, documents, max_new_tokens=24),
            "c2kv, reversed": engine.ask(texts, documents[::-1], max_new_tokens=24),
            "full recompute": engine.ask(texts, documents, method="recompute", max_new_tokens=24),
        }
        for index, question in enumerate(asked):
            print(f"\n   {question['question']}  (expected: {question['answers'][0]})")
            for name, found in answers.items():
                print(f"     {name:16} {found[index].text!r}")
        if answers["c2kv, from disk"][0].report.untrained:
            print(
                "\n   The extractor is UNTRAINED: its figures are real, its answers mean nothing."
            )

        print("\n3. What it cost:\n")
        full = answers["full recompute"][0].report
        rows = []
        for name, found in answers.items():
            r = found[0].report
            cost = [human_bytes(r.kv_bytes), human_seconds(r.ttft), f"{full.ttft / r.ttft:.0f}×"]
            rows.append([name, str(r.source_tokens), str(r.entries), *cost])
        header = ["method", "source tokens", "KV entries", "KV bytes", "TTFT", "faster"]
        print(table(rows, header))
        print("\nTTFT: from the request to the documents' KV complete, ready for the question.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
