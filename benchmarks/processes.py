"""Processes that are ended with all that they have started, for what may hang on a device; and how one says
how far it is, so that another can go on behind the work that ended it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GUARD = Path(__file__).resolve().parent / "guard.py"
Row = dict[str, Any]


def start(command: list[str], output: Any, **env: str) -> "subprocess.Popen[bytes]":
    """Starts the command in a process group of its own, under guard.py. All of the group ends if this process
    is killed, so that nothing stays behind that holds the device."""
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    guarded = [sys.executable, "-S", "-E", str(GUARD), str(os.getpid()), *command]
    return subprocess.Popen(
        guarded, cwd=ROOT, env=clean | env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the command and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process in the driver may not be killable
        process.wait(2)


def tell(**entry: Any) -> None:
    print(json.dumps(entry), flush=True)


def run_units(units: Mapping[str, Callable[[], Iterable[Row]]], after: str = "") -> None:
    """Runs the units behind the one named `after`, all without one. Tells their names, then each one's
    beginning, rows and end, a line of JSON each."""
    names = list(units)
    if after:
        names = names[names.index(after) + 1 :]
    tell(units=names)
    for name in names:
        tell(begin=name)
        for row in units[name]():
            tell(row=row)
        tell(end=name)
