"""For mkdocs: the pages that lie outside docs/, a page for each file of benchmarks/results, and links to
files that the site does not have.

In the repository a link is a path to a file, so that it works on GitHub too. Here it becomes a link to the
page, if the site has one for that file, and else to the file on GitHub. A link to a file that does not exist
stays as it is: mkdocs refuses it.
"""

import json
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import compact_json  # noqa: E402

RESULTS = "benchmarks/results/"
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "tests/TRACK_RECORD.md": "track-record.md",
}
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files, config):
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for file in sorted(compact_json.RESULTS.glob("*.json")):
        content = compact_json.page(json.loads(file.read_text()))
        page = File.generated(config, f"results/{file.stem}.md", content=content)
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri.startswith("results/"):
        return markdown
    sources = {name: source for source, name in OUTSIDE.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return LINK.sub(lambda link: f"]({moved(link[1], source, config.repo_url)}{link[2] or ''})", markdown)


def moved(target: str, source: str, repository: str) -> str:
    """Where `target`, as the file `source` names it, is found from the site's page of that file."""
    if ":" in target:
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith(RESULTS) and path.endswith(".json") and (ROOT / path).exists():
        return f"results/{posixpath.basename(path).removesuffix('.json')}.md"
    if not (ROOT / path).exists():
        return target
    return f"{repository}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"
