"""A store returns exactly what was put in, or a logged miss; a failed write changes nothing."""

import dataclasses
import errno
import json
import logging
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import safetensors
import torch

from c2kv.errors import StoreError
from c2kv.segment import Segment, SegmentIdentity
from c2kv.store import FolderStore

DTYPES = ("float32", "bfloat16", "float16")


def make_segment(seed=0, span=37, ratio=4, dtype="float32", head_dim=8, **changes):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50_000, (span,), generator=generator).tolist()
    fields = {"backbone": "b" * 64, "extractor": "e" * 64, "variant": "plain", "template": "t" * 64}
    identity = SegmentIdentity(ratio=ratio, dtype=dtype, token_ids=tuple(ids), **fields | changes)
    shape = (2, 2, 2, identity.entries, head_dim)
    return Segment(identity, torch.randn(shape, generator=generator).to(getattr(torch, dtype)))


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def path_of(store, segment):
    return store.root / segment.key[:2] / f"{segment.key}.safetensors"


def quarantined(store):
    return sorted((store.root / "quarantine").glob("*"))


def files_of(store):
    return sorted(path for path in store.root.rglob("*") if path.is_file())


def contents_of(store):
    return {path: path.read_bytes() for path in files_of(store)}


def rewritten(raw, change):
    """The file's bytes with its header dict passed through `change`, lengths made right."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def python(code, *arguments, stdin=None, **environment):
    """A started Python process that sees the tests' modules and c2kv."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdin=stdin, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "store")


# What is put in comes out.


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_is_bit_exact(store, dtype):
    segment = make_segment(dtype=dtype)
    patterns = torch.tensor([float("nan"), float("inf"), -0.0, 1e-7]).to(segment.kv.dtype)
    segment.kv.view(-1)[:4] = patterns
    assert store.put(segment)
    loaded = store.get(segment.identity)
    assert loaded.identity == segment.identity
    assert same_bits(loaded.kv, segment.kv)


def test_the_loaded_kv_owns_its_memory(store):
    segment = make_segment()
    store.put(segment)
    loaded = store.get(segment.identity).kv
    os.truncate(path_of(store, segment), 0)
    assert torch.equal(loaded, segment.kv)
    assert loaded.is_contiguous() and loaded.device.type == "cpu"
    assert loaded.untyped_storage().nbytes() == segment.nbytes


def test_kv_that_is_a_strided_view_or_needs_a_gradient_is_stored_by_value(store):
    segment = make_segment()
    strided = segment.kv.transpose(0, 4).contiguous().transpose(0, 4).requires_grad_()
    assert store.put(Segment(segment.identity, strided))
    assert torch.equal(store.get(segment.identity).kv, segment.kv)


def test_the_safetensors_library_reads_a_stored_file(store):
    segment = make_segment(dtype="bfloat16")
    store.put(segment, label="report.pdf")
    with safetensors.safe_open(path_of(store, segment), "pt") as file:
        assert torch.equal(file.get_tensor("kv"), segment.kv)
        assert file.get_tensor("token_ids").tolist() == list(segment.identity.token_ids)
        assert file.metadata()["label"] == "report.pdf"


def test_an_absent_segment_is_none(store):
    assert store.get(make_segment().identity) is None


def test_a_second_put_writes_nothing_and_keeps_the_first_label(store):
    segment = make_segment()
    assert store.put(segment, label="first")
    before = contents_of(store)
    assert not store.put(segment, label="second")
    assert contents_of(store) == before


def test_put_refuses_kv_that_its_identity_does_not_describe(store):
    segment = make_segment()
    with pytest.raises(StoreError, match=r"float16.*float32"):
        store.put(Segment(segment.identity, segment.kv.half()))
    with pytest.raises(StoreError, match="float64"):
        store.put(make_segment(dtype="float64"))
    with pytest.raises(StoreError, match="non-empty"):
        store.put(make_segment(span=0))
    assert files_of(store) == []


# The key.


@pytest.mark.parametrize(
    "change",
    [
        {"backbone": "x"},
        {"extractor": "x"},
        {"variant": "residual"},
        {"ratio": 8},
        {"dtype": "float16"},
        {"template": "x"},
        {"tenant": "x"},
        {"token_ids": (1, 2, 4)},
        {"token_ids": (1, 2)},
    ],
    ids=str,
)
def test_every_identity_field_changes_the_key(change):
    base = SegmentIdentity("b", "e", "plain", 4, "float32", "t", (1, 2, 3))
    assert dataclasses.replace(base, **change).key != base.key


