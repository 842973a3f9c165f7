"""Reports: every number of a run stands in them, and a browser shows them as they should look."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from c2kv.cli.main import main
from c2kv.errors import DataError
from c2kv.evaluation.report import figures
from c2kv.evaluation.report.parts import Figure, Table
from c2kv.evaluation.report.sections import read_sections
from c2kv.evaluation.run import read_json, write_json

pytest.importorskip("matplotlib")

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MANIFEST = {
    "format": 1,
    "versions": {"c2kv": "0.1", "torch": "2.13"},
    "machine": {"processor": "x86", "cores": 2, "threads": 2, "device": "cpu"},
    "model": "a model <b>",
    "backbone_digest": "0123456789abcdef",
    "dtype": "float32",
    "extractors": {"c2kv": {"digest": "fedcba9876543210", "variant": "plain", "ratio": 4}},
    "untrained": [],
}


def scored(f1, nll):
    return {"scored": 100, "failed": 0, "f1": f1, "nll": nll, "entries": 150.0}


def cost(method, tokens, ready, **more):
    spread = {"median": ready, "least": ready * 0.9, "most": ready * 1.2}
    parts = {"load": ready * 0.1, "blend": 0.0, "compose": ready * 0.9}
    if method == "recompute":
        parts = {"load": 0.0, "blend": ready * 0.9, "compose": ready * 0.1}
    made = {"method": method, "documents": 8, "source_tokens": tokens, "entries": tokens}
    made |= {"ready": spread, "disk": spread, "cold": spread, "question": 0.1, "speedup": 9.0}
    made |= {"decode_tokens_per_second": 21.0, "peak_bytes": 4 * 10**8, "stored_bytes": 47 * 10**6}
    return {**made, **parts, "loaded_bytes": 1, "recomputed": 1, "break_even": 1.2, **more}


@pytest.fixture
def runs(tmp_path):
    """A finished run of each kind."""
    methods = ["recompute", "c2kv"]
    qa = {c: scored(10.0 + i, 3.0 + i) for i, c in enumerate((*methods, "wrongdoc", "noctx"))}
    qa["c2kv"] |= {"kl": 1.234, "top1": 0.567}
    task = {
        m: {
            "scored": 7,
            "failed": 0,
            "score": 12.34 + i,
            "ttft": 10.0 ** (i - 2),
            "entries": 9,
            "cut": 2,
        }
        for i, m in enumerate(methods)
    }
    kinds = {
        "qa": {"sets": {"squad": qa, "boolq": qa}, "mean": qa},
        "longbench": {
            "tasks": {"hotpotqa": task, "qmsum": task},
            "mean": {"recompute": 12.34, "c2kv": 13.34},
        },
        "bench": {
            "failed": [],
            "costs": [
                cost(m, t, r * t / 1024)
                for t in (1024, 4096)
                for m, r in (("recompute", 1.6), ("reuse", 0.016), ("c2kv", 0.0016))
            ],
        },
        "probes": {"found": {"c2kv": {"all": 41.7, "block end": 50.0}}, "failed": {"c2kv": 3}},
        "deviation": {
            "source_tokens": 3848,
            "documents": 8,
            "methods": [
                {"method": "reuse", "recomputed": 0.0, "deviation": 0.1527, "by_layer": [0.1]},
                {"method": "epic-32", "recomputed": 0.067, "deviation": 0.1214, "by_layer": [0.1]},
            ],
        },
    }
    folders = []
    for kind, rest in kinds.items():
        described = {**MANIFEST, "kind": kind, "conditions": methods, "protocol": "paper"}
        described |= {"tokens": [1024, 4096], "counts": [8]}
        folder = tmp_path / f"my-{kind}"
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"manifest": described, **rest}))
        folders.append(str(folder))
    return folders


def test_html_holds_all_of_it_and_needs_nothing_else(runs, tmp_path, capsys):
    output = tmp_path / "out" / "report.html"
    assert main(["report", *runs, "-o", str(output), "--title", "Two & <three>"]) == 0
    html = output.read_text()
    for text in (
        "Two &amp; &lt;three&gt;",
        "a model &lt;b&gt;",
        "1.234",
        "hotpotqa*",
        "13.34",
        "in-distribution",
        "0.1527",
        "block end",
        "plain, k = 4 (fedcba987654)",
        "4 contexts",
        "3 samples FAILED under c2kv",
        "0.92 missed",
    ):
        assert text in html, text
    assert html.count("<svg") == 5 and html.count("<table") == 11
    assert not re.search(r'(?:src|href)="(?!#)', html.replace("xlink:href", "x"))
    assert "5 runs" in capsys.readouterr().out
    again = tmp_path / "again.html"
    main(["report", *runs, "-o", str(again), "--title", "Two & <three>"])
    assert again.read_text() == html


def test_markdown_has_its_figures_beside_it(runs, tmp_path):
    output = tmp_path / "results.md"
    assert main(["report", *runs, "-o", str(output)]) == 0
    text = output.read_text()
    named = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert named == [f"results-{n}.svg" for n in range(1, 6)]
    assert all("</svg>" in (tmp_path / name).read_text() for name in named)
    assert "| score | hotpotqa* | qmsum | mean |" in text
    assert "| c2kv | 13.34 | 13.34 | 13.34 |" in text
    assert "\n\\* in-distribution" in text  # no list


def test_runs_over_the_same_samples_share_a_table(runs, tmp_path):
    qa, longbench = runs[:2]
    other = tmp_path / "tuned"
    other.mkdir()
    summary = json.loads((Path(longbench) / "summary.json").read_text())
    summary["manifest"] |= {"model": "tuned", "conditions": ["recompute", "block"]}
    for scores in summary["tasks"].values():
        scores["block"] = {**scores.pop("c2kv"), "score": 56.78}
    summary["mean"] = {"block": 56.78}
    (other / "summary.json").write_text(json.dumps(summary))
    joined, alone = read_sections([Path(longbench), other, Path(qa)])
    table = next(part for part in joined.parts if isinstance(part, Table))
    assert table.header == ("score", "hotpotqa*", "qmsum", "mean")
    assert table.rows == (
        ("samples", "7", "7", ""),
        ("recompute (my-longbench)", "12.34", "12.34", "12.34"),
        ("c2kv", "13.34", "13.34", "13.34"),
        ("recompute (tuned)", "12.34", "12.34", "–"),
        ("block", "56.78", "56.78", "56.78"),
    )
    assert joined.title == "LongBench: my-longbench + tuned"
    assert joined.facts["model, tuned"].startswith("tuned") and "model" in alone.facts
    assert "versions" in joined.facts and "model" not in joined.facts  # shared facts once
    summary["manifest"]["model"] = MANIFEST["model"]
    summary["mean"]["recompute"] = 12.34
    (other / "summary.json").write_text(json.dumps(summary))
    joined, _ = read_sections([Path(longbench), other, Path(qa)])
    table = next(part for part in joined.parts if isinstance(part, Table))
    assert [row[0] for row in table.rows[1:]] == ["recompute", "c2kv", "block"]  # the same once
    summary["manifest"]["protocol"] = "official"  # never beside the other
    (other / "summary.json").write_text(json.dumps(summary))
    assert len(read_sections([Path(longbench), other])) == 2


def test_what_extractors_learnt_from_stands_with_them(runs):
    summary = json.loads((Path(runs[0]) / "summary.json").read_text())
    extractors = summary["manifest"]["extractors"]
    extractors["c2kv"]["trained_on"] = ["hotpotqa", "squad"]
    extractors["wrongdoc"] = extractors["c2kv"]
    extractors["random"] = {**extractors["c2kv"], "digest": "0" * 64, "trained_on": []}

    def facts():
        (Path(runs[0]) / "summary.json").write_text(json.dumps(summary))
        (section,) = read_sections([Path(runs[0])])
        return section.facts

    assert facts()["trained on"] == "hotpotqa, squad"
    extractors["c2kv-residual"] = {
        **extractors["c2kv"],
        "digest": "1" * 64,
        "variant": "residual",
        "trained_on": ["musique"],
    }
    shown = facts()
    assert shown["trained on (plain, k = 4 (fedcba987654))"] == "hotpotqa, squad"
    assert shown["trained on (residual, k = 4 (111111111111))"] == "musique"
    assert "trained on" not in shown


def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    longbench = Path(runs[1])
    summary = json.loads((longbench / "summary.json").read_text())
    summary["tasks"]["hotpotqa"]["c2kv"]["score"] = 77.77
    other = tmp_path / "b" / longbench.name
    other.mkdir(parents=True)
    (other / "summary.json").write_text(json.dumps(summary))
    (section,) = read_sections([longbench, other])
    table = next(part for part in section.parts if isinstance(part, Table))
    assert [row[1] for row in table.rows[1:]] == ["12.34", "13.34", "77.77"]
    assert table.rows[-1][0] == f"c2kv ({other})"


def test_controls_are_in_tables_but_no_choice_of_speed():
    """Their TTFT is of other documents, of fewer, or of none."""
    one = {"c2kv": (0.01, 20.0), "reuse": (0.1, 15.0), "wrongdoc:c2kv": (0.01, 5.0)}
    one |= {"noctx (my-run)": (0.2, 4.0), "random": (0.01, 1.0)}
    drawn = figures.svg(figures.trade_off({"hotpotqa": one}))
    assert ">c2kv<" in drawn and ">reuse<" in drawn
    assert not any(name in drawn for name in ("wrongdoc", "noctx", "random"))


def test_every_task_has_a_panel_and_no_panel_is_empty():
    tasks = {f"task {number}": {"c2kv": (0.01, 20.0)} for number in range(7)}
    axes = figures.trade_off(tasks).axes
    assert [one.get_title() for one in axes if one.get_visible()] == list(tasks)


def test_longbench_says_what_a_score_took(runs):
    (section,) = read_sections([Path(runs[1])])
    ttft, entries = section.parts[2:]
    assert ttft.header == ("median TTFT", "hotpotqa", "qmsum")
    assert ttft.rows[1] == ("c2kv", "100.0 ms", "100.0 ms")
    assert entries.rows[1] == ("c2kv", "9", "9")


def test_a_star_is_explained_where_there_is_one(runs):
    (section,) = read_sections([Path(runs[1])])
    assert section.parts[0].note.startswith("* in-distribution")
    summary = json.loads((Path(runs[1]) / "summary.json").read_text())
    del summary["tasks"]["hotpotqa"]
    (Path(runs[1]) / "summary.json").write_text(json.dumps(summary))
    (section,) = read_sections([Path(runs[1])])
    assert section.parts[0].header[1:-1] == ("qmsum",) and not section.parts[0].note


def test_a_bench_that_was_interrupted_says_so(runs):
    folder = Path(runs[2])
    assert "missing" not in read_sections([folder])[0].text
    summary = json.loads((folder / "summary.json").read_text())
    summary["costs"] = [c for c in summary["costs"] if c["source_tokens"] == 1024]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "NOT RUN to its end: 1 points are missing" in read_sections([folder])[0].text


def test_a_bench_without_a_point_is_a_report_too(runs):
    (folder,) = [Path(run) for run in runs if run.endswith("my-bench")]
    summary = json.loads((folder / "summary.json").read_text())
    summary["manifest"] |= {"tokens": [9], "counts": [1]}
    failed = [{"source_tokens": 9, "documents": 1, "method": "reuse", "error": "CUDA out."}]
    (folder / "summary.json").write_text(json.dumps({**summary, "costs": [], "failed": failed}))
    (section,) = read_sections([folder])
    assert not section.parts and "reuse failed with 9 tokens in 1 documents: CUDA" in section.text


def test_failures_are_told_and_what_has_no_score_has_no_bar(runs):
    folder = Path(runs[0])
    summary = json.loads((folder / "summary.json").read_text())
    summary["sets"]["squad"]["noctx"] = {"scored": 0, "failed": 100}
    summary["mean"]["noctx"] = {"scored": 0, "failed": 100}
    (folder / "summary.json").write_text(json.dumps(summary))
    (section,) = read_sections([folder])
    assert "squad 100 of 100 under noctx" in section.text
    figure = next(part for part in section.parts if isinstance(part, Figure))
    assert "wrongdoc" in figure.svg and "noctx" not in figure.svg


def test_scores_over_fewer_samples_say_so(runs):
    folder = Path(runs[1])
    summary = json.loads((folder / "summary.json").read_text())
    summary["tasks"]["qmsum"]["recompute"] |= {"scored": 5, "failed": 2}
    (folder / "summary.json").write_text(json.dumps(summary))
    (section,) = read_sections([folder])
    assert section.parts[0].rows[:2] == (
        ("samples", "7", "7", ""),
        ("recompute", "12.34", "12.34 (of 5)", "12.34"),
    )
    assert "qmsum 2 of 7 under recompute" in section.text


def test_answers_to_fewer_questions_say_so_too(runs):
    folder = Path(runs[0])
    summary = json.loads((folder / "summary.json").read_text())
    summary["sets"]["squad"]["recompute"] |= {"scored": 60, "failed": 40}
    summary["mean"]["recompute"] = {"scored": 160, "failed": 40}
    summary["mean"]["c2kv"]["f1_margin"] = 2.34
    (folder / "summary.json").write_text(json.dumps(summary))
    (section,) = read_sections([folder])
    assert "Questions: squad 100, boolq 100." in section.text
    means, _, f1, nll = (part.rows for part in section.parts[1:])
    assert means[0][:3] == ("recompute", "–", "–") and means[1][1:3] == ("11.0 ± 2.3", "–")
    assert f1[0] == ("recompute", "10.0 (of 60)", "10.0")
    assert nll[0] == ("recompute", "3.000 (of 60)", "3.000")
    assert ">recompute<" not in section.parts[0].svg


def test_other_folders_are_passed_over_aloud(runs, tmp_path, capsys):
    (tmp_path / "trained").mkdir()
    (tmp_path / "report.html").touch()
    output = str(tmp_path / "all.html")
    others = [str(tmp_path / name) for name in ("trained", "report.html")]
    assert main(["report", runs[0], *others, "-o", output]) == 0
    seen = capsys.readouterr()
    assert f"passed over, as no runs: {', '.join(others)}" in seen.err and "1 runs" in seen.out
    assert main(["report", *others, "-o", output]) == 1
    assert "none of these is a run" in capsys.readouterr().err
    assert main(["report", runs[0], str(tmp_path / "mistyped"), "-o", output]) == 1
    assert "mistyped' holds no summary.json" in capsys.readouterr().err


def test_runs_stand_side_by_side_only_where_they_can(runs, tmp_path):
    """Not with times of another machine, nor with other prompts."""
    for number, change in enumerate(
        (
            *({"dtype": "bfloat16"}, {"machine": {"threads": 1}}),
            *({"template_digest": "other"}, {"tokenizer_digest": "other"}),
        )
    ):
        other = tmp_path / str(number)
        other.mkdir()
        summary = json.loads((Path(runs[1]) / "summary.json").read_text())
        changed = {"manifest": {**summary["manifest"], **change}}
        described = {**MANIFEST["machine"], **change.get("machine", {})}
        changed["manifest"]["machine"] = described
        (other / "summary.json").write_text(json.dumps({**summary, **changed}))
        assert len(read_sections([Path(runs[1]), other])) == 2


def test_a_methods_colour_is_its_own_in_every_run():
    names = ("c2kv (a)", "c2kv (b)", "epic-32 (a)", "reuse")
    drawn = figures.trade_off({"qmsum": dict.fromkeys(names, (0.1, 1.0))}).axes[0].collections
    colours = [tuple(points.get_facecolor()[0]) for points in drawn]
    assert colours[0] == colours[1] and len(set(colours)) == 3
    assert len({points.get_paths()[0].vertices.shape for points in drawn[:2]}) == 2


def test_variants_of_a_method_have_lines_of_their_own():
    names = ("reuse", "cacheblend-0.15", "cacheblend-0.3", "cacheblend-0.15-oracle")
    rows = [{"method": name, "recomputed": 0.2, "deviation": 0.1} for name in names]
    drawn = figures.svg(figures.deviation(rows))
    assert ">cacheblend<" in drawn and ">cacheblend-oracle<" in drawn


def test_what_is_no_finished_run_is_named(tmp_path):
    with pytest.raises(DataError, match="not run to its end"):
        read_sections([tmp_path])
    (tmp_path / "summary.json").write_text('{"manifest": {"kind": "qa"}}')
    with pytest.raises(DataError, match="format None and this c2kv reads 1"):
        read_sections([tmp_path])
    (tmp_path / "summary.json").write_text('{"manifest": {"format": 1, "kind": "magic"}}')
    with pytest.raises(DataError, match="'magic'"):
        read_sections([tmp_path])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_shows_it(runs, tmp_path):
    """Rendered at two widths: text is there, nothing is cut off, tables scroll inside."""
    output = tmp_path / "report.html"
    main(["report", *runs, "-o", str(output)])
    probe = """<script>window.onload = () => { const out = [];
      out.push(document.documentElement.scrollWidth <= window.innerWidth + 1);
      for (const svg of document.querySelectorAll('figure svg')) {
        const box = svg.getBoundingClientRect(); out.push(box.width > 200 && box.height > 80); }
      out.push(getComputedStyle(document.querySelector('td + td')).textAlign === 'right');
      document.title = 'seen:' + out.join(); }</script>"""
    page = tmp_path / "probe.html"
    page.write_text(output.read_text().replace("</body>", probe + "</body>"))
    for width in (1200, 480):
        picture = tmp_path / f"{width}.png"
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-component-update"]
        command += ["--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
        command += [f"--window-size={width},2600"]
        shot = subprocess.run(
            [*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120
        )
        assert shot.returncode == 0 and picture.stat().st_size > 20_000
        dom = subprocess.run(
            [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
        )
        (seen,) = re.findall(r"<title>seen:(.*?)</title>", dom.stdout)
        assert seen.split(",") == ["true"] * 7, seen


def test_an_interrupted_summary_leaves_the_last_one(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"costs": [1]})
    whole = Path.write_text

    def torn(self, text, **kwargs):
        whole(self, text[:5], **kwargs)
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"costs": [1, 2]})
    assert read_json(path) == {"costs": [1]}


def test_a_report_needs_no_torch():
    script = "import sys, c2kv.evaluation.report.sections, c2kv.evaluation.report.render\n"
    script += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
