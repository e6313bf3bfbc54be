"""What the pages say is so: links, commands, quoted messages and listings are compared with the tree."""

import argparse
import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sidcomp
from sidcomp.cli.codecs_page import markdown_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TEXTS = (".py", ".pyi", ".c", ".h", ".cu", ".cuh", ".cpp", ".hpp", ".sh", ".md", ".json", ".toml")


def names(pages: list[Path]) -> list[str]:
    return [str(p.relative_to(ROOT)) for p in pages]


def test_the_codecs_page_is_the_registry() -> None:
    page = (ROOT / "docs" / "codecs.md").read_text()
    assert page == markdown_page(), "run: python -m sidcomp codecs --markdown > docs/codecs.md"
    for entry in (*sidcomp.codecs(), *sidcomp.memories()):
        assert f"| `{entry.name}` |" in page


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:csrc|cuda|docs|examples|python|tests|benchmarks)/[\w./-]+\.\w+)", page.read_text()
    )
    for name in named:
        if "x.c" not in name:  # csrc/codec/x.c: any codec
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_make_targets_that_a_page_names_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"(?:`| {4}|&& )make ([a-z][\w-]*)", page.read_text()):
        assert target in targets, target


def test_the_page_about_codecs_names_the_functions_of_the_contract_and_their_number() -> None:
    contract = re.search(r"^typedef struct sid_codec \{$(.*?)^\} sid_codec;$",
                         (ROOT / "csrc" / "codec.h").read_text(), re.M | re.S)  # fmt: skip
    page = (ROOT / "docs" / "adding-a-codec.md").read_text()
    said = re.search(r"a description of itself, (\w+) functions, and (\w+) more", page)
    assert contract is not None and said is not None
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| [^|]+ \| (optional|for codecs|are not)?", page, re.M)
    named = {name: kind for names, kind in rows for name in re.findall(r"\w+", names) if kind != "are not"}
    functions = set(re.findall(r"\(\*(\w+)\)\(", contract[1]))
    assert functions == {name for name in named if name in functions} == named.keys()
    always = sum(not kind for kind in named.values())
    assert [WORDS[always], WORDS[len(named) - always]] == list(said.groups())


WORDS = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def test_contributing_says_which_share_of_the_tests_ci_runs() -> None:
    given = re.findall(r"\bshare=(\d+) rest=(\d+)", (ROOT / ".ci" / "run").read_text())
    (share, rest), *slow = [tuple(map(int, each)) for each in given]
    assert slow == [(2 * share, 2 * rest), (4 * share, 4 * rest)]
    # a turn counts modulo the share, and in other tests modulo what they have
    said = f"(`SHARE={share} REST={rest} TURN=0` to {share - 1}; on a slow machine half or a quarter as many)"
    assert said in (ROOT / "CONTRIBUTING.md").read_text()


def strings(tree: ast.AST) -> list[str]:
    """String constants of Python code, with <> for what is filled in."""
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            out.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            out.append("".join(str(v.value) if isinstance(v, ast.Constant) else "<>" for v in node.values))
    return out


def could_say(template: str, message: str) -> bool:
    """Whether a string of the code becomes this message when its blanks are filled. Strings that are blanks
    and little else do not count, because they fit anything."""
    parts = template.split("<>")
    enough = sum(map(len, parts)) >= LEAST
    return enough and re.fullmatch(".+?".join(map(re.escape, parts)), message) is not None


LEAST = 24  # characters, by which a message is found in the code


def test_a_quoted_message_is_compared_with_the_words_of_the_code() -> None:
    assert could_say("rank <> failed in this step: <>", "rank 1 failed in this step: ValueError: no data")
    assert not could_say("rank <> failed in this step: <>", "rank 1 failed in that step: ValueError: no data")
    assert not could_say("<>: <>", "rank 1: there is no such step, and there never was one")


def test_quoted_messages_are_those_of_the_code() -> None:
    """With examples in the place of what differs from case to case."""
    code = {s for f in (ROOT / "python").rglob("*.py") for s in strings(ast.parse(f.read_text()))}
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^```\n(.*?)\n```$", page, re.M | re.S)
    assert len(quoted) >= 18 and "<>" not in page
    for message in quoted:
        assert any(could_say(template, message) for template in code), message


