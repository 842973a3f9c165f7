"""The command line: real runs on the embedded model, and one-line errors with exit codes."""

import json
import subprocess
import sys

import pytest

from c2kv.cli.main import main

pytestmark = pytest.mark.embedded


@pytest.fixture
def folder(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "mill.txt").write_text("The mill at Aldwick was built in 1743 by Joan Farr.")
    (docs / "boat.md").write_text("The ferry Teal carries 14 cars.")
    (docs / "ignored.bin").write_bytes(b"\0\1")
    return docs


@pytest.fixture
def run(tmp_path, capsys, embedded, monkeypatch):
    """Runs a command; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr("c2kv.engine.load_backbone", lambda *_, **__: embedded)

    def call(*argv):
        try:
            code = main([str(a) for a in argv])
        except SystemExit as stopped:
            code = stopped.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture
def options(tmp_path):
    return ["--untrained", "--store", tmp_path / "store", "-n", "16"]


def test_ask_answers_and_says_how(run, folder, options):
    code, out, err = run("ask", *options, "-q", "When was the mill built?", folder)
    assert code == 0 and out.strip()
    assert "segments 2: 2 extracted now" in err and "UNTRAINED" in err and "TTFT" in err
    _, _, err = run("ask", *options, "-q", "When was the mill built?", folder)
    assert "segments 2: 2 from disk" in err


def test_ask_json_carries_reports(run, folder, options):
    questions = ["-q", "When was the mill built?", "-q", "How many cars?"]
    code, out, _ = run("ask", *options, *questions, "--json", "--method", "recompute", folder)
    answers = json.loads(out)
    assert code == 0 and [a["question"] for a in answers] == questions[1::2]
    assert "1743" in answers[0]["answer"] and answers[0]["report"]["method"] == "recompute"


def test_compare_shows_both_methods(run, folder, options):
    code, out, _ = run("ask", *options, "-q", "When was the mill built?", "--compare", folder)
    assert code == 0 and "untrained extractor" in out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "1743" in rows["recompute"] or "1×" in rows["recompute"]
    assert "×" in rows["c2kv"]


def test_documents_come_from_stdin_too(run, options, monkeypatch):
    import io

    class Stdin:
        buffer = io.BytesIO(b"The code is K-88.")

    monkeypatch.setattr(sys, "stdin", Stdin)
    code, out, _ = run("ask", *options, "--method", "recompute", "-q", "What is the code?", "-")
    assert code == 0 and "K-88" in out


def test_extract_then_manage_segments(run, folder, options, tmp_path):
    store = ["--store", tmp_path / "store"]
    code, out, _ = run("extract", "--untrained", *store, "--json", folder)
    made = json.loads(out)
    assert code == 0 and made["extracted"] == 2 and made["untrained"]
    code, out, _ = run("extract", "--untrained", *store, folder)
    assert code == 0 and "0 segments extracted" in out and "2 already stored" in out
    _, out, _ = run("segments", "ls", *store)
    assert "mill.txt" in out and "2 segments" in out
    key = made["segments"][0]
    code, out, _ = run("segments", "show", key[:8], *store)
    assert json.loads(out)["key"] == key
    assert run("segments", "verify", *store)[0] == 0
    path = tmp_path / "store" / key[:2] / f"{key}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = run("segments", "verify", *store)
    assert code == 1 and "1 damaged" in out
    assert run("segments", "rm", key, *store)[0] == 0
    code, _, err = run("segments", "show", key, *store)
    assert code == 1 and err.startswith("c2kv: error:")
    code, _, err = run("segments", "ls", "--store", tmp_path / "none")
    assert code == 1 and "there is no store at" in err


def write(path, raw):
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "gone.txt", "cannot read document"),
        (lambda p: write(p / "empty.txt", b""), "is empty; leave it out"),
        (lambda p: write(p / "stars.txt", b"*** --- ***"), "no letter or digit"),
        (lambda p: write(p / "bin.txt", b"a\0b"), "is binary"),
        (lambda p: write(p / "latin.txt", "é".encode("latin-1")), "is not UTF-8"),
        (lambda p: p, "holds no .txt"),
    ],
)
def test_bad_documents_are_one_line_errors(run, tmp_path, options, make, says):
    code, out, err = run("ask", *options, "-q", "Why?", make(tmp_path))
    assert code == 1 and not out
    assert says in err and err.count("\n") == 1 and err.startswith("c2kv: error:")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask", "-q", "Why?"],
        ["ask", "doc.txt"],
        ["ask", "-q", "Why?", "-k", "0", "doc.txt"],
        ["ask", "-q", "Why?", "-k", "65", "doc.txt"],
        ["ask", "-q", "Why?", "--method", "magic", "doc.txt"],
        ["nonsense"],
        [],
    ],
)
def test_bad_arguments_exit_2(run, arguments):
    assert run(*arguments)[0] == 2


def test_other_failures_are_one_line_errors(run, folder, options, tmp_path, llama):
    from c2kv.extractor import Extractor

    long = write(tmp_path / "long.txt", b"word " * 9000)
    Extractor.from_backbone(llama).save_pretrained(tmp_path / "other")
    store = options[1:]
    for arguments, says in (
        (["ask", *options, "-q", "Why?", long], "has 8192"),
        (["ask", *store, "-x", tmp_path / "other", "-q", "Why?", folder], "was made for 'llama'"),
        (["ask", *store, "-x", tmp_path / "none", "-q", "Why?", folder], "neither a folder nor"),
        (["ask", *options, "-q", " ", folder], "question is empty"),
    ):
        code, _, err = run(*arguments)
        assert code == 1 and says in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--untrained", "-x", "somewhere"], "choose one"),
        (["--untrained", "--temperature", "0.5"], "without --sample"),
        (["--untrained", "--sample", "--top-p", "5"], "top_p 5"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(run, folder, arguments, says, tmp_path):
    store = ["--store", tmp_path / "store"]
    code, _, err = run("ask", *arguments, *store, "-q", "Why?", folder)
    assert code == 1 and says in err and err.count("\n") == 1


def test_recompute_needs_no_extractor(run, folder, tmp_path):
    arguments = ["--method", "recompute", "--store", tmp_path / "store", "-n", "16"]
    code, out, _ = run("ask", *arguments, "-q", "When was the mill built?", folder)
    assert code == 0 and "1743" in out


def test_the_bar_is_closed_before_the_answer_appears(run, folder, options, monkeypatch):
    events = []

    class Bar:
        n = 0

        def __init__(self, **settings):
            events.append("open")

        def update(self, tokens):
            self.n += tokens

        def close(self):
            events.append("close")

    monkeypatch.setattr("tqdm.tqdm", Bar)
    monkeypatch.setattr("builtins.print", lambda *_, **__: events.append("print"))
    assert run("ask", *options, "-q", "When was the mill built?", folder)[0] == 0
    assert events[:2] == ["open", "close"] and "print" in events


def test_a_full_disk_loses_nothing(run, folder, options, tmp_path, monkeypatch):
    assert run("ask", *options, "-q", "Why?", folder / "mill.txt")[0] == 0

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        code, _, err = run("ask", *options, "-q", "Why?", folder)
    assert code == 1 and "No space left" in err and err.count("\n") == 1
    code, out, _ = run("segments", "verify", "--store", tmp_path / "store")
    assert code == 0 and "1 sound, 0 damaged" in out


def test_doctor_passes_the_embedded_model_and_names_what_it_refuses(
    run, embedded, monkeypatch, tmp_path
):
    from transformers import MistralConfig

    with monkeypatch.context() as patch:
        patch.setattr("c2kv.models.load_backbone", lambda *_, **__: embedded)
        code, out, _ = run("doctor", "smollm2-135m")
        assert code == 0 and "FAILED" not in out and out.count(" ok ") == 6
    MistralConfig(sliding_window=16).save_pretrained(tmp_path)
    code, out, _ = run("doctor", tmp_path)
    assert code == 1 and "sliding window of 16" in out and "refused" in out


def test_info(run):
    code, out, _ = run("info", "--json")
    assert code == 0 and {"c2kv", "torch", "transformers", "devices"} <= set(json.loads(out))


def test_help_and_argument_errors_never_import_torch():
    script = (
        "import sys\nfrom c2kv.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    for arguments in (["--help"], ["ask", "--help"], ["ask", "-k", "65"], ["segments", "ls", "-h"]):
        subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True)


def test_the_package_imports_without_torch():
    script = "import sys, c2kv\nassert 'torch' not in sys.modules\nc2kv.Engine\nimport torch"
    subprocess.run([sys.executable, "-c", script], check=True)