def test_text_moved_between_fields_changes_the_key():
    one = SegmentIdentity("ab", "c", "plain", 4, "float32", "t", (1,))
    assert dataclasses.replace(one, backbone="a", extractor="bc").key != one.key


def test_another_process_with_another_hash_seed_finds_the_segment(store):
    segment = make_segment(seed=3)
    store.put(segment)
    code = (
        "import sys; from test_store import make_segment, FolderStore\n"
        "segment = make_segment(seed=3)\n"
        "loaded = FolderStore(sys.argv[1]).get(segment.identity)\n"
        "print(segment.key, bool((loaded.kv == segment.kv).all()))"
    )
    processes = [python(code, store.root, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    for process in processes:
        assert process.communicate(timeout=120)[0].split() == [segment.key, "True"]


# Corruption.


def assert_corrupt_is_a_miss(store, segment, raw, caplog):
    """The bytes `raw` in the segment's place: reported, then quarantined, logged and a miss."""
    path = path_of(store, segment)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(raw)
    assert dict(store.verify())[segment.key]
    before = len(quarantined(store))
    caplog.clear()
    assert store.get(segment.identity) is None
    assert not path.exists()
    assert len(quarantined(store)) == before + 1
    assert any(kept.read_bytes() == raw for kept in quarantined(store))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.name == "c2kv.store.folder"
    assert segment.key in record.message


def test_any_flipped_bit_is_a_miss_and_spares_the_others(store, caplog):
    segment, other = make_segment(span=9), make_segment(seed=1)
    store.put(segment, label="été")
    store.put(other)
    raw = path_of(store, segment).read_bytes()
    for number in range(60):
        position = number * (len(raw) - 1) // 59
        flipped = bytearray(raw)
        flipped[position] ^= 1 << number % 8
        assert_corrupt_is_a_miss(store, segment, bytes(flipped), caplog)
    assert torch.equal(store.get(other.identity).kv, other.kv)
    assert store.put(segment), "a quarantined segment can be stored again"
    assert torch.equal(store.get(segment.identity).kv, segment.kv)
    assert len(quarantined(store)) == 60


def test_a_file_of_any_other_length_is_a_miss(store, caplog):
    segment = make_segment(span=9)
    store.put(segment)
    raw = path_of(store, segment).read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(raw) // 2, len(raw) - 8, len(raw) - 1):
        assert_corrupt_is_a_miss(store, segment, raw[:length], caplog)
    assert_corrupt_is_a_miss(store, segment, raw + b"\0", caplog)


def test_put_replaces_a_truncated_file_and_keeps_it(store):
    segment = make_segment()
    store.put(segment)
    os.truncate(path_of(store, segment), 300)
    assert store.put(segment)
    assert torch.equal(store.get(segment.identity).kv, segment.kv)
    assert [kept.stat().st_size for kept in quarantined(store)] == [300]


def change_metadata(name, text):
    return lambda header: header["__metadata__"].update({name: text})


def change_tensor(tensor, name, value):
    return lambda header: header[tensor].update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        change_metadata("backbone", "another"),
        change_metadata("label", "another"),
        change_metadata("created", "nan"),
        change_metadata("dtype", "int32"),
        change_metadata("dtype", []),
        change_metadata("ratio", "0"),
        change_metadata("ratio", "-4"),
        change_metadata("ratio", "9" * 5000),
        change_metadata("format_version", "0"),
        change_metadata("surplus", ""),
        change_tensor("kv", "dtype", "F16"),
        change_tensor("kv", "dtype", "NONE"),
        change_tensor("kv", "shape", [2**70, 2, 0, 10, 8]),
        change_tensor("kv", "shape", [2**62, 2, 2, 10, 8]),
        change_tensor("kv", "shape", [2, 2, 8, 10, 2]),
        change_tensor("kv", "shape", [-2, -2, 2, 10, 8]),
        change_tensor("kv", "shape", [2.0, 2, 2, 10, 8]),
        change_tensor("kv", "shape", "22222"),
        change_tensor("kv", "shape", None),
        change_tensor("kv", "data_offsets", [0, 2**63]),
        change_tensor("token_ids", "shape", []),
        change_tensor("token_ids", "shape", [2**60]),
        change_tensor("token_ids", "data_offsets", [-8, 0]),
        lambda header: header.pop("token_ids"),
        lambda header: header.pop("__metadata__"),
        lambda header: header["__metadata__"].pop("checksum"),
        lambda header: header.update(kv=[]),
    ],
)
def test_a_wrong_header_is_a_miss(store, caplog, change):
    segment = make_segment()
    store.put(segment)
    raw = rewritten(path_of(store, segment).read_bytes(), change)
    assert_corrupt_is_a_miss(store, segment, raw, caplog)


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<Q", 2**63) + b"{}",
        b"\xff" * 64,
        struct.pack("<Q", 0),
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2) + b"12",
        struct.pack("<Q", 2) + b'""',
    ],
    ids=range(7),
)
def test_a_hostile_header_is_a_miss(store, caplog, raw):
    assert_corrupt_is_a_miss(store, make_segment(), raw, caplog)


