"""Processes that are ended with all that they have started, for what may hang on a device."""

import ctypes
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def start(command: list[str], output: Any, **env: str) -> "subprocess.Popen[bytes]":
    """Starts the command in a process group of its own. The command ends if this process is killed (what it
    has started itself may not), so that the next one finds no busy device and no journal that grows."""
    prctl, to_end = ctypes.CDLL(None).prctl, 1  # PR_SET_PDEATHSIG

    def prepare() -> None:
        prctl(to_end, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it

    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.Popen(
        command, cwd=ROOT, env=clean | env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        preexec_fn=prepare,
    )  # fmt: skip


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the command and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process in the driver may not be killable
        process.wait(5)
