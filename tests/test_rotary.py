"""Placing keys: the fused pass equals the plain formula and the library's own."""

import sys

import pytest
import torch

from c2kv.errors import UnsupportedModelError
from c2kv.rotary import Part, place, rotate
from conftest import backbone_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", [1, 7, 64])
def test_placing_equals_rotating_keys_and_copying_values(dtype, entries):
    torch.manual_seed(0)
    kv = torch.randn(5, 2, 3, entries, 16).to(dtype)
    angles = torch.randn(entries, 8)
    cos, sin = (torch.cat((t, t), -1).to(dtype) for t in (angles.cos(), angles.sin()))
    arena = torch.full((5, 2, 2, 3, entries + 9, 16), 7.0, dtype=dtype)
    place([Part(kv, cos, sin, 4)], arena, row=1)
    other, row = arena.unbind(2)
    tolerance = (
        {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    )
    placed = row[:, :, :, 4 : 4 + entries]
    torch.testing.assert_close(placed[:, 0], rotate(kv[:, 0], cos, sin), **tolerance)
    assert torch.equal(placed[:, 1], kv[:, 1])
    assert (row[:, :, :, :4] == 7).all() and (row[:, :, :, 4 + entries :] == 7).all()
    assert (other == 7).all()


def test_the_fused_pass_works_where_nothing_can_be_cached(monkeypatch, caplog):
    import numba

    import c2kv.rotary as rotary

    compile_ = numba.njit

    def uncacheable(*arguments, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_(*arguments, **options)

    monkeypatch.setattr(numba, "njit", uncacheable)
    rotary._fused_kernel.cache_clear()
    try:
        test_placing_equals_rotating_keys_and_copying_values(torch.float32, 7)
    finally:
        rotary._fused_kernel.cache_clear()
    assert "compiled anew in each process" in caplog.text


@pytest.mark.parametrize("position", [0, 1, 511, 8_193, 60_000])
def test_rotation_is_the_librarys_own_at_any_offset(backbone, position):
    library = sys.modules[type(backbone.model).__module__]
    keys = torch.randn(1, 2, 3, backbone.head_dim)
    cos, sin = backbone.cos_sin(position + torch.arange(3)[None])
    expected, _ = library.apply_rotary_pos_emb(keys, keys, cos, sin)
    torch.testing.assert_close(rotate(keys, cos[:, None], sin[:, None]), expected)


def test_a_model_that_rotates_otherwise_is_refused(monkeypatch):
    backbone = backbone_of("llama")
    library = sys.modules[type(backbone.model).__module__]
    monkeypatch.setattr(library, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    with pytest.raises(UnsupportedModelError, match="layout unknown"):
        type(backbone)(backbone.model)