def test_a_sound_file_under_another_key_is_a_miss(store, caplog):
    wanted, other = make_segment(seed=0), make_segment(seed=1)
    store.put(other)
    assert_corrupt_is_a_miss(store, wanted, path_of(store, other).read_bytes(), caplog)
    assert "token_ids" in caplog.text
    assert store.get(other.identity) is not None


def test_a_sound_file_of_another_tenant_is_a_miss(store, caplog):
    wanted, other = make_segment(tenant="one"), make_segment(tenant="two")
    store.put(other)
    assert_corrupt_is_a_miss(store, wanted, path_of(store, other).read_bytes(), caplog)
    assert "tenant" in caplog.text


def test_a_corrupt_file_that_cannot_be_moved_is_still_a_logged_miss(store, caplog):
    segment = make_segment()
    store.put(segment)
    os.truncate(path_of(store, segment), 300)
    (store.root / "quarantine").touch()
    assert store.get(segment.identity) is None
    assert "not moved" in caplog.text
    assert path_of(store, segment).exists()


def test_an_unreadable_file_is_an_error_and_stays_where_it_is(store, caplog):
    segment = make_segment()
    path_of(store, segment).mkdir(parents=True)  # as unreadable as one gets, for root too
    with pytest.raises(StoreError, match="cannot read"):
        store.get(segment.identity)
    with pytest.raises(StoreError, match="cannot read"):
        store.put(segment)
    assert path_of(store, segment).exists() and quarantined(store) == []
    assert store.entries() == [] and "not listed" in caplog.text
    assert "cannot read" in dict(store.verify())[segment.key]


@pytest.mark.parametrize("change", [{"token_ids": (-1,) * 37}, {"backbone": "\udcff"}], ids=str)
def test_verify_reports_a_sound_file_whose_identity_has_no_key(store, change):
    segment = make_segment()
    identity = dataclasses.replace(segment.identity, **change)
    identity.__dict__["key"] = segment.key
    store.put(Segment(identity, segment.kv))
    assert dict(store.verify())[segment.key] == "its token ids or texts are impossible"


# Writes that fail.


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_store_as_it_was(store, monkeypatch, call):
    segment, other = make_segment(), make_segment(seed=1)
    store.put(other)
    before = contents_of(store)
    with monkeypatch.context() as patch:
        if call == "replace":
            patch.setattr(Path, "replace", no_space)
        else:
            patch.setattr(os, "fsync", no_space)
        with pytest.raises(StoreError) as caught:
            store.put(segment)
    message = str(caught.value)
    assert "No space left" in message and "free space" in message and "\n" not in message
    assert str(store.root) in message
    assert contents_of(store) == before
    assert store.get(segment.identity) is None
    assert store.put(segment)
    assert f"{path_of(store, segment).stat().st_size} bytes needed" in message


