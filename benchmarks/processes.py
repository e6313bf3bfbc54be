"""Processes that are ended with all that they have started, for what may hang on a device."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GUARD = Path(__file__).resolve().parent / "guard.py"


def start(command: list[str], output: Any, **env: str) -> "subprocess.Popen[bytes]":
    """Starts the command in a process group of its own, under guard.py. All of the group ends if this process
    is killed, so that the next one finds no busy device and no journal that grows."""
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
        process.wait(5)
