"""A cell is one network and one task, with all hooks in the same processes, in turns. A file keeps cells."""

import json
import sys
import time
from collections.abc import Callable
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


class Kept:
    """The cells in a file, by key. What was measured with other hooks or turns is not taken for the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cells: dict[str, Cell] = json.loads(path.read_text()) if path.exists() else {}
        self.failed: list[str] = []

    def get(self, key: str, hooks: str, turns: Turns) -> Cell | None:
        cell = self._cells.get(key)
        same = cell is not None and (cell["hooks"], cell["turns"]) == (hooks, list(turns[:3]))
        return cell if same else None

    def measure(self, key: str, which: str, measured: Callable[[], Cell]) -> None:
        """Adds a cell; `failed` has its key if the network or a rank fails."""
        print(f"\n{key}: {which}", flush=True)
        begun = time.monotonic()
        try:
            self._cells[key] = measured()
        except LabError as e:
            print(f"{key}: {e}", file=sys.stderr)
            self.failed.append(key)
            return
        print(f"{key}: {time.monotonic() - begun:.0f} s", flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self._cells))
        part.replace(self.path)
