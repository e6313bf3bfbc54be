"""Rules for the package's own source that no linter knows: nothing depends on torch's defaults, one function
alone takes the addresses that the core gets, and no rank unpickles what another one sent."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import sidcomp
from torch.utils import _device

PACKAGE = Path(sidcomp.__file__).parent

BOTH = ("dtype", "device")
NEEDS = {f.__name__: BOTH for f in _device._device_constructors()} | {
    # what torch does not list there
    "normal": BOTH,
    "fftfreq": BOTH,
    "rfftfreq": BOTH,
    "from_file": BOTH,
    "frombuffer": ("dtype",),  # always on the CPU
    "Generator": ("device",),
    "load": ("map_location",),
}
# Where an address is compared with another one, and no call of the core gets it.
COMPARED = {
    "doors/fsdp/units.py: Unit.complete",  # does the gradient lie in this buffer?
    "doors/backend/recognition.py: Place.of",
    "doors/backend/recognition.py: Place.holds",
    "delta/tensors.py: _memory",  # do tensors share memory?
}
# What checks first.
CHECKED = {
    "address.py: address",
    "address.py: _elsewhere",
    "standalone/compressor.py: _look",  # arrays of numpy
    "standalone/compressor.py: _empty",
    "standalone/compressor.py: _Block.__init__",
}
ADDRESSES = {
    "data_ptr",
    "mutable_data_ptr",
    "const_data_ptr",
    "ctypes",
    "addressof",
    "__array_interface__",
    "__cuda_array_interface__",
}


@cache
def nodes(source: str) -> list[tuple[ast.AST, str, ast.AST]]:
    """Each node of a file, the class and function that it is in, and its parent."""
    found: list[tuple[ast.AST, str, ast.AST]] = []
    todo: list[tuple[ast.AST, str]] = [(ast.parse(source), "")]
    for parent, within in todo:
        if isinstance(parent, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            within = f"{within}.{parent.name}".removeprefix(".")
        for child in ast.iter_child_nodes(parent):
            found.append((child, within, parent))
            todo.append((child, within))
    return found


def of_torch(source: str) -> dict[str, str]:
    """The names that a file imports from torch, and what they stand for."""
    names = {}
    for node, *_ in nodes(source):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "torch":
                    names[one.asname or "torch"] = one.name if one.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return names


def spelt(node: ast.AST, names: dict[str, str]) -> str:
    """What of torch an expression names, such as "torch.nn.Linear"; "" if it names nothing of torch."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and (before := spelt(node.value, names)):
        return f"{before}.{node.attr}"
    return ""


def lacking(call: ast.Call, what: str) -> list[str]:
    """What a call of torch leaves to torch's defaults."""
    *_, folder, name = ["", *what.split(".")]
    needs = NEEDS.get(name, ())
    if folder == "nn" and name[0].isupper() and name not in ("Parameter", "Buffer"):
        needs = BOTH
    given = {k.arg for k in call.keywords}
    if name == "Generator" and call.args:
        given.add("device")
    return [n for n in needs if n not in given]


def defaults(source: str) -> list[str]:
    """Where a file leaves a dtype or a device to torch.set_default_dtype and torch.set_default_device."""
    found, names = [], of_torch(source)
    for node, where, parent in nodes(source):
        what = spelt(node, names)
        if not what:
            continue
        name = what.rpartition(".")[2]
        called = isinstance(parent, ast.Call) and parent.func is node
        line = f"{where or 'module'}, line {node.lineno}: {what}"  # type: ignore[attr-defined]
        if called and isinstance(parent, ast.Call) and (lack := lacking(parent, what)):
            found.append(f"{line}() without {' and '.join(lack)}")
        elif called and name.endswith(("Tensor", "Storage")):
            found.append(f"{line}() has no dtype and device: take torch.empty")
        elif not called and name in NEEDS and not name[0].isupper():
            found.append(f"{line} is passed on, so nobody sees with what it is called")
    return found


def addresses(source: str, file: str) -> list[str]:
    """Where a file takes the address of memory."""
    return [
        f"{file}: {where}, line {node.lineno}: {node.attr}"
        for node, where, _ in nodes(source)
        if isinstance(node, ast.Attribute) and node.attr in ADDRESSES
        and f"{file}: {where}" not in COMPARED | CHECKED
    ]  # fmt: skip


def files() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_nothing_in_the_package_depends_on_torchs_default_dtype_and_device() -> None:
    found = {file: lines for file, source in files().items() if (lines := defaults(source))}
    assert not found, "\n".join(f"{file}: {line}" for file, lines in found.items() for line in lines)


