"""TTFT of full recompute against C2KV from memory and from disk; decode rate on both caches.

TTFT is the paper's: from the request to the documents' KV complete in a cache, extraction done
before. Warm disk reads and verifies the store's files (in the page cache) on every request.
Bar: decoding on a composed cache is not slower than on a DynamicCache of the same entries (the
two take steps in turns; their medians still differ by 1 or 2 % of noise between runs).
"""

import tempfile
import time

import torch
from transformers import DynamicCache

from c2kv.document import Document
from c2kv.engine import Engine
from c2kv.extractor import Extractor
from c2kv.models import EMBEDDED, load_backbone
from c2kv.store import FolderStore
from common import arguments, interleaved, report

SOURCE_TOKENS, SEGMENT, STEPS = (512, 1024, 2048, 4096, 7168), 512, 24


def document_of(index, backbone):
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, 40_000, (SEGMENT,), generator=generator)
    return Document(f"random {index}", (tuple(ids.tolist()),), backbone.digest)


@torch.inference_mode()
def decode_times(backbone, composition, repeats):
    """Median seconds of a decoding step on each cache, steps of both taken in turns."""
    caches = {"composed": composition.open(room=(repeats + 1) * STEPS)}
    caches["dynamic"] = DynamicCache(config=backbone.config)
    for index, layer in enumerate(caches["composed"].layers):
        caches["dynamic"].update(layer.keys.contiguous(), layer.values.contiguous(), index)
    position = composition.question_position

    def step(cache):
        nonlocal position
        token = torch.zeros(1, 1, dtype=torch.long)
        backbone.forward(token, torch.tensor([[position]]), cache)

    return interleaved(
        {name: lambda cache=cache: step(cache) for name, cache in caches.items()},
        repeats * STEPS // 2,
    )


def main():
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(SOURCE_TOKENS))
    args = parser.parse_args()
    backbone = load_backbone(EMBEDDED, dtype="float32", device="cpu")
    rows, slowdowns = [], []
    with tempfile.TemporaryDirectory() as folder:
        extractor = Extractor.from_backbone(backbone, ratio=4)
        engine = Engine(backbone, extractor, FolderStore(folder))
        for tokens in args.tokens:
            documents = [document_of(i, backbone) for i in range(tokens // SEGMENT)]
            start = time.perf_counter()
            engine.extract(documents)
            extraction = time.perf_counter() - start

            def request(method, forget=False, documents=documents):
                if forget:
                    engine.forget()
                engine.prefill(documents, method).composition.open(room=160)

            medians = interleaved(
                {
                    "recompute": lambda: request("recompute"),
                    "memory": lambda: request("c2kv"),
                    "disk": lambda: request("c2kv", forget=True),
                },
                3 if tokens < 4096 else 1,
            )
            composition = engine.prefill(documents, "c2kv").composition
            steps = decode_times(backbone, composition, args.repeats)
            slowdowns.append(steps["composed"] / steps["dynamic"])
            full = medians["recompute"]
            rows.append(
                {
                    "source": tokens,
                    "entries": composition.entries,
                    "recompute s": full,
                    "c2kv memory s": medians["memory"],
                    "×": full / medians["memory"],
                    "c2kv disk s": medians["disk"],
                    "× ": full / medians["disk"],
                    "extract once s": extraction,
                    "decode/DynamicCache": 1 / slowdowns[-1],
                }
            )
    bars = [("decode step / DynamicCache's, worst", max(slowdowns), 1.02, False)]
    report(f"ttft: {EMBEDDED}, float32, ratio 4, documents of {SEGMENT}", rows, bars, args)


if __name__ == "__main__":
    main()