def test_every_python_block_is_python_and_uses_what_there_is() -> None:
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)\n```$", page.read_text(), re.M | re.S):
            tree = ast.parse(block)
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sidcomp":
                    assert hasattr(sidcomp, node.attr), f"{page.name}: sidcomp.{node.attr}"
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "state":
                    assert hasattr(sidcomp.State, node.attr), f"{page.name}: state.{node.attr}"


DOTTED = re.compile(r"(?<![\w/.\"'-])sidcomp(?:\.[A-Za-z_]\w*)+")
NOT_PYTHON = re.compile(r"sidcomp\.(h|(rank|shard)\w*)$")  # a header, and keys of a checkpoint


def paths_named(text: str) -> set[str]:
    """The dotted names of sidcomp in a text, and the modules and names of its import statements."""
    imported = set(re.findall(r"\bimport (sidcomp[\w.]+)", text))
    for module, names in re.findall(r"\bfrom (sidcomp[\w.]*) import ([\w, ]+)", text):
        imported |= {f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip()}
    return {path for path in {*DOTTED.findall(text), *imported} if not NOT_PYTHON.match(path)}


def find_path(path: str) -> None:
    """Imports as much of a dotted name as is modules, and asks these for the rest."""
    module, *rest = path.split(".")
    value: object = importlib.import_module(module)
    for name in rest:
        module = f"{module}.{name}"
        try:
            value = importlib.import_module(module)
        except ModuleNotFoundError as e:
            if e.name is not None and not e.name.startswith("sidcomp"):
                return  # the module is there; what it needs is not installed here
            assert hasattr(value, name), path
            value = getattr(value, name)


def test_every_dotted_name_that_is_written_can_be_imported() -> None:
    written = [*PAGES, *(ROOT / "examples").glob("*.py"), *(ROOT / "python").rglob("*.py")]
    found = {path for page in written for path in paths_named(page.read_text())}
    assert {"sidcomp.fsdp.compress", "sidcomp.frameworks.lightning"} <= found and len(found) > 100
    for path in sorted(found):
        find_path(path)


@pytest.mark.parametrize("statement", ["import sidcomp.fsdp", "from sidcomp.fsdp import compress"])
def test_fsdp_is_a_module_of_its_own(statement: str) -> None:
    """In an interpreter that has not seen `sidcomp.fsdp` as an attribute."""
    ask = "; import sidcomp; print(sidcomp.fsdp.compress.__name__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        [sys.executable, "-c", statement + ask], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "compress", done.stderr


def test_fsdp_says_which_torch_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an older torch the module can be imported, and its functions say what they need."""
    from sidcomp.doors.fsdp import units as fsdp_units

    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp._fully_shard._fsdp_state", None)
    importlib.reload(fsdp_units)
    try:
        for name in sidcomp.fsdp.__all__:
            with pytest.raises(sidcomp.UnsupportedError, match=r"sidcomp\.fsdp needs PyTorch 2\.13 or newer"):
                getattr(sidcomp.fsdp, name)(*(None,) * (2 if name in ("compress", "reshard") else 1))
    finally:
        monkeypatch.undo()
        importlib.reload(fsdp_units)


def test_readme_has_the_minimal_example() -> None:
    """The lines of the README are those of a script that the tests run."""
    block = re.search(r"^```python\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block is not None
    script = (ROOT / "examples" / "minimal.py").read_text()
    for line in block[1].splitlines():
        if "sidcomp" in line or "optimizer" in line:
            assert line.split("#")[0].strip() in script, line


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_flags_that_a_page_gives_to_train_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import flags

    for line in re.findall(r'make train ARGS="([^"]*)"', page.read_text()):
        if "peaks" in line or "--help" in line:
            continue
        assert isinstance(flags.parse("", line.split()), argparse.Namespace)
    for name in ("flags", "tasks"):
        sys.modules.pop(name)


def test_the_changelog_names_every_codec_and_memory() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    for entry in (*sidcomp.codecs(), *sidcomp.memories()):
        assert f"`{entry.name}`" in text


def test_the_glossary_is_short_and_its_terms_are_in_use() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = [t for t in re.findall(r"^\| ([^|]+?) \|", text, re.M) if t != "term"]
    assert len(terms) == len(set(terms)) <= 30
    written = [p for p in PAGES if p.name not in ("glossary.md", "CHANGELOG.md")]
    pages = " ".join(p.read_text().lower() for p in written)
    for term in terms:
        assert all(word in pages for word in term.lower().split(", ")), term


