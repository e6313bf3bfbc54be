"""For mkdocstrings: docstrings are plain text in the source, and list arguments and fields as

    name, name      what it is,
                    on several lines
    a longer, name, than, the, column
                    what it is

Markdown would run these lines together. Here such a paragraph becomes a definition list. The name of a page,
docs/NAME.md, becomes a link to it.
"""

import inspect
import re

import griffe

PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")


class Lists(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = as_markdown(inspect.cleandoc(obj.docstring.value))


def as_markdown(text: str) -> str:
    text = "\n\n".join(as_list(part) if is_list(part) else part for part in re.split(r"\n{2,}", text))
    return PAGE.sub(r"[\1](\1.md)", text)


def is_list(paragraph: str) -> bool:
    """Its first line begins at the margin and is followed by lines that do not, or has a second column."""
    lines = paragraph.split("\n")
    if lines[0].startswith(" "):
        return False
    return any(line.startswith("    ") for line in lines) or all(
        re.match(r"\S+ {3,}\S", line) for line in lines
    )


def as_list(paragraph: str) -> str:
    """Terms that have no text of their own share that of the term that follows."""
    out = []
    for line in paragraph.split("\n"):
        if line.startswith(" "):
            begun = out[-1].startswith(":")
            out.append(
                f"    {line.strip()}" if begun or out[-1].startswith("    ") else f":   {line.strip()}"
            )
            continue
        term, _, rest = (line, "", "") if "  " not in line else re.split(r"( {2,})", line, maxsplit=1)
        if out and out[-1].startswith((":", "    ")):
            out.append("")
        out.append(", ".join(f"`{name}`" for name in term.split(", ")))
        if rest:
            out.append(f":   {rest}")
    return "\n".join(out)
