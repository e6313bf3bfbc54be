"""Rules for the package's own source that no linter knows: nothing depends on torch's defaults."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


def nodes(tree: ast.AST, within: tuple[str, ...] = ()) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Each node, the class and function that it is in, and its parent."""
    for child in ast.iter_child_nodes(tree):
        yield child, ".".join(within), tree
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from nodes(child, (*within, child.name) if named else within)  # type: ignore[attr-defined]


def of_torch(tree: ast.AST) -> dict[str, str]:
    """The names that a file imports from torch, and what they stand for."""
    names = {}
    for node in ast.walk(tree):
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
    tree, found = ast.parse(source), []
    names = of_torch(tree)
    for node, where, parent in nodes(tree):
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


def files() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_nothing_in_the_package_depends_on_torchs_default_dtype_and_device() -> None:
    found = {file: lines for file, source in files().items() if (lines := defaults(source))}
    assert not found, "\n".join(f"{file}: {line}" for file, lines in found.items() for line in lines)


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(3, dtype=torch.int64, device='cpu')",
        "torch.Generator('cpu')",
        "torch.Generator(device=x.device)",
        "torch.frombuffer(data, dtype=torch.uint8)",
        "torch.zeros_like(x); x.new_zeros(3); torch.cat([x, x]); torch.from_numpy(a)",
        "torch.load(file, map_location='cpu')",
        "torch.nn.Parameter(x); torch.nn.functional.relu(x); isinstance(m, torch.nn.Linear)",
        "torch.nn.Linear(3, 3, dtype=torch.float32, device='cpu')",
        "def f(x: torch.Tensor) -> torch.Generator: ...",
        "numpy.zeros(3); zeros(3); x.full((3,), 1)",
    ],
)
def test_the_rule_passes_what_is_explicit(source: str) -> None:
    assert defaults(f"import torch\n{source}") == []


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
