"""Programs in the idioms of public scripts, with the one call, beside plain training."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run

HERE = Path(__file__).parent
STEPS = 50
PROGRAMS = ("gpt", "imagenet", "flattened", "muon", "gan", "lora", "hsdp")
PLAIN_MODULES = ("flattened", "lora")  # they send updates whatever the arguments
RANKS = {"hsdp": 4}
HUNDREDTH: dict[str, Any] = {"codec": "topk", "ratio": 100, "values": "log2", "indices": "packed"}
# How far the loss may be above that of plain training: of 50 steps, where each run has its own rounding.
MARGINS = {"gan": 0.35, "hsdp": 0.15}


def program(
    rank: int, world: int, name: str, folder: str, arguments: dict[str, Any] | None
) -> dict[str, Any]:
    sys.path.insert(0, str(HERE))
    out: dict[str, Any] = importlib.import_module(name).main(rank, world, STEPS, Path(folder), arguments)
    return out


def trained(name: str, folder: Path, arguments: dict[str, Any] | None) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    return run(program, RANKS.get(name, 2), name, str(folder), arguments)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What plain training ends with, by program."""
    known: dict[str, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        if name not in known:
            known[name] = trained(name, tmp_path_factory.mktemp(name), None)
        return known[name]

    return of


def equal(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    pairs = [p for x, y in zip(a, b, strict=True) for p in zip(x["parameters"], y["parameters"], strict=True)]
    return all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("name", [p for p in PROGRAMS if p not in PLAIN_MODULES])
def test_uncompressed_gradients_have_the_bits_of_plain_training(
    name: str, plain: Any, tmp_path: Path
) -> None:
    assert equal(trained(name, tmp_path, {"codec": "none"}), plain(name))


@pytest.mark.parametrize("name", PROGRAMS)
def test_four_bits_keep_the_loss(name: str, plain: Any, tmp_path: Path) -> None:
    check(trained(name, tmp_path, {"codec": "int4"}), plain(name), MARGINS.get(name, 0.1))


@pytest.mark.parametrize("name", [p for p in PROGRAMS if p != "hsdp"])
def test_updates_at_a_hundredth_keep_the_loss(name: str, plain: Any, tmp_path: Path) -> None:
    check(trained(name, tmp_path, {**HUNDREDTH, "updates": True}), plain(name), MARGINS.get(name, 0.1))


def check(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], margin: float) -> None:
    assert equal(ours[:1] * len(ours), ours), "replicas differ"
    assert ours[0]["loss"] < theirs[0]["loss"] + margin, (ours[0]["loss"], theirs[0]["loss"])


@pytest.mark.parametrize("updates", [False, True])
def test_a_resumed_script_ends_with_the_same_bits(updates: bool, tmp_path: Path) -> None:
    arguments = {"codec": "int4", "updates": updates}
    once = trained("imagenet", tmp_path, arguments)
    assert equal(trained("imagenet", tmp_path, arguments), once)  # now it finds a checkpoint


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_changes_in_few_lines(name: str) -> None:
    """Beside the import and the end: the call, and what saves, loads or leaves an average out."""
    lines = (HERE / f"{name}.py").read_text().splitlines()
    calls = [line for line in lines if re.search(r"sidcomp\.compress\(|run\.(save|load)\(", line)]
    assert 1 <= len(calls) <= 3
