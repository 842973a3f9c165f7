"""Bars: every ratio is to the control it names, of the same method."""

import pytest

from c2kv.evaluation.bars import bars, bars_table
from c2kv.evaluation.report.join import join


def scores(f1, nll=3.0):
    return {"f1": f1, "nll": nll, "failed": 0}


MEAN = {
    "recompute": scores(10),
    "reuse": scores(8),
    "c2kv-residual": scores(24, 1.5),
    "c2kv-plain": scores(9, 2.0),
    "wrongdoc:c2kv-residual": scores(16, 2.6),
    "wrongdoc:c2kv-plain": scores(3, 2.5),
    "shuffled:c2kv-residual": scores(18),
    "budget:c2kv-residual": scores(12),
    "noctx": scores(6),
}


def test_each_method_is_held_against_its_own_controls():
    found = {(b.method, b.name): (b.value, b.met) for b in bars(MEAN)}
    expected = {
        ("c2kv-residual", "NLL gap to wrongdoc"): (1.1, True),
        ("c2kv-residual", "F1 / wrongdoc"): (1.5, False),
        ("c2kv-residual", "F1 / noctx"): (4.0, True),
        ("c2kv-residual", "F1 / budget"): (2.0, True),
        ("c2kv-residual", "F1 / reuse"): (3.0, True),
        ("c2kv-residual", "F1 / recompute"): (2.4, True),
        ("c2kv-residual", "F1 change when shuffled"): (0.25, False),
        ("c2kv-plain", "NLL gap to wrongdoc"): (0.5, False),
        ("c2kv-plain", "F1 / wrongdoc"): (3.0, True),
        ("c2kv-plain", "F1 / noctx"): (1.5, False),
        ("c2kv-plain", "F1 / reuse"): (1.125, True),
        ("c2kv-plain", "F1 / recompute"): (0.9, False),
    }
    assert set(found) == set(expected)
    for key, (value, met) in expected.items():
        assert found[key] == (pytest.approx(value), met), key


def test_what_was_scored_on_other_samples_is_no_measure():
    failed = {**MEAN, "noctx": {**scores(6), "failed": 3}, "recompute": {"failed": 100}}
    assert {bar.name for bar in bars(failed)}.isdisjoint({"F1 / noctx", "F1 / recompute"})


def run(mean, backbone="one"):
    manifest = {"kind": "qa", "conditions": list(mean), "backbone_digest": backbone}
    return {"manifest": manifest, "sets": {"squad": mean}, "mean": mean}


def joined(*runs):
    (one,) = join([(name, summary) for name, summary in zip("abc", runs, strict=False)])
    return {(bar.method, bar.name): bar.value for bar in one.bars}


def test_a_bare_control_is_of_c2kv():
    assert joined(run({"c2kv": scores(20, 1.0), "wrongdoc": scores(10, 2.0)})) == {
        ("c2kv", "NLL gap to wrongdoc"): 1.0,
        ("c2kv", "F1 / wrongdoc"): 2.0,
    }


def test_runs_keep_to_their_own_controls_and_share_what_is_of_their_backbone():
    first = run({"recompute": scores(10), "c2kv": scores(20, 1.0), "wrongdoc": scores(10, 2.0)})
    second = run({"c2kv": scores(20, 1.0), "wrongdoc": scores(5, 4.0)})
    assert joined(first, second) == {
        ("c2kv (a)", "NLL gap to wrongdoc"): 1.0,
        ("c2kv (a)", "F1 / wrongdoc"): 2.0,
        ("c2kv (a)", "F1 / recompute"): 2.0,
        ("c2kv (b)", "NLL gap to wrongdoc"): 3.0,
        ("c2kv (b)", "F1 / wrongdoc"): 4.0,
        ("c2kv (b)", "F1 / recompute"): 2.0,
    }
    again = run({"recompute": scores(10), "block": scores(8), "wrongdoc:block": scores(4)})
    assert joined(first, again) == {
        **joined(first),
        ("block", "NLL gap to wrongdoc"): 0.0,
        ("block", "F1 / wrongdoc"): 2.0,
        ("block", "F1 / recompute"): 0.8,
    }
    without = run({"c2kv": scores(20, 1.0)})
    assert {method for method, _ in joined(first, without)} == {"c2kv (a)"}
    tuned = run({"block": scores(9), "wrongdoc:block": scores(3)}, backbone="other")
    assert ("block", "F1 / wrongdoc") in joined(first, tuned)
    assert ("block", "F1 / recompute") not in joined(first, tuned)


def test_what_has_no_meaning_is_neither_met_nor_missed():
    none = bars({"c2kv": scores(1), "wrongdoc": scores(0), "noctx": {"failed": 3, "scored": 0}})
    assert [(b.name, b.value, b.met) for b in none] == [
        ("NLL gap to wrongdoc", 0.0, False),
        ("F1 / wrongdoc", None, None),
    ]
    assert bars({"recompute": scores(1), "noctx": scores(1)}) == []


def test_methods_registered_elsewhere_have_bars_too():
    (gap, ratio) = bars({"mine-7": scores(4, 1.0), "wrongdoc:mine-7": scores(2, 3.0)})
    assert (gap.method, gap.value, ratio.value) == ("mine-7", 2.0, 2.0)


def test_the_table_says_what_is_missed():
    columns, rows = bars_table(tuple(bars(MEAN)))
    assert columns == ["", "bar", "c2kv-residual", "c2kv-plain"]
    assert rows[0] == ["NLL gap to wrongdoc", "≥ 1", "1.10", "0.50 missed"]
    assert ["F1 / budget", "≥ 1", "2.00", "–"] in rows