def test_a_segment_is_on_disk_before_its_name_is_and_then_its_name(store, monkeypatch):
    segment, calls = make_segment(), []
    path_of(store, segment).parent.mkdir()
    fsync, replace = os.fsync, Path.replace

    def traced_fsync(descriptor):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("sync", "temporary" if name.endswith(".tmp") else name))
        fsync(descriptor)

    def traced_replace(path, target):
        calls.append(("rename", target.name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "replace", traced_replace)
    store.put(segment)
    key = segment.key
    assert calls == [("sync", "temporary"), ("rename", f"{key}.safetensors"), ("sync", key[:2])]


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a tiny file system")
    try:
        store = FolderStore(tmp_path / "store")
        small, large = make_segment(), make_segment(seed=1, span=4000)
        store.put(small)
        before = contents_of(store)
        with pytest.raises(StoreError, match=r"No space left.* \d+ bytes needed, \d+ free"):
            store.put(large)
        assert contents_of(store) == before
        assert torch.equal(store.get(small.identity).kv, small.kv)
        assert store.put(make_segment(seed=2))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_store_that_cannot_be_made_names_its_path(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=f"{root}.*choose another"):
            FolderStore(root)


def test_leftovers_are_no_segments_and_only_old_ones_are_cleaned(store):
    segment = make_segment()
    store.put(segment)
    path = path_of(store, segment)
    young, old = (path.with_suffix(f".{letter * 32}.tmp") for letter in "ab")
    foreign = path.with_name("notes.tmp")
    for leftover in (young, old, foreign):
        leftover.write_bytes(path.read_bytes())
    for leftover in (old, foreign):
        os.utime(leftover, (time.time() - 3700,) * 2)
    reopened = FolderStore(store.root)
    assert young.exists() and foreign.exists() and not old.exists()
    assert [stored.key for stored in reopened.entries()] == [segment.key]
    assert list(reopened.verify()) == [(segment.key, None)]
    assert reopened.nbytes == path.stat().st_size


# Threads and processes.


def run_threads(*targets):
    """All at once; what each returned."""
    start, results = threading.Barrier(len(targets)), {}

    def run(number, target):
        start.wait()
        results[number] = target()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(targets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(targets))]


def test_threads_may_put_and_get_the_same_segments(store):
    segments = [make_segment(seed=seed) for seed in range(6)]

    def work():
        for segment in segments:
            store.put(segment)
            if not torch.equal(store.get(segment.identity).kv, segment.kv):
                return False
        return True

    assert run_threads(*[work] * 8) == [True] * 8
    assert sorted(store.verify()) == sorted((segment.key, None) for segment in segments)
    assert len(files_of(store)) == len(segments)


def test_threads_may_put_different_segments(store):
    segments = [make_segment(seed=seed) for seed in range(12)]
    puts = [lambda segment=segment: store.put(segment) for segment in segments]
    assert run_threads(*puts) == [True] * 12
    assert len(files_of(store)) == 12
    for segment in segments:
        assert torch.equal(store.get(segment.identity).kv, segment.kv)


def test_two_processes_may_share_a_store(store):
    code = (
        "import sys; from test_store import make_segment, FolderStore\n"
        "store = FolderStore(sys.argv[1])\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for seed in range(int(sys.argv[2]), int(sys.argv[3])):\n"
        "    segment = make_segment(seed=seed); store.put(segment)\n"
        "    assert (store.get(segment.identity).kv == segment.kv).all()\n"
        "print('done')"
    )
    read, write = os.pipe()
    with os.fdopen(read) as gate:
        processes = [python(code, store.root, *seeds, stdin=gate) for seeds in ((0, 20), (10, 30))]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    os.close(write)
    for process in processes:
        assert process.communicate(timeout=120)[0] == "done\n"
    assert len(files_of(store)) == 30
    assert {reason for _, reason in store.verify()} == {None}


# Looking around.


def test_entries_tell_what_is_stored_oldest_first_after_reopening(store, monkeypatch):
    segments = [make_segment(seed=0, tenant="acme"), make_segment(seed=1, span=5, ratio=2)]
    for segment, now in zip(segments, (2e9, 1e9), strict=True):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        store.put(segment, label=f"at {now}")
    second, first = segments
    entries = FolderStore(store.root).entries()
    assert [stored.key for stored in entries] == [first.key, second.key]
    stored = entries[1]
    assert (stored.label, stored.created, stored.tenant) == ("at 2000000000.0", 2e9, "acme")
    assert (stored.span, stored.ratio, stored.entries) == (37, 4, 10)
    identity = second.identity
    for name in ("variant", "dtype", "backbone", "extractor"):
        assert getattr(stored, name) == getattr(identity, name)
    assert [stored.nbytes for stored in entries] == [
        path_of(store, segment).stat().st_size for segment in (first, second)
    ]
    assert store.nbytes == sum(stored.nbytes for stored in entries)