def test_one_function_takes_the_addresses_that_the_core_gets() -> None:
    found = [line for file, source in files().items() for line in addresses(source, file)]
    assert not found, "use sidcomp.address.address:\n" + "\n".join(found)


def unpickles(source: str) -> list[str]:
    """Where a file reads pickles: torch's collectives of objects do, and torch.load without weights_only."""
    found, of = [], of_torch(source)
    for node, where, parent in nodes(source):
        names = [str(getattr(node, name, "")) for name in ("id", "attr", "module")]
        names += [one.name for one in getattr(node, "names", []) if isinstance(one, ast.alias)]
        bare = spelt(node, of) == "torch.load" and not (
            isinstance(parent, ast.Call)
            and any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in parent.keywords)
        )
        if bare or any(re.search(r"_object(_list)?$|pickle|^marshal$|^shelve$", one) for one in names):
            found.append(f"{where or 'module'}, line {node.lineno}")  # type: ignore[attr-defined]
    return found


def test_no_rank_unpickles_what_another_one_sent() -> None:
    found = {file: lines for file, source in files().items() if (lines := unpickles(source))}
    assert not found, f"use sidcomp.runtime.telling.tell: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed as dist\ndist.all_gather_object(told, 1)",
        "from torch.distributed import broadcast_object_list",
        "import torch\ntorch.load(file, map_location='cpu')",
        "import torch\ntorch.load(file, weights_only=False)",
    ],
)
def test_the_rule_finds_pickles(source: str) -> None:
    assert unpickles(source)


def lengths(source: str) -> dict[str, int]:
    """The lines of each function, without its docstring."""
    found = {}
    for node, where, _ in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            said = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0  # type: ignore[operator]
            found[f"{where}.{node.name}"] = node.end_lineno - node.lineno + 1 - said  # type: ignore[operator]
    return found


def test_files_and_functions_are_short() -> None:
    for file, source in files().items():
        assert source.count("\n") <= 600, file
        long = {name: lines for name, lines in lengths(source).items() if lines > 60}
        assert not long, (file, long)


@pytest.mark.parametrize(
    "source, lacks",
    [
        ("import torch\ntorch.zeros(3)", "torch.zeros() without dtype and device"),
        ("import torch\ntorch.tensor([1], device='cpu')", "torch.tensor() without dtype"),
        ("import torch\ntorch.as_tensor(x, dtype=torch.int64)", "torch.as_tensor() without device"),
        ("import torch\ntorch.zeros(3, dtype=d, pin_memory=True)", "torch.zeros() without device"),
        ("import torch\ntorch.randn(3, **how)", "torch.randn() without dtype and device"),
        ("import torch as t\nt.arange(3)", "torch.arange() without dtype and device"),
        ("from torch import ones as o\no(3)", "torch.ones() without dtype and device"),
        ("import torch\nmap(torch.zeros, sizes)", "torch.zeros is passed on"),
        ("import torch\ntorch.sparse_coo_tensor(i, v)", "torch.sparse_coo_tensor() without dtype and device"),
        ("import torch\ntorch.Generator().manual_seed(0)", "torch.Generator() without device"),
        ("import torch\ntorch.frombuffer(data)", "torch.frombuffer() without dtype"),
        ("import torch\ntorch.load(file)", "torch.load() without map_location"),
        ("import torch\ntorch.FloatTensor(3)", "torch.FloatTensor() has no dtype and device"),
        ("from torch import nn\nnn.Linear(3, 3)", "torch.nn.Linear() without dtype and device"),
        ("import torch.nn as nn\nnn.ReLU()", "torch.nn.ReLU() without dtype and device"),
        ("import torch\nclass A:\n    def f(self):\n        torch.eye(3)", "A.f, line 4: torch.eye()"),
    ],
)
def test_the_rule_finds_what_is_left_to_torch(source: str, lacks: str) -> None:
    (line,) = defaults(source)
    assert lacks in line


@pytest.mark.parametrize(
    "source",
    [
        "x.data_ptr()",
        "f = x.data_ptr",
        "a.ctypes.data",
        "ctypes.addressof(b)",
        "x.untyped_storage().data_ptr()",
    ],
)
def test_the_rule_finds_addresses(source: str) -> None:
    inside = f"def address(x):\n    {source}"
    assert addresses(inside, "address.py") == []
    assert len(addresses(inside, "runtime/group.py")) == 1
    assert len(addresses(source, "address.py")) == 1


def test_what_the_rules_except_is_there() -> None:
    """Nothing is excepted that has gone."""
    excepted = {
        f"{file}: {where}"
        for file, source in files().items()
        for node, where, _ in nodes(source)
        if isinstance(node, ast.Attribute) and node.attr in ADDRESSES
    }
    assert excepted == COMPARED | CHECKED
