"""For mkdocs: the pages that lie outside docs/, and links to files that the site does not have.

In the repository a link is a path to a file, so that it works on GitHub too. Here it becomes a link to the
page, if the site has one for that file, and else to the file on GitHub. A link to a file that does not exist
stays as it is: mkdocs refuses it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files, config):
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
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
    if not (ROOT / path).exists():
        return target
    return f"{repository}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"