GONE = r"(?<!round[\s_-])trips? parcels? journeys? verdicts? resting spoil(ed|s)? parked rivals?"


def replaced(more: str) -> re.Pattern[str]:
    """Finds the words that the glossary has replaced, `more` among them, also as a part of a name."""
    return re.compile(f"(?<![a-z])({'|'.join(f'{GONE} {more}'.split())})(?![a-z])", re.I)


def test_what_is_refused_is_found() -> None:
    word = replaced("owe[sd]?")
    for text in (
        "two trips",
        "TRIPS = 1",
        "a_trip",
        "rivals.py",
        "--no-rival",
        '"resting"',
        "Spoiled",
        "owes",
    ):
        assert word.search(text), text
    for text in ("a round trip", "round_trip", "strips", "arrivals", "interesting", "owned", "triple"):
        assert not word.search(text), text


def test_pages_use_the_words_of_the_glossary() -> None:
    """Not those that it has replaced; quoted code and error texts may still have them."""
    word = replaced("owe[sd]?")
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
            assert not word.search(prose), page.name


def test_sources_use_the_words_of_the_glossary() -> None:
    """In names and in comments of C, CUDA and the binding."""
    word = replaced("routes? owe[sd]? walk(s|ed|er)? laws? stolen steals?")
    for folder in ("csrc", "cuda", "python/binding"):
        files = [
            p for p in (ROOT / folder).rglob("*") if p.suffix in (".c", ".h", ".cu", ".cuh", ".cpp", ".hpp")
        ]
        assert files
        for path in files:
            found = word.search(path.read_text())
            assert not found, f"{path.relative_to(ROOT)}: {found[0] if found else ''}"


def test_python_uses_the_words_of_the_glossary() -> None:
    """In names and texts of the package, the examples, the benchmarks, their results, and the tests."""
    word = replaced("routes? steals?")
    former = {  # files that read what was saved with a former name
        "python/sidcomp/autotune/controller.py": "resting",
        "tests/ddp/test_auto_resume.py": "resting",
    }
    folders = ("python", "examples", "configs", "benchmarks", "tests")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in TEXTS]
    assert len(files) > 200
    for path in [ROOT / "Makefile", ROOT / "setup.py", *sorted(files)]:
        if path == Path(__file__):  # names what it refuses
            continue
        name = str(path.relative_to(ROOT))
        found = {m[0].lower() for m in word.finditer(f"{name} {path.read_text()}")}
        assert found <= {former.get(name)}, f"{name}: {found}"


def test_the_readme_is_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert "GPU status" in lines[2]
    rows = {
        name: [line for line in body.splitlines() if line]
        for name, body in re.findall(r"<!-- table: ([\w-]+) -->(.*?)<!-- /table -->", text, re.S)
    }
    assert list(rows) == ["train", "low-communication-short"] and len(rows["train"]) == 2 + 6
    assert [line for line in lines if line.startswith("|")] == [line for of in rows.values() for line in of]
    prose = [line for line in lines if not line.startswith("|")]
    assert len(lines) <= 100 and len(" ".join(prose).split()) <= 500


# Beside results.md, whose tables a script makes.
USER = "start which-one updates fsdp frameworks checkpoints codecs troubleshooting supported glossary api"
# Each has words of its own, beside generated tables.
LATER = {"delta.md": 600, "low-communication.md": 700, "promises.md": 600, "two-machines.md": 500}


def test_the_users_pages_are_few_and_short() -> None:
    pages = [ROOT / "docs" / f"{name}.md" for name in USER.split()]
    words = {page.name: len(page.read_text().split()) for page in pages if page.exists()}
    for name, most in LATER.items():
        text = re.sub(r"<!-- table.*?<!-- /table -->", "", (ROOT / "docs" / name).read_text(), flags=re.S)
        assert len(text.split()) <= most, name
    assert max(words.values()) <= 1500 and sum(words.values()) <= 10_000, words


def test_each_promise_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "promises.md").read_text()
    promises = re.findall(r"^\| (?!fault)[a-z].*$", page, re.M) + re.findall(
        r"^- \*\*.*(?:\n  .*)*", page, re.M
    )
    assert len(promises) > 15 and all("::test_" in x for x in promises)
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page):
        tree = ast.parse((ROOT / file).read_text())
        assert name in {f.name for f in tree.body if isinstance(f, ast.FunctionDef)}, f"{file}::{name}"
