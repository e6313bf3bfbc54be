"""Files that the package reads and writes: no text overwhelms a reader, and no writer leaves half a file."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
from full_disk import no_more_than
from sidcomp import files, rank_states
from sidcomp.cli.common import refuse_unwritable
from sidcomp.config import presets
from sidcomp.planner import fusion, plan_plot
from sidcomp.planner.cost_curve import Curve
from sidcomp.planner.profile import Method, Profile
from sidcomp.runtime import checkpoint_reader
from sidcomp.standalone.model_shapes import read_model

PACKAGE = Path(sidcomp.__file__).parent

# ---- reading ----------------------------------------------------------------------------------------------

JSON_READERS: dict[str, Callable[[Path], object]] = {
    "profile": Profile.load,
    "State(profile=)": lambda path: sidcomp.State("auto", profile=path),
    "instance": fusion.load,
    "instance as text": lambda path: fusion.load(path.read_text()),
    "model": read_model,
}
BRACKETS = "[" * 100_000
JSON = {
    "brackets": (f'{{"a": {BRACKETS}', "nested too deeply"),
    "tables": ('{"a": ' * 100_000, "nested too deeply"),
    "closed brackets": (f'{{"a": {BRACKETS}{"]" * 100_000}}}', "nested too deeply"),
    "a quote that hides them": (f'{{"a\\\\": {BRACKETS}', "nested too deeply"),
    "an integer": (f'{{"a": {"9" * 5000}}}', "number of more than 100"),
    "a fraction": (f'{{"a": -0.{"9" * 5000}}}', "number of more than 100"),
    "a field twice": (f'{{{",".join(f"{json.dumps(str(i))}: 1" for i in range(50_000))}, "9": 1}}', "twice"),
}  # fmt: skip
TOML = {
    "brackets": (f"a = {'[' * 30_000}", "nested too deeply"),
    "tables": (f"a = {'{a = ' * 12_000}", "nested too deeply"),
    "a backslash that hides them": (f"a = '\\'\nb = {'[' * 30_000}", "nested too deeply"),
    "quotes that hide them": (f'a = ["""x"""", {"[" * 30_000}', "nested too deeply"),
    "an integer": (f"seed = {'9' * 5000}", "number of more than 100"),
    "an integer with underscores": (f"seed = {'9_' * 5000}9", "number of more than 100"),
    "a hexadecimal integer": (f"seed = 0x{'f' * 5000}", "number of more than 100"),
    "a dotted key": (f"{'a.' * 30_000}b = 1", "more than 16 parts"),
    "a dotted key of texts": ('"a" . ' * 8_000 + "b = 1", "more than 16 parts"),
    "a dotted section": (f"[{'a.' * 30_000}b]", "more than 16 parts"),
    "length": (f"{'a.' * 50_000}b = 1", "more than the 65536 bytes"),
}


@pytest.mark.parametrize("reader", JSON_READERS)
@pytest.mark.parametrize("what", JSON)
def test_json_is_bounded_before_it_is_parsed(reader: str, what: str, tmp_path: Path) -> None:
    text, said = JSON[what]
    (tmp_path / "given.json").write_text(text)
    with pytest.raises(sidcomp.SidcompError, match=said):
        JSON_READERS[reader](tmp_path / "given.json")


@pytest.mark.parametrize("what", TOML)
def test_toml_is_bounded_before_it_is_parsed(what: str, tmp_path: Path) -> None:
    text, said = TOML[what]
    (tmp_path / "given.toml").write_text(f'codec = "topk"\n{text}\n')
    with pytest.raises(sidcomp.ArgumentError, match=said) as caught:
        sidcomp.preset(tmp_path / "given.toml")
    assert "given.toml" in str(caught.value)


def test_what_is_quoted_counts_for_nothing(tmp_path: Path) -> None:
    """Only what a parser would go into is bounded."""
    deep, word = "[{" * 500, "w" * 500
    text = json.dumps({deep: word, 'a"' + deep: "\\" + deep})
    assert files.parse_json(text, "it") == json.loads(text)
    (tmp_path / "given.toml").write_text(
        f"codec = 'topk' # {deep} {'a.' * 50} '\nexclude = ['{deep}\\', \"\\\"{deep}\", "
        f"'''{word}\n{deep}'']''',\n"
        f'"""{deep}""""", ""]\n"seed" = 3\n'
    )
    read = presets.load(tmp_path / "given.toml").arguments
    assert read["seed"] == 3 and read["exclude"] == [
        f"{deep}\\", f'"{deep}', f"{word}\n{deep}'']", f'{deep}""', ""
    ]  # fmt: skip


FILES: dict[str, Callable[[Path], object]] = {
    "preset": lambda path: sidcomp.preset(path.with_suffix(".toml")),
    "profile": Profile.load,
    "State(profile=)": lambda path: sidcomp.State("auto", profile=path),
    "instance": fusion.load,
    "model": read_model,
    "state of a rank": lambda path: rank_states.checked(path, str(path)),
}


@pytest.mark.parametrize("reader", FILES)
@pytest.mark.parametrize("what", ["missing", "a folder", "not a text"])
def test_what_cannot_be_read_is_named_with_the_cause(reader: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    for each in (path, path.with_suffix(".toml")) if what != "missing" else ():
        each.mkdir() if what == "a folder" else each.write_bytes(b"\xff\xfe\x00")
    cause = {"missing": "No such file", "a folder": "Is a directory", "not a text": "utf-8|UnpicklingError"}
    with pytest.raises(sidcomp.SidcompError, match=f"given.*(?:{cause[what]})"):
        FILES[reader](path)


def nested(levels: int) -> list[Any]:
    out: list[Any] = []
    for _ in range(levels):
        out = [out]
    return out


def doubled(levels: int) -> list[Any]:
    """2^levels entries, in memory for a few."""
    out: list[Any] = []
    for _ in range(levels):
        out = [out, out]
    return out


FIELDS = ("format", "policy", "parameters", "controller", "layout", "residuals", "more")
HEAVY = [
    *((field, nested(100_000)) for field in FIELDS),
    *((f, 10**5000) for f in FIELDS[:-1]),
    ("more", doubled(30)),
]


@pytest.mark.parametrize(("field", "value"), HEAVY, ids=[str(i) for i in range(len(HEAVY))])
def test_no_checkpoint_overwhelms_its_reader(
    field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_reader, "_ENTRIES", 1 << 12)
    good: dict[str, Any] = {
        "format": checkpoint_reader.FORMAT, "world": 0, "rank": 0, "step": 0, "settled": False, "scale": None,
        "memory": "residual", "layout": [], "residuals": {}, "controller": None,
    }  # fmt: skip
    checkpoint_reader.read(good)
    with pytest.raises(sidcomp.CheckpointError):
        checkpoint_reader.read({**good, field: value})


@pytest.mark.parametrize(
    "saved",
    [
        {"run": [1], "state": {"world": 2, "step": 1}},
        {"run": "a", "state": {"world": "2", "step": 1}},
        {"run": "a", "state": {"world": -1, "step": 1}},
        {"run": "a", "state": {"world": 2, "step": [1]}},
        {"run": "a", "state": 3},
        {"run": nested(90), "state": {"world": 2, "step": 1}},
        [],
    ],
)
def test_a_rank_s_file_is_checked_before_it_is_compared(saved: object, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "sidcomp-rank0.pt")
    with pytest.raises(sidcomp.CheckpointError, match=r"sidcomp-rank0\.pt is damaged"):
        rank_states.checked(tmp_path / "sidcomp-rank0.pt", str(tmp_path / "sidcomp-rank0.pt"))


# ---- writing ----------------------------------------------------------------------------------------------


def save_profile(path: Path) -> None:
    dense = Method("dense", "none", "allreduce", None, Curve([[0, 1], [8, 9]]), None)
    tensors = [{"name": "a", "bytes": 8, "bucket": 0, "ready_ps": 3, "kind": "float32 cpu"}]
    times = {
        "forward_ps": 1,
        "compute_ps": 4,
        "dense_ps": 4,
        "contention": {},
        "measured_s": 1.0,
    }
    place: dict[str, Any] = {"model": "m", "world": 2, "device": "cpu", "backend": "gloo", "threads": 1}
    Profile(**place, **times, tensors=tensors, methods=[dense]).save(path)


def draw_plan(path: Path) -> None:
    pytest.importorskip("matplotlib")
    spans = {kind: [0, 10**9] for kind in fusion.SPANS}
    plan_plot.draw({"predicted": [{"group": 0, **spans}]}, path, "title")


def draw_bench(path: Path) -> None:
    pytest.importorskip("matplotlib")
    from sidcomp.cli import bench

    dense = Method("dense", "none", "allreduce", None, Curve([[0, 1], [8, 9]]), None)
    bench.draw([dense], [1 << 20], 2, path)


def draw_simulation(path: Path) -> None:
    pytest.importorskip("matplotlib")
    sidcomp.simulation.simulate(64, worlds=[2, 4]).plot(path)


def trace(path: Path) -> None:
    sidcomp.State("topk").timeline(path)


def save_tensor(path: Path) -> None:
    """More than a buffer holds: torch has an error of its own for a write that failed."""
    files.write(path, lambda file: torch.save(torch.zeros(100_000), file))


WRITERS = {
    "tensor": save_tensor,
    "profile": save_profile,
    "plot": draw_plan,
    "plot of bench": draw_bench,
    "plot of simulate": draw_simulation,
    "trace": trace,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_what_was_there(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    for before in ([], [path]):
        for each in before:
            each.write_text("before")
        with no_more_than(1), pytest.raises(sidcomp.ArgumentError, match=r"out\.png: File too large"):
            WRITERS[writer](path)
        assert list(tmp_path.iterdir()) == before
        assert all(each.read_text() == "before" for each in before)
    WRITERS[writer](path)
    assert list(tmp_path.iterdir()) == [path] and path.stat().st_size > 20


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    ("where", "cause"),
    [("no/out.png", "No such file"), (".", "Is a directory"), ("file/out.png", "Not a directory")],
)
def test_what_cannot_be_written_is_named(writer: str, where: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    with pytest.raises(sidcomp.ArgumentError, match=cause) as caught:
        WRITERS[writer](tmp_path / where)
    assert str(tmp_path / where) in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_device_is_written_as_it_is() -> None:
    with pytest.raises(sidcomp.ArgumentError, match=r"/dev/full: No space left on device"):
        save_profile(Path("/dev/full"))
    assert Path("/dev/full").is_char_device()


def test_a_pipe_is_written_as_it_is() -> None:
    """/dev/stdout leads to pipe:[number], which no path names."""
    code = "from pathlib import Path; import sidcomp.cli.common as c; from sidcomp import files; "
    code += "c.refuse_unwritable('--save', Path('/dev/stdout')); "
    code += "files.write('/dev/stdout', lambda file: file.write(b'whole'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert (done.returncode, done.stdout) == (0, b"whole"), done.stderr


def test_a_file_beside_which_none_can_be_written_is_refused_beforehand() -> None:
    """It is replaced, not written to."""
    path = Path("/proc/self/oom_score_adj")
    if not path.is_file():
        pytest.skip("no /proc")
    with pytest.raises(ValueError, match="no file can be written there"):
        refuse_unwritable("--save", path)
    with pytest.raises(sidcomp.ArgumentError):
        save_profile(path)


def test_a_file_is_written_where_there_are_no_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("a file system that has none")

    monkeypatch.setattr(files.shutil, "copymode", refused)
    path = tmp_path / "file"
    for _ in range(2):
        save_profile(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and Profile.load(path).world == 2


def test_a_link_and_its_mode_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to(target)
    save_profile(link)
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert Profile.load(target).world == 2


# ---- the kind ---------------------------------------------------------------------------------------------

OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "savefig"}
PARSING = {
    "json.load",
    "json.loads",
    "json.dump",
    "tomllib.load",
    "tomllib.loads",
    "torch.load",
    "torch.save",
}
# Who may do what, and with what.
OWN = {
    "files.py": {"open", "json.loads", "savefig"},
    "config/presets.py": {"tomllib.loads"},  # text that `files` has bounded
    "rank_states.py": {"torch.load", "torch.save"},  # a file that `files` writes, and memory
    "frameworks/distributed_checkpoint.py": {"torch.save"},  # memory
    "cli/bench.py": {"open", "json.loads"},  # what its own processes say
    "cli/app.py": {"open"},  # /dev/null
    "cli/common.py": {"open"},  # to see whether a file can be written
    "cli/doctor.py": {"open"},  # /proc/cpuinfo
    "runtime/nccl.py": {"open"},  # /proc/self/maps
    "autotune/local_ranks.py": {"json.loads"},  # what `bench` has given it
    "runtime/engine.py": {"open"},  # a bucket
    "local/rendezvous.py": {"json.loads"},  # the record, from the store
}


def touches(module: Path) -> set[str]:
    """The calls of a module by which files are opened, parsed or written."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            whole = ast.unparse(node.func)
            last = whole.rpartition(".")[2]
            found |= {last} & OPENING | {whole} & PARSING
    return found


def test_every_file_goes_through_one_module() -> None:
    modules = {str(m.relative_to(PACKAGE)): touches(m) for m in PACKAGE.rglob("*.py")}
    assert {name: found for name, found in modules.items() if found} == OWN
