"""The fake NCCL of tests/cuda for tests: built once, and ranks that are threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sidcomp import _core

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "fake_nccl" / "libnccl.so.2"


def build() -> Path:
    """The library's path; a compiler is needed."""
    source, bits = ROOT / "tests" / "cuda" / "fake_nccl.c", ROOT / "csrc" / "bits.h"
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > max(source.stat().st_mtime, bits.stat().st_mtime):
        return LIBRARY
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    made = LIBRARY.with_suffix(f".{os.getpid()}")
    cc = os.environ.get("CC") or "cc"
    subprocess.run(
        [*cc.split(), "-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-O1", "-g", "-fPIC", "-shared",
         f"-I{ROOT / 'csrc'}", str(source), "-o", str(made), "-lpthread"],
        check=True,
    )  # fmt: skip
    made.rename(LIBRARY)
    return LIBRARY


def can_build() -> bool:
    return shutil.which((os.environ.get("CC") or "cc").split()[0]) is not None


@contextmanager
def faults(**values: object) -> Iterator[None]:
    """FAKE_NCCL_... for ranks that join within."""
    names = {f"FAKE_NCCL_{k}": str(v) for k, v in values.items()}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def joined(world: int, limit: float, each: Callable[[_core.Communicator], Any]) -> list[Any]:
    """What `each` returns or raises for the communicators of `world` ranks, one a thread."""
    library = _core.Nccl(str(build()))
    name = library.unique_id()
    out: list[Any] = [None] * world

    def rank(r: int) -> None:
        try:
            c = _core.Communicator(library, name, r, world, device=0, limit=limit)
            out[r] = each(c)
        except BaseException as e:  # pytest's own are no Exceptions
            out[r] = e

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    return out


def each_well(out: list[Any]) -> list[Any]:
    for x in out:
        if isinstance(x, BaseException):
            raise x
    return out
