"""What the documentation shows: its example of a method runs, every method has a page."""

import re
from pathlib import Path

import pytest

from c2kv.methods import registry
from conftest import backbone_of
from test_methods import documents_of, kv, materials_of, run

DOCS = Path(__file__).parent.parent / "docs"


def test_the_example_of_a_method_works(monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "methods/adding.md").read_text(), re.S)
    exec(compile(code, "adding.md", "exec"), {})
    llama = backbone_of("llama")
    documents, materials = documents_of(llama), materials_of(llama)
    got = run(llama, "head-0.5", documents, materials=materials)
    assert got.composition.entries == 5 + 4 + 1 + 7
    whole = run(llama, "head-1.0", documents, materials=materials)
    assert kv(whole).equal(kv(run(llama, "reuse", documents, materials=materials)))


@pytest.mark.parametrize("family", sorted(registry.FAMILIES))
def test_every_method_has_a_page(family):
    page = "controls" if family == "random" else family
    assert (DOCS / "methods" / f"{page}.md").is_file()
    assert f"{page}.md" in (DOCS / "methods/README.md").read_text()


def test_files_the_documentation_points_to_exist():
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
