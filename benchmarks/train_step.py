"""A training step against a dense-mask single-pass step over the same samples.

Bar: at least 3 times faster at 4 documents of 512 tokens, with the same loss: for one question,
and for a group of 4 as recipes draw them. The dense step is the tests' oracle: one pass over source
and C2Tokens with an (n + m) x (n + m) mask, under autograd throughout, for one question at a time.
Also: questions grouped over one extraction against one at a time, and peak memory over document
length, and against the dense step's.
"""

import json
import sys
from pathlib import Path

import torch

from c2kv.extractor import Extractor
from c2kv.models import EMBEDDED, load_backbone
from c2kv.training.loss import Group, Question, group_loss
from common import arguments, extra_memory, in_fresh_process, interleaved, report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
DOCUMENTS, TOKENS, RATIO = 4, 512, 4
MEMORY_TOKENS = (512, 1024, 2048)


def ids_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 40_000, (count,), generator=generator).tolist())


def group_of(tokens, questions):
    order = tuple(range(DOCUMENTS))
    return Group(
        tuple(ids_of(tokens, seed) for seed in range(DOCUMENTS)),
        tuple(
            Question(ids_of(20, 90), order, ids_of(30, 91 + i), ids_of(8, 50 + i))
            for i in range(questions)
        ),
    )


def ours_of_one(backbone, extractor, group):
    return ours(backbone, extractor, [group])


def ours(backbone, extractor, groups):
    total = 0.0
    for group in groups:
        loss, tokens = group_loss(backbone, extractor, group)
        (loss / tokens).backward()
        total += loss.item() / tokens
    extractor.zero_grad()
    return total / len(groups)


def dense(backbone, extractor, group):
    from oracle import loss_dense

    (question,) = group.questions
    loss = loss_dense(
        backbone.model,
        extractor,
        list(question.prefix),
        [list(d) for d in group.documents],
        list(question.question),
        list(question.answer),
        RATIO,
        False,
    )
    loss.backward()
    extractor.zero_grad()
    return loss.item()


def load():
    backbone = load_backbone(EMBEDDED, dtype="float32", device="cpu")
    return backbone, Extractor.from_backbone(backbone, ratio=RATIO)


def measure_memory(tokens, step):
    backbone, extractor = load()
    step(backbone, extractor, group_of(32, 1))
    print(json.dumps(extra_memory(lambda: step(backbone, extractor, group_of(tokens, 1)))))


def main():
    parser = arguments(__doc__)
    parser.set_defaults(repeats=3)
    parser.add_argument("--memory-of", type=int, help="(internal) measure one length and stop")
    parser.add_argument("--dense", action="store_true", help="(internal) of the dense step")
    args = parser.parse_args()
    if args.memory_of:
        measure_memory(args.memory_of, dense if args.dense else ours_of_one)
        return
    backbone, extractor = load()
    one, four = group_of(TOKENS, 1), group_of(TOKENS, 4)
    alone = [Group(four.documents, (question,)) for question in four.questions]
    difference = abs(ours(backbone, extractor, [one]) - dense(backbone, extractor, one))
    medians = interleaved(
        {
            "c2kv step": lambda: ours(backbone, extractor, [one]),
            "dense-mask step": lambda: dense(backbone, extractor, one),
            "4 questions, grouped": lambda: ours(backbone, extractor, [four]),
            "4 questions, one at a time": lambda: ours(backbone, extractor, alone),
            "4 questions, dense-mask": lambda: [dense(backbone, extractor, g) for g in alone],
        },
        args.repeats,
    )
    tokens = DOCUMENTS * TOKENS
    rows = [
        {"step": name, "s": seconds, "document tokens/s": tokens / seconds, "peak MiB": ""}
        for name, seconds in medians.items()
    ]
    memory = {length: in_fresh_process(__file__, "--memory-of", length) for length in MEMORY_TOKENS}
    rows += [
        {"step": f"c2kv, documents of {n}", "s": "", "document tokens/s": "", "peak MiB": mib}
        for n, mib in memory.items()
    ]
    dense_memory = in_fresh_process(__file__, "--memory-of", TOKENS, "--dense")
    rows.append(
        {
            "step": f"dense-mask, documents of {TOKENS}",
            "s": "",
            "document tokens/s": "",
            "peak MiB": dense_memory,
        }
    )
    short, long = MEMORY_TOKENS[0], MEMORY_TOKENS[-1]
    faster = medians["dense-mask step"] / medians["c2kv step"]
    grouped_faster = medians["4 questions, dense-mask"] / medians["4 questions, grouped"]
    grouped = medians["4 questions, one at a time"] / medians["4 questions, grouped"]
    growth = (memory[long] / memory[short]) / (long / short)
    bars = [
        ("dense step / ours", faster, 3.0, True),
        ("dense step / ours, 4 questions", grouped_faster, 3.0, True),
        ("dense step / ours, peak memory", dense_memory / memory[TOKENS], 1.0, True),
        ("difference of their losses", difference, 1e-3, False),
        ("one at a time / grouped", grouped, 1.5, True),
        (f"memory growth {short} to {long}, per growth in length", growth, 1.25, False),
    ]
    title = f"train_step: {DOCUMENTS} documents of {TOKENS} tokens, {EMBEDDED}, float32"
    report(title, rows, bars, args)


if __name__ == "__main__":
    main()