def test_entries_are_sorted_by_age_then_key(store, monkeypatch):
    ordered = sorted(map(make_segment, range(6)), key=lambda segment: segment.key)
    for segment in reversed(ordered):
        now = 1e9 if segment in ordered[3:] else 2e9
        monkeypatch.setattr(time, "time", lambda now=now: now)
        store.put(segment)
    expected = [segment.key for segment in ordered[3:] + ordered[:3]]
    assert [stored.key for stored in store.entries()] == expected


def test_any_label_comes_back(store):
    for seed, label in enumerate(("", 'Ω\n\0 "quoted" \\', "undecodable \udcff", "long" * 9999)):
        segment = make_segment(seed=seed)
        store.put(segment, label=label)
        assert store.get(segment.identity) is not None
        assert {stored.key: stored.label for stored in store.entries()}[segment.key] == label


def test_entries_skip_and_log_a_header_that_cannot_be_read(store, caplog):
    segment, other = make_segment(), make_segment(seed=1)
    store.put(segment)
    store.put(other)
    os.truncate(path_of(store, segment), 40)
    assert [stored.key for stored in store.entries()] == [other.key]
    assert segment.key in caplog.text
    assert path_of(store, segment).exists()


def test_verify_reports_each_file_and_moves_none(store):
    segments = [make_segment(seed=seed) for seed in range(3)]
    for segment in segments:
        store.put(segment)
    # The last byte is kv, the one before kv is a token id.
    for segment, place in ((segments[0], -1), (segments[1], -1 - segments[1].nbytes)):
        raw = bytearray(path_of(store, segment).read_bytes())
        raw[place] ^= 1
        path_of(store, segment).write_bytes(raw)
    before = contents_of(store)
    differs = "its checksum differs"
    expected = zip((segment.key for segment in segments), (differs, differs, None), strict=True)
    assert dict(store.verify()) == dict(expected)
    assert contents_of(store) == before


def test_foreign_files_are_neither_listed_nor_touched(store):
    segment = make_segment()
    store.put(segment)
    path = path_of(store, segment)
    elsewhere = store.root / ("00" if segment.key[:2] != "00" else "11")
    elsewhere.mkdir()
    for foreign in (elsewhere / path.name, path.with_name("notes.safetensors"), store.root / "x"):
        foreign.write_bytes(b"")
    assert [key for key, _ in FolderStore(store.root).verify()] == [segment.key]
    assert len(files_of(store)) == 4


def test_find_completes_a_unique_prefix(store):
    segments = [make_segment(seed=seed) for seed in range(4)]
    for segment in segments:
        store.put(segment)
    for segment in segments:
        assert store.find(segment.key[:6]) == segment.key == store.find(segment.key)


def test_find_refuses_what_names_no_single_segment(store):
    segment = make_segment()
    store.put(segment)
    twin = segment.key[:10] + "0" * 54
    (path_of(store, segment).with_name(f"{twin}.safetensors")).touch()
    with pytest.raises(StoreError, match="ambiguous") as caught:
        store.find(segment.key[:10])
    assert segment.key in str(caught.value) and twin in str(caught.value)
    missing = "0000" if segment.key[:4] != "0000" else "1111"
    with pytest.raises(StoreError, match="no segment"):
        store.find(missing)
    for prefix in ("", segment.key[:3], "wxyz", "../..", segment.key + "0"):
        with pytest.raises(StoreError, match="4 hex digits"):
            store.find(prefix)


def test_remove_deletes_one_segment_and_refuses_what_is_absent(store):
    segment, other = make_segment(), make_segment(seed=1)
    store.put(segment)
    store.put(other)
    store.remove(segment.key)
    assert store.get(segment.identity) is None
    assert [stored.key for stored in store.entries()] == [other.key]
    for key in (segment.key, other.key[:8], "../../etc/passwd"):
        with pytest.raises(StoreError, match="no segment"):
            store.remove(key)
    assert store.get(other.identity) is not None


def test_a_file_removed_between_listing_and_reading_is_left_out(store, monkeypatch):
    segment, other = make_segment(), make_segment(seed=1)
    store.put(segment)
    store.put(other)
    listed = store._paths()
    monkeypatch.setattr(store, "_paths", lambda: listed)
    store.remove(segment.key)
    assert [stored.key for stored in store.entries()] == [other.key]
    assert list(store.verify()) == [(other.key, None)]
    assert store.nbytes == path_of(store, other).stat().st_size
