"""For mkdocs: the pages that lie outside docs/, a page for each file of benchmarks/results, links to files
that the site does not have, alerts, and drawings for dark screens.

In the repository a link is a path to a file, so that it works on GitHub too. Here it becomes a link to the
page, if the site has one for that file, and else to the file on GitHub. A link to a file that does not exist
stays as it is: mkdocs refuses it. GitHub's alerts (> [!NOTE]) become admonitions, and each docs/images/*.svg
gets a dark sibling, of which the site shows one. Long code in a line may break after a dot, an equals sign
or a bracket; short code and quantities in tables do not break. The search ranks the pages for users first,
and records and figures last.
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
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "tests/TRACK_RECORD.md": "track-record.md",
}
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
ALERT = re.compile(r"^> \[!(\w+)\]\n((?:>.*(?:\n|$))+)", re.M)
DRAWING = re.compile(r"!\[([^\]]*)\]\((images/[\w-]+)\.svg\)")
CODE = re.compile(r"(?<!</span>)<code>([^<\n]+)</code>")
SHORT = 15  # characters
QUANTITY = re.compile(r"(?<=\d) (?=(?:%|[KMG]B?|[MG]bit/s|ms)(?!\w))")
CELL = re.compile(r"<t[dh][ >].*?</t[dh]>", re.S)
BREAK = re.compile(r"(?<=\w)([=_(/]|\.(?!\d))(?=\w|[&\"\[({*])")
RANKS = {"Use": 2, "Project": 0.3}  # the search multiplies scores by these
DARK = {"#fff": "#1e2129", "#222": "#e2e4e9", "#555": "#9a9ca5", "#f6f6f6": "#2b2e38", "#ccc": "#555865"}
DARK |= {"#9fb3c8": "#44607c", "#edae49": "#8f6420", "#66a182": "#3b6b53", "#d1495b": "#a33848"}


def on_config(config):
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    config.copyright = f"sidcomp {version[1]}" if version else "sidcomp"
    return config


def on_files(files, config):
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for file in sorted(compact_json.RESULTS.glob("*.json")):
        content = compact_json.page(json.loads(file.read_text()))
        page = File.generated(config, f"results/{file.stem}.md", content=content)
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    for drawing in (ROOT / "docs" / "images").glob("*.svg"):
        files.append(
            File.generated(config, f"images/{drawing.stem}-dark.svg", content=dark(drawing.read_text()))
        )
    return files


def on_page_markdown(markdown, page, config, files):
    rank = RANKS.get(page.parent.title, 1) if page.parent else 1
    if page.file.src_uri.startswith("results/") or page.file.src_uri == OUTSIDE["tests/TRACK_RECORD.md"]:
        rank = 0.2
    page.meta["search"] = {"boost": rank}
    if page.file.src_uri.startswith("results/"):
        return markdown
    sources = {name: source for source, name in OUTSIDE.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    page.edit_url = f"{config.repo_url}/edit/main/{source}"
    markdown = LINK.sub(lambda link: f"]({moved(link[1], source, config.repo_url)}{link[2] or ''})", markdown)
    markdown = DRAWING.sub(r"![\1](\2.svg#only-light)\n![\1](\2-dark.svg#only-dark)", markdown)
    return ALERT.sub(lambda found: admonition(found[1], found[2]), markdown)


def on_page_content(html, page, config, files):
    html = CELL.sub(lambda cell: QUANTITY.sub("&nbsp;", cell[0]), html)
    return CODE.sub(lambda code: breakable(code[1]), html)


def on_post_page(output, page, config):
    # Material's script would ask api.github.com for the stars of such a link.
    return output.replace(' data-md-component="source"', "")


def breakable(code: str) -> str:
    if len(code) > SHORT:
        return f"<code>{BREAK.sub(lambda sign: sign[1] + '<wbr>', code)}</code>"
    return f'<code class="short">{code}</code>' if re.search("[- ]", code) else f"<code>{code}</code>"


def admonition(kind: str, quoted: str) -> str:
    lines = (re.sub("^> ?", "    ", line).rstrip() for line in quoted.splitlines())
    return f"!!! {kind.lower()}\n\n" + "\n".join(lines) + "\n\n"


def dark(drawing: str) -> str:
    return re.sub(r"#(?:[0-9a-f]{6}|[0-9a-f]{3})\b", lambda color: DARK.get(color[0], color[0]), drawing)


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
