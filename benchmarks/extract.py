"""Extraction against plain prefill of the same tokens, and its extra memory over length.

Bar: at 1,024 tokens and ratio 4, at least 0.70 of prefill's tokens/s (about 0.85 is the limit: a
quarter more tokens pass the layers, source tokens all but the last two). Peak extra memory is
measured in a fresh process each, so that one length does not hide the other; it must grow no faster
than linearly.
"""

import json

import torch

from c2kv.extractor import Extractor, extract
from c2kv.models import EMBEDDED, load_backbone
from common import arguments, extra_memory, in_fresh_process, interleaved, report

LENGTHS, MEMORY_LENGTHS, RATIO = (256, 512, 1024, 2048), (2048, 8192), 4


def ids_of(length):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 40_000, (length,), generator=generator).tolist()


@torch.inference_mode()
def prefill(backbone, ids):
    backbone.model.model(torch.tensor([ids]), use_cache=False)


@torch.inference_mode()
def compress(backbone, extractor, ids):
    extract(backbone, extractor, [ids])


def measure_memory(length):
    backbone = load_backbone(EMBEDDED, dtype="float32", device="cpu")
    extractor = Extractor.from_backbone(backbone, ratio=RATIO)
    compress(backbone, extractor, ids_of(64))
    print(json.dumps(extra_memory(lambda: compress(backbone, extractor, ids_of(length)))))


def main():
    parser = arguments(__doc__)
    parser.add_argument("--memory-of", type=int, help="(internal) measure one length and stop")
    args = parser.parse_args()
    if args.memory_of:
        measure_memory(args.memory_of)
        return
    backbone = load_backbone(EMBEDDED, dtype="float32", device="cpu")
    extractor = Extractor.from_backbone(backbone, ratio=RATIO)
    rows, ratios = [], {}
    for length in LENGTHS:
        ids = ids_of(length)
        medians = interleaved(
            {
                "prefill": lambda ids=ids: prefill(backbone, ids),
                "extract": lambda ids=ids: compress(backbone, extractor, ids),
            },
            args.repeats,
        )
        ratios[length] = medians["prefill"] / medians["extract"]
        rows.append(
            {
                "tokens": length,
                "prefill tok/s": length / medians["prefill"],
                "extract tok/s": length / medians["extract"],
                "extract/prefill": ratios[length],
                "extra MiB": "",
            }
        )
    memory = {
        length: in_fresh_process(__file__, "--memory-of", length) for length in MEMORY_LENGTHS
    }
    for length, mebibytes in memory.items():
        row = dict.fromkeys(rows[0], "") | {"tokens": length, "extra MiB": mebibytes}
        rows.append(row)
    short, long = MEMORY_LENGTHS
    growth = (memory[long] / memory[short]) / (long / short)
    bars = [
        ("extract / prefill at 1024", ratios[1024], 0.70, True),
        (f"memory growth {short} to {long}, per growth in length", growth, 1.15, False),
    ]
    report(f"extract: ratio {RATIO}, {EMBEDDED}, float32", rows, bars, args)


if __name__ == "__main__":
    main()
