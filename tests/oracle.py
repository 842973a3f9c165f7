"""The test oracle: C²KV extraction, composition and loss, slow and obviously right.

One dense pass with an explicit boolean mask, written from docs/SEMANTICS.md and independent of the
library (nothing of c2kv is imported here). One document at a time, no batch dimension. In shapes,
n = source tokens of a document, k = ratio, m = ceil(n/k) C2Tokens; C2Tokens are numbered j = 1..m
and, in a sequence, come after the n source tokens.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F


def block(j, n, ratio):
    """Source indices (0-based) of the block of C2Token j (1-based); the last may be short."""
    return range((j - 1) * ratio, min(j * ratio, n))


def c2_positions(n, ratio):
    """Position of each C2Token inside its document: the last token of its block, m ints."""
    m = -(-n // ratio)
    return [min(j * ratio, n) - 1 for j in range(1, m + 1)]


@lru_cache(maxsize=64)
def visibility(n, ratio):
    """Bool [n+m, n+m]; [row, col] says whether row attends to col. Rows: source, then C2Tokens."""
    assert n >= 1 and ratio >= 1
    m = -(-n // ratio)
    sink = range(min(n, ratio))

    def sees(row, col):
        row_is_source, col_is_source = row < n, col < n
        if row_is_source and col_is_source:
            return col <= row  # causal
        if row_is_source:
            return False  # a source token never sees a C2Token
        if col_is_source:
            return col in block(row - n + 1, n, ratio) or col in sink
        return col <= row  # the C2Tokens before it, and itself

    return torch.tensor([[sees(row, col) for col in range(n + m)] for row in range(n + m)])


def rotate(keys, positions, model):
    """RoPE with the model's own rotary module.

    keys: [..., entries, head_dim]; positions: `entries` ints. Returns the shape of keys.
    """
    positions = torch.as_tensor(positions, dtype=torch.long, device=keys.device)
    cos, sin = model.model.rotary_emb(keys, positions[None])  # each [1, entries, head_dim]
    cos, sin = cos[0], sin[0]
    half = keys.shape[-1] // 2
    first, second = keys[..., :half], keys[..., half:]
    return torch.cat(
        [
            first * cos[:, :half] - second * sin[:, :half],
            second * cos[:, half:] + first * sin[:, half:],
        ],
        dim=-1,
    )


def attend(query, key, value, visible):
    """Eager attention, softmax in float32.

    query: [heads, rows, head_dim]; key, value: [kv_heads, cols, head_dim]; visible: [rows, cols].
    Query head h reads kv head h // (heads / kv_heads). Returns [rows, heads * head_dim].
    """
    groups = query.shape[0] // key.shape[0]
    key = key.repeat_interleave(groups, dim=0)
    value = value.repeat_interleave(groups, dim=0)
    scores = (query @ key.transpose(1, 2)).float() * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible.to(scores.device), float("-inf"))
    mixed = scores.softmax(dim=-1).to(value.dtype) @ value  # [heads, rows, head_dim]
    return mixed.transpose(0, 1).flatten(1)


def run_layers(model, hidden, positions, visible, past=None, extractor=None, source_rows=None):
    """All decoder layers over `rows` new rows.

    hidden: [rows, hidden], what enters the first layer; positions: `rows` ints;
    visible: bool [rows, past_entries + rows]; past: for each layer (rotated keys, values), each
    [kv_heads, past_entries, head_dim]. With an extractor, rows from `source_rows` on are C2Tokens
    and use its heads; all other rows use the backbone's.
    Returns what leaves the last layer (before the final norm), [rows, hidden], and the rows'
    keys (after k_norm, before RoPE) and values, [layers, 2, kv_heads, rows, head_dim].
    """
    if extractor is None:
        source_rows = len(hidden)
    kept = []
    for i, layer in enumerate(model.model.layers):
        attn = layer.self_attn

        def project(name, x, i=i, attn=attn):
            """[rows, hidden] -> [rows, heads of this projection, head_dim]."""
            out = getattr(attn, name)(x[:source_rows])
            if extractor is not None:
                c2 = getattr(extractor.layers[i], name)(x[source_rows:])
                out = torch.cat([out, c2], dim=0)
            return out.view(len(x), -1, attn.head_dim)

        normed = layer.input_layernorm(hidden)
        query, key, value = (project(name, normed) for name in ("q_proj", "k_proj", "v_proj"))
        if hasattr(attn, "q_norm"):
            query, key = attn.q_norm(query), attn.k_norm(key)
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        kept.append(torch.stack([key, value]))

        query, key = rotate(query, positions, model), rotate(key, positions, model)
        if past is not None:
            key = torch.cat([past[i][0], key], dim=1)
            value = torch.cat([past[i][1], value], dim=1)
        hidden = hidden + attn.o_proj(attend(query, key, value, visible))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden, torch.stack(kept)


def embed(model, ids):
    """Embedding-layer outputs of a list of token ids, [len(ids), hidden]."""
    return model.model.embed_tokens(torch.tensor(ids, dtype=torch.long, device=model.device))


def extraction_pass(model, extractor, ids, ratio, residual):
    """The single pass over source tokens then C2Tokens.

    Returns the last layer's output [n+m, hidden] (before the final norm) and every row's pre-RoPE
    keys and values [layers, 2, kv_heads, n+m, head_dim].
    """
    n = len(ids)
    source = embed(model, ids)
    c2 = []
    for j in range(1, len(c2_positions(n, ratio)) + 1):
        row = extractor.embedding
        if residual:
            row = row + source[list(block(j, n, ratio))].mean(dim=0)
        c2.append(row)
    hidden = torch.cat([source, torch.stack(c2)])
    positions = list(range(n)) + c2_positions(n, ratio)
    visible = visibility(n, ratio)
    return run_layers(model, hidden, positions, visible, extractor=extractor, source_rows=n)


def extract_dense(model, extractor, ids, ratio, residual):
    """Extract one document. ids: list of n ints.

    Returns the C2Tokens' keys (after k_norm, before RoPE) and values,
    [layers, 2, kv_heads, m, head_dim]; differentiable with respect to the extractor.
    """
    _, kv = extraction_pass(model, extractor, ids, ratio, residual)
    return kv[..., len(ids) :, :]


def compose_dense(model, prefix_ids, segments, question_ids):
    """Logits [q, vocab] of the question's q tokens after the prefix and the segments.

    prefix_ids: list of s ints, may be empty, ordinary tokens at positions 0..s-1;
    segments: list of (kv [layers, 2, kv_heads, m, head_dim], span n, ratio k), in order.
    Offsets accumulate source spans; differentiable with respect to the segments' kv.
    """
    s, q = len(prefix_ids), len(question_ids)
    parts, positions = [], []  # pre-RoPE kv pieces and the position of each of their entries
    if s:
        causal = torch.ones(s, s).tril().bool()
        _, kv = run_layers(model, embed(model, prefix_ids), list(range(s)), causal)
        parts.append(kv)
        positions += list(range(s))
    offset = s
    for kv, n, ratio in segments:
        assert kv.shape[-2] == len(c2_positions(n, ratio))
        parts.append(kv)
        positions += [offset + p for p in c2_positions(n, ratio)]
        offset += n

    past = None
    if parts:
        joined = torch.cat(parts, dim=-2)
        past = [(rotate(layer[0], positions, model), layer[1]) for layer in joined]
    entries = len(positions)
    visible = torch.tensor(
        [[col <= entries + row for col in range(entries + q)] for row in range(q)]
    )
    question_positions = [offset + i for i in range(q)]
    hidden, _ = run_layers(model, embed(model, question_ids), question_positions, visible, past)
    return model.lm_head(model.model.norm(hidden))


def loss_dense(model, extractor, prefix_ids, documents, question_ids, answer_ids, ratio, residual):
    """Mean next-token cross-entropy on the answer tokens (scalar), differentiable.

    documents: list of id lists, each extracted alone and composed in the given order.
    """
    assert question_ids and answer_ids
    segments = [
        (extract_dense(model, extractor, ids, ratio, residual), len(ids), ratio)
        for ids in documents
    ]
    # The token before each answer token predicts it; the last answer token predicts nothing.
    logits = compose_dense(model, prefix_ids, segments, question_ids + answer_ids[:-1])
    target = torch.tensor(answer_ids, dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits[-len(answer_ids) :].float(), target)
