"""Who sees whom: the structured attention of C2Tokens, without a mask over source tokens.

C2Token j attends to its own block of `ratio` source tokens, the sink block (the first block),
the C2Tokens before it, and itself: m * (2 * ratio + m) scores instead of (n + m) ** 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# Queries per step of the C2Token-to-C2Token part: bounds live scores to QUERY_CHUNK * m.
QUERY_CHUNK = 256


@dataclass(frozen=True)
class BlockLayout:
    """Blocks of a batch of documents, right-padded to the longest.

    lengths: source tokens of each document [batch]. local_mask: additive, for own block then
    sink block [batch, 1, 1, m, 2 * ratio]; None when nothing is hidden."""

    ratio: int
    span: int
    lengths: Tensor
    local_mask: Tensor
    in_block: Tensor  # [batch, m, ratio]: a real token stands there

    @classmethod
    def of(
        cls, lengths: list[int], ratio: int, device: torch.device, dtype: torch.dtype
    ) -> BlockLayout:
        span = max(lengths)
        entries = -(-span // ratio)
        sizes = torch.tensor(lengths, device=device)
        index = torch.arange(entries * ratio, device=device).view(entries, ratio)
        own = index < sizes[:, None, None]
        sink = own[:, :1].expand(-1, entries, -1).clone()
        sink[:, 0] = False  # the first block is its own sink: seen once
        hidden = torch.finfo(dtype).min
        mask = torch.zeros(len(lengths), entries, 2 * ratio, device=device, dtype=dtype)
        mask.masked_fill_(~torch.cat((own, sink), dim=-1), hidden)
        return cls(ratio, span, sizes, mask[:, None, None], own)

    @property
    def entries(self) -> int:
        return self.in_block.shape[1]

    def positions(self) -> Tensor:
        """Position of each C2Token: the last token of its block [batch, m]."""
        ends = torch.arange(1, self.entries + 1, device=self.lengths.device) * self.ratio
        return torch.minimum(ends, self.lengths[:, None]).clamp(min=1) - 1

    def blocks(self, source: Tensor) -> Tensor:
        """[..., n, d] to [..., m, ratio, d], zero-padded at the end."""
        missing = self.entries * self.ratio - source.shape[-2]
        padded = pad(source, (0, 0, 0, missing)) if missing else source
        return padded.unflatten(-2, (self.entries, self.ratio))

    def block_means(self, source: Tensor) -> Tensor:
        """Mean over each block's real tokens: [batch, n, d] to [batch, m, d]."""
        weights = self.in_block.to(source.dtype)
        sums = torch.einsum("bmk,bmkd->bmd", weights, self.blocks(source))
        return sums / weights.sum(-1, keepdim=True).clamp(min=1)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    source_keys: Tensor,
    source_values: Tensor,
    layout: BlockLayout,
    scaling: float,
) -> Tensor:
    """Attention of the C2Tokens, all arguments after RoPE.

    queries [batch, heads, m, head_dim]; keys, values [batch, kv_heads, m, head_dim];
    source_keys, source_values [batch, kv_heads, n, head_dim]. Returns [batch, m, heads * head_dim].
    """
    kv_heads, ratio = keys.shape[1], layout.ratio
    grouped = (queries * scaling).unflatten(1, (kv_heads, -1))  # [batch, kv, group, m, dim]
    own_keys, own_values = layout.blocks(source_keys), layout.blocks(source_values)
    sink_keys, sink_values = own_keys[:, :, 0], own_values[:, :, 0]
    outputs = []
    for start in range(0, layout.entries, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, layout.entries)
        q = grouped[:, :, :, start:stop]
        own = torch.einsum("bhgmd,bhmkd->bhgmk", q, own_keys[:, :, start:stop])
        sink = torch.einsum("bhgmd,bhkd->bhgmk", q, sink_keys)
        earlier = torch.einsum("bhgmd,bhnd->bhgmn", q, keys[:, :, :stop])
        future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
        earlier[..., start:].masked_fill_(future, torch.finfo(q.dtype).min)
        local = torch.cat((own, sink), dim=-1) + layout.local_mask[..., start:stop, :]
        scores = torch.cat((local, earlier), dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        own, sink, earlier = weights.split((ratio, ratio, stop), dim=-1)
        out = torch.einsum("bhgmk,bhmkd->bhgmd", own, own_values[:, :, start:stop])
        out = out + torch.einsum("bhgmk,bhkd->bhgmd", sink, sink_values)
        outputs.append(out + torch.einsum("bhgmn,bhnd->bhgmd", earlier, values[:, :, :stop]))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)
    return out.flatten(1, 2).transpose(1, 2).flatten(2)
