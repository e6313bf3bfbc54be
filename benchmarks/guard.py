"""Runs a command, and ends its whole process group if the process that started this one is killed.

`processes.start` makes it the first process of a group. PR_SET_PDEATHSIG sends SIGTERM to it alone when its
parent ends; what the command has started, such as the program under a sanitizer, would run on.
"""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType

PR_SET_PDEATHSIG = 1


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]

    def kill(number: int, frame: FrameType | None) -> None:
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before
        return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until there is somebody to pass it on to
    child = subprocess.Popen(command, preexec_fn=_default)
    signal.signal(signal.SIGINT, lambda *_: child.send_signal(signal.SIGINT))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    status = child.wait()
    if status < 0:  # end as it did
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _default() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


if __name__ == "__main__":
    sys.exit(main())
