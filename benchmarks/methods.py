"""All methods on the same documents in one run: TTFT and its parts, bytes stored and loaded.

TTFT is the paper's: from the request to the documents' KV complete in a cache; what a method keeps
of the documents was made before, and is in memory (`disk`: read and verified from the store).
Bars: C2KV loads at least 3.5 times fewer bytes than full reuse and is ready at least 3 times
earlier; at 4,096 tokens at least 100 times earlier than full recompute.
"""

import tempfile
import time

import torch

from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.extractor import Extractor
from c2kv.models import EMBEDDED, load_backbone
from c2kv.store import FolderStore
from common import arguments, report

METHODS = (
    "recompute",
    "reuse",
    "epic-32",
    "cacheblend-0.15",
    "naive-stride-4",
    "naive-norm-4",
    "hybrid-1",
    "c2kv",
)
SOURCE_TOKENS, SEGMENT, QUESTION = (1024, 2048, 4096, 7168), 512, 32


def document_of(index, backbone):
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, 40_000, (SEGMENT,), generator=generator)
    return Document(f"random {index}", (tuple(ids.tolist()),), backbone.digest)


@torch.inference_mode()
def request(engine, documents, method, forget=False):
    """Seconds of each part of one request up to its first token."""
    if forget:
        engine.forget()
    got = engine.prefill(documents, method)
    start = time.perf_counter()
    cache = got.composition.open(room=QUESTION)
    compose = time.perf_counter() - start
    tokens = torch.zeros(1, QUESTION, dtype=torch.long)
    positions = got.composition.question_position + torch.arange(QUESTION)[None]
    start = time.perf_counter()
    engine.backbone.forward(tokens, positions, cache)
    question = time.perf_counter() - start
    assert not got.extracted, f"{method} made its segments during the request"
    ready = got.load + got.blend + compose
    return {
        "ready": ready,
        "load": got.load,
        "blend": got.blend,
        "compose": compose,
        "question": question,
        "bytes": got.loaded_bytes,
        "recomputed": got.recomputed,
    }


def median_of(values):
    return sorted(values)[len(values) // 2]


def measure(engine, documents, methods, repeats):
    """Medians of every part, methods taken in turns; and the seconds of a request from disk."""
    runs = {method: [] for method in methods}
    disk = {method: [] for method in methods}
    for method in methods:
        request(engine, documents, method)  # warms what is computed once
    for _ in range(repeats):
        for method in methods:
            runs[method].append(request(engine, documents, method))
    for _ in range(repeats):
        for method in methods:
            if method != "recompute":
                disk[method].append(request(engine, documents, method, forget=True)["ready"])
    parts = {m: {k: median_of([r[k] for r in rs]) for k in rs[0]} for m, rs in runs.items()}
    for method, seconds in disk.items():
        parts[method]["disk"] = median_of(seconds) if seconds else parts[method]["ready"]
    return parts


def main():
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(SOURCE_TOKENS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    args = parser.parse_args()
    backbone = load_backbone(EMBEDDED, dtype="float32", device="cpu")
    rows, bars = [], []
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(backbone, Extractor.from_backbone(backbone, 4), FolderStore(folder))
        for tokens in args.tokens:
            documents = [document_of(i, backbone) for i in range(tokens // SEGMENT)]
            stored = {m: engine.extract(documents, m).nbytes for m in args.methods}
            repeats = args.repeats if tokens < 4096 else 1
            parts = measure(engine, documents, args.methods, repeats)
            full = parts["recompute"]
            for method, p in parts.items():
                rows.append(
                    {
                        "source": tokens,
                        "method": method,
                        "ready s": p["ready"],
                        "FR / ready": full["ready"] / p["ready"],
                        "load s": p["load"],
                        "blend s": p["blend"],
                        "compose s": p["compose"],
                        "disk s": p["disk"],
                        "question s": p["question"],
                        "recomputed": p["recomputed"] / full["recomputed"],
                        "stored MB": stored[method] / 1e6,
                        "loaded MB": p["bytes"] / 1e6,
                    }
                )
            reuse, c2kv = parts["reuse"], parts["c2kv"]
            bars += [
                (f"{tokens}: reuse / C2KV, bytes", reuse["bytes"] / c2kv["bytes"], 3.5, True),
                (f"{tokens}: reuse / C2KV, ready", reuse["ready"] / c2kv["ready"], 3.0, True),
            ]
            if tokens == 4096:
                ratio = full["ready"] / c2kv["ready"]
                bars.append((f"{tokens}: full recompute / C2KV, ready", ratio, 100.0, True))
    report(f"methods: {EMBEDDED}, float32, ratio 4, documents of {SEGMENT}", rows, bars, args)


if __name__ == "__main__":
    main()
