"""The documentation's site has every page and every public name, and no link that leads nowhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
import sidcomp

ROOT = Path(__file__).resolve().parents[2]
# docs/site/hooks.py has these from elsewhere in the tree
OUTSIDE = {"changes.md", "contributing.md", "security.md", "track-record.md"}


def test_the_navigation_has_every_page() -> None:
    listed = re.findall(r"^ +- .*: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert len(listed) == len(set(listed))
    assert set(listed) - OUTSIDE == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: sidcomp\.(\w+)$", page, re.M))
    pages = page + (ROOT / "docs" / "delta.md").read_text()  # which has its own
    modules = set(re.findall(r"^::: sidcomp\.(\w+)\.", pages, re.M))
    public = set(sidcomp.__all__) - {"__version__"}
    assert len(public) <= 16
    errors = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    assert errors == set(sidcomp.errors.__all__)
    assert public - shown == {"errors", "planner", "simulation"} and shown <= public
    assert modules == {"backend", "delta", "frameworks", "fsdp", "planner", "simulation"}
    for name, base in re.findall(r"^\| `(\w+)` \|(?: `(\w+)`)? \|", page, re.M):
        bases = {b.__name__ for b in getattr(sidcomp, name).__mro__}
        assert base in bases if base else not bases & {"ValueError", "RuntimeError", "NotImplementedError"}


def markdown(docstring: str) -> str:
    pytest.importorskip("griffe")
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        import docstrings
    finally:
        sys.path.pop(0)
    return docstrings.as_markdown(docstring)


def test_lists_of_arguments_become_definition_lists() -> None:
    listed = "a       first,\n        more\nb, long, one\n        second\nc\nd       both"
    shown = "`a`\n:   first,\n    more\n\n`b`, `long`, `one`\n:   second\n\n`c`\n`d`\n:   both"
    assert markdown(f"What,\non two lines.\n\n{listed}\n\nEnd.") == f"What,\non two lines.\n\n{shown}\n\nEnd."


def test_other_paragraphs_of_docstrings_stay_as_they_are() -> None:
    text = "One line.\n\n    code(here)\n\nTwo  spaces, and a list:\n- one\n- two"
    assert markdown(text) == text


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Strict: a link to a page, picture, anchor or file that is not there is an error."""
    for tool in ("mkdocs", "material", "mkdocstrings_handlers"):
        if find_spec(tool) is None:
            pytest.skip("needs mkdocs: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "api" / "index.html").read_text()
    for name in ("State", "compress", "simulation.Loopback", "planner.plan", "Schedule"):
        assert f'id="sidcomp.{name}"' in page
    assert "<dt><code>codec</code>, <code>memory</code></dt>" in page
    first = (tmp_path / "index.html").read_text()
    assert "admonition warning" in first and "images/doors.svg#only-light" in first
    assert "#fff" not in (tmp_path / "images" / "doors-dark.svg").read_text()
    assert "/edit/main/CHANGELOG.md" in (tmp_path / "changes" / "index.html").read_text()
    assert 'href="../results/papers-cupcake/"' in (tmp_path / "papers" / "index.html").read_text()
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert "<table>" in (tmp_path / "results" / file.stem / "index.html").read_text()
    assert 'data-md-component="source"' not in first, "the page would ask api.github.com for stars"
    assert 'href="../planning/">planning</a>' in page and "docs/planning.md" not in page
    assert "sidcomp.<wbr>Options(<wbr>exclude" in (tmp_path / "which-one" / "index.html").read_text()
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    boosts = {entry["location"]: entry.get("boost", 1) for entry in found}
    assert boosts["start/"] > boosts["wire/"] > boosts["changes/"] > boosts["track-record/"]
    assert broken_links(tmp_path) == []


def broken_links(site: Path) -> list[str]:
    """Links of the finished pages that lead to no file or anchor; mkdocs checks those of the sources."""
    pages = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    anchors = {page: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        for link in set(re.findall(r'\b(?:href|src)="(?!\w+:|//)([^"]*)"', text)):
            path, anchor = urldefrag(unquote(link))
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and anchor not in anchors.get(target, {anchor})):
                broken.append(f"{page.relative_to(site)}: {link}")
    return broken
