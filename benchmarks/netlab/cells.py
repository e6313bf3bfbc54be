"""A cell is one network and one task, with all hooks in the same processes, in turns. A file keeps cells."""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import machine
from benchmarks.netlab.lab import Lab, LabError, parse_rate
from benchmarks.netlab.measure import measure

Cell = dict[str, Any]


class Turns(NamedTuple):
    """How long a cell is measured. steps: of a turn, the first not timed; timeout: seconds."""

    blocks: int
    steps: int
    warmup: int
    timeout: float


def one_cell(hosts: int, rate: str, task: str, hooks: str, turns: Turns) -> Cell:
    """Builds the network and measures. hooks: with commas. Raises LabError."""
    with Lab.build(hosts, parse_rate(rate)) as lab:
        network = lab.introduce()
        result = measure(lab, task, hooks.split(","), *turns)
    return {
        "hosts": hosts,
        "rate": rate,
        "task": task,
        "hooks": hooks,
        "turns": list(turns[:3]),
        "emulation": lab.emulation,
        "network": network,
        "machine": machine(),
        "result": result,
    }


def add_kept(parser: argparse.ArgumentParser, name: str) -> None:
    add = parser.add_argument
    add("--minutes", type=float, default=float("inf"), help="start no cell after so many minutes")
    add("--cells", type=Path, default=Path(f"build/{name}.json"), help="kept there (default %(default)s)")
    add("--again", action="store_true", help="measure cells that are there already")


class Kept:
    """The cells in a file, by key. What was measured with other hooks or turns is not taken for the same."""

    def __init__(self, args: argparse.Namespace) -> None:
        """args: with the flags of `add_kept`."""
        self.path: Path = args.cells
        self.again: bool = args.again
        self.until = time.monotonic() + 60 * args.minutes
        self._cells: dict[str, Cell] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.failed: list[str] = []

    def get(self, key: str, hooks: str, turns: Turns) -> Cell | None:
        cell = self._cells.get(key)
        same = cell is not None and (cell["hooks"], cell["turns"]) == (hooks, list(turns[:3]))
        return cell if same else None

    def found(self, keys: Iterable[str], hooks: str, turns: Turns) -> list[Cell]:
        """Those of these that are there."""
        return [cell for key in keys if (cell := self.get(key, hooks, turns)) is not None]

    def fill(self, wanted: Mapping[str, tuple[int, str, str]], hooks: str, turns: Turns) -> None:
        """Measures what is missing of these hosts, rates and tasks, by key, as long as there is time."""
        for i, (key, where) in enumerate(wanted.items()):
            if self.get(key, hooks, turns) and not self.again:
                continue
            if time.monotonic() > self.until:
                print(f"out of time: {len(wanted) - i} cells were not looked at; call it again to go on")
                return
            print(f"\n{key}: cell {i + 1} of {len(wanted)}", flush=True)
            self._measure(key, where, hooks, turns)

    def _measure(self, key: str, where: tuple[int, str, str], hooks: str, turns: Turns) -> None:
        """Adds a cell; `failed` has its key if the network or a rank fails."""
        begun = time.monotonic()
        try:
            self._cells[key] = one_cell(*where, hooks, turns)
        except LabError as e:
            print(f"{key}: {e}", file=sys.stderr)
            self.failed.append(key)
            return
        print(f"{key}: {time.monotonic() - begun:.0f} s", flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self._cells))
        part.replace(self.path)
