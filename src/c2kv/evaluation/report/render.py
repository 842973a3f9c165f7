"""Sections as one HTML file that needs nothing else, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from c2kv.evaluation.report.parts import Figure, Section, Table

_STYLE = """
:root { --ink: #1f2328; --soft: #59636e; --line: #d8dee4; --paper: #fff; --band: #f6f8fa; }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  color: var(--ink); background: var(--band); margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; margin: 0 0 .3rem; letter-spacing: -.01em; }
.lead { color: var(--soft); margin: 0 0 2rem; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.5rem 1.75rem; margin: 0 0 1.5rem; }
h2 { font-size: 1.25rem; margin: 0 0 .5rem; }
section > p { margin: 0 0 1rem; max-width: 75ch; color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .85rem;
  margin: 0 0 1.25rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .8rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--line); }
tbody tr:hover { background: var(--band); }
.note { font-size: .82rem; color: var(--soft); margin: .3rem 0 0; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""


def to_html(title: str, sections: Sequence[Section]) -> str:
    body = "".join(map(_html_section, sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">Made by c2kv report from the runs named '
        f"below; every number was measured in them.</p>\n{body}</main>\n</body>\n</html>\n"
    )


def _html_section(section: Section) -> str:
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in section.facts.items()
    )
    parts = "".join(map(_html_part, section.parts))
    return (
        f"<section>\n<h2>{escape(section.title)}</h2>\n<p>{escape(section.text)}</p>\n"
        + (f"<dl>{facts}</dl>\n" if facts else "")
        + f"{parts}</section>\n"
    )


def _html_part(part: Table | Figure) -> str:
    if isinstance(part, Figure):
        label = escape(part.alt, quote=True)
        return f'<figure role="img" aria-label="{label}">{part.svg}</figure>\n'
    head = "".join(f"<th>{escape(cell)}</th>" for cell in part.header)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in part.rows
    )
    note = f'<p class="note">{escape(part.note)}</p>' if part.note else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="table">{table}{note}</div>\n'


def to_markdown(title: str, sections: Sequence[Section], figures: Sequence[str]) -> str:
    """figures: the files that the sections' figures were written to, in order."""
    files = iter(figures)
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", "", section.text, ""]
        lines += [f"* {name}: {value}" for name, value in section.facts.items()]
        lines += [""] if section.facts else []
        for part in section.parts:
            if isinstance(part, Figure):
                lines += [f"![{part.alt}]({next(files)})", ""]
                continue
            lines.append("| " + " | ".join(part.header) + " |")
            lines.append("|---" + "|---:" * (len(part.header) - 1) + "|")
            lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in part.rows]
            note = part.note.replace("*", "\\*")  # a star at a line's start makes a list
            lines += ["", *([note, ""] if note else [])]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
