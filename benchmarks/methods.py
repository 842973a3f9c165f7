"""All methods on the same documents in one run: TTFT and its parts, bytes stored and loaded.

TTFT is the paper's: from the request to the documents' KV complete in a cache; what a method keeps
of the documents was made before, and is in memory (`disk`: read and verified from the store). The
backbone is not tuned for blocks, nor the extractors trained: that changes no figure here.
Bars: C2KV loads at least 3.5 times fewer bytes than full reuse and is ready at least 3 times
earlier; at 4,096 tokens at least 100 times earlier than full recompute.
"""

import tempfile

from c2kv.engine import Engine
from c2kv.evaluation.latency import measure
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
    "block-unchecked",
    "hybrid-1",
    "c2kv",
    "c2kv-residual",
    "anchor",
)
VARIANTS = ("plain", "residual", "anchor")
SOURCE_TOKENS, SEGMENT = (1024, 2048, 4096, 7168), 512


def main():
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(SOURCE_TOKENS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    args = parser.parse_args()
    backbone = load_backbone(EMBEDDED, dtype="float32", device="cpu")
    rows, bars = [], []
    with tempfile.TemporaryDirectory() as folder:
        extractors = [Extractor.from_backbone(backbone, 4, v) for v in VARIANTS]
        engine = Engine(backbone, extractors, FolderStore(folder))
        for tokens in args.tokens:
            count = tokens // SEGMENT
            costs, failed = measure(engine, args.methods, tokens, count, args.repeats, cold=False)
            if failed:
                raise SystemExit(f"{tokens} source tokens: {failed}")
            by_name = {cost.method: cost for cost in costs}
            full, reuse, c2kv = (by_name[name] for name in ("recompute", "reuse", "c2kv"))
            for cost in costs:
                rows.append(
                    {
                        "source": tokens,
                        "method": cost.method,
                        "ready s": cost.ready.median,
                        "FR / ready": cost.speedup,
                        "load s": cost.load,
                        "blend s": cost.blend,
                        "compose s": cost.compose,
                        "disk s": cost.disk.median,
                        "question s": cost.question,
                        "recomputed": cost.recomputed / full.recomputed,
                        "stored MB": cost.stored_bytes / 1e6,
                        "loaded MB": cost.loaded_bytes / 1e6,
                    }
                )
            ratio = reuse.ready.median / c2kv.ready.median
            fewer = reuse.loaded_bytes / c2kv.loaded_bytes
            bars += [
                (f"{tokens}: reuse / C2KV, bytes", fewer, 3.5, True),
                (f"{tokens}: reuse / C2KV, ready", ratio, 3.0, True),
            ]
            if tokens == 4096:
                bars.append((f"{tokens}: full recompute / C2KV, ready", c2kv.speedup, 100.0, True))
    report(f"methods: {EMBEDDED}, float32, ratio 4, documents of {SEGMENT}", rows, bars, args)


if __name__ == "__main__":
    main()
