"""Composing 4,096 entries of the embedded model's shape against a memcpy of the same bytes.

Bar: at most 1.5 times the memcpy, both into memory that is already mapped. Peers in the same run:
two eager passes per segment, and an eager loop over layers as a transformers cache would take it.
"""

import torch

from c2kv.backbone import Backbone
from c2kv.composition import Composition
from c2kv.rotary import rotate
from c2kv.segment import Segment, SegmentIdentity
from common import arguments, interleaved, report

LAYERS, KV_HEADS, HEAD_DIM, SEGMENTS, ENTRIES, RATIO = 30, 3, 64, 16, 256, 4


def shaped_backbone():
    """The embedded model's KV shape and RoPE; its other weights play no part here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=KV_HEADS * HEAD_DIM,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=32,
        max_position_embeddings=32768,
        rope_parameters={"rope_theta": 100000.0, "rope_type": "default"},
    )
    config._attn_implementation = "sdpa"
    return Backbone(LlamaForCausalLM(config), name="shape of smollm2-135m")


def main():
    args = arguments(__doc__).parse_args()
    backbone = shaped_backbone()
    segments = []
    for index in range(SEGMENTS):
        ids = (index,) * (ENTRIES * RATIO)
        identity = SegmentIdentity(backbone.digest, "", "plain", RATIO, "float32", "", ids)
        kv = torch.randn(LAYERS, 2, KV_HEADS, ENTRIES, HEAD_DIM)
        segments.append(Segment(identity, kv))
    empty = torch.empty(LAYERS, 2, KV_HEADS, 0, HEAD_DIM)

    def composition():
        return Composition(backbone, empty, (), tuple(segments))

    total = SEGMENTS * ENTRIES
    source = torch.randn(LAYERS, 2, 1, KV_HEADS, total, HEAD_DIM)
    target = torch.zeros(LAYERS, 2, 1, KV_HEADS, total + 512, HEAD_DIM)

    def eager_passes():
        one = composition()
        for segment, at in zip(segments, one.placements, strict=True):
            slots = slice(at.slot, at.slot + at.entries)
            cos, sin = backbone.cos_sin(at.positions())
            target[:, 1, 0, :, slots] = segment.kv[:, 1]
            target[:, 0, 0, :, slots] = rotate(segment.kv[:, 0], cos, sin)

    def eager_layers():
        positions = torch.cat([at.positions() for at in composition().placements])
        cos, sin = backbone.cos_sin(positions)
        for layer in range(LAYERS):
            keys = torch.cat([s.kv[layer, 0] for s in segments], dim=1)
            values = torch.cat([s.kv[layer, 1] for s in segments], dim=1)
            target[layer, 0, 0, :, :total] = rotate(keys, cos, sin)
            target[layer, 1, 0, :, :total] = values

    candidates = {
        "memcpy (floor)": lambda: target[..., :total, :].copy_(source),
        "c2kv compose": lambda: composition().fill(target),
        "eager, by segment": eager_passes,
        "eager, by layer": eager_layers,
        "memcpy, fresh memory": lambda: torch.empty_like(target)[..., :total, :].copy_(source),
        "c2kv open, fresh memory": lambda: composition().open(512),
    }
    medians = interleaved(candidates, args.repeats * 2)
    floor, fresh = medians["memcpy (floor)"], medians["memcpy, fresh memory"]
    rows = [
        {
            "way": name,
            "ms": seconds * 1e3,
            "× its memcpy": seconds / (fresh if "fresh" in name else floor),
        }
        for name, seconds in medians.items()
    ]
    megabytes = source.numel() * 4 / 1e6
    title = f"compose: {total} entries in {SEGMENTS} segments, {megabytes:.0f} MB float32"
    report(title, rows, [("compose / memcpy", medians["c2kv compose"] / floor, 1.5, False)], args)


if __name__ == "__main__":
    main()
