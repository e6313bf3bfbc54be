"""Runs a function on W ranks, one process each, and brings back what they returned. Never hangs.

    results = run(function, 2, *arguments)        # function(rank, world, *arguments) on every rank

    @on_ranks(2)
    def test_something(rank, world, *parameters)  # a test whose ranks judge by themselves

The processes are forked from a server that has torch imported already, so that a rank costs milliseconds, and
every test has processes of its own: no state leaks from one test to the next, and a test may kill a rank.
`function` must be importable (top level of a test module); arguments and results are pickled. Ranks meet
through a file, on no fixed port.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

HARD_LIMIT = 150.0  # seconds after which every rank is killed; on an idle machine nothing takes a tenth of it
END_LIMIT = 20.0  # seconds in which a rank that has returned ends
GRACE = 2.0  # seconds that the other ranks get to report after one has failed
GROUP_TIMEOUT = 60.0  # seconds of the process group

_context: Any = None
_endings = contextlib.ExitStack()


def at_end(close: Callable[[], object]) -> None:
    """Calls it on this rank once its function has returned; the last one first."""
    _endings.callback(close)


class RankFailed(AssertionError):
    """One rank raised, died or hung; the text has its traceback and the end of its output."""


class HungAtEnd(RankFailed):
    """All ranks returned and freed what they had made, but one hung in torch's destroy_process_group()."""


def context() -> Any:
    global _context
    if _context is None:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ.setdefault("TORCH_SHOW_CPP_STACKTRACES", "0")
        if any(name == "lo" for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        _context = multiprocessing.get_context("forkserver")
        # torch._dynamo: the first optimizer imports it, which takes a second.
        _context.set_forkserver_preload(
            [
                "numpy",
                "numpy.random",
                "pytest",
                "torch",
                "torch.distributed",
                "torch.nn.parallel",
                "torch._dynamo",
            ]
        )
    return _context


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world: int,
    arguments: tuple[Any, ...],
    room: str,
    group_timeout: float,
    backend: Callable[[], str],
    pipe: Connection,
) -> None:
    gc.freeze()  # what came with the fork is not ours to collect
    log = os.open(f"{room}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            backend(),
            init_method=f"file://{room}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=group_timeout),
        )
        result = function(rank, world, *arguments)
        _endings.close()
        answer = pickle.dumps((True, result))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()  # nobody leaves while another rank may still be talking to it
    gc.collect()
    with contextlib.suppress(OSError):
        pipe.send_bytes(b"collected")
    dist.destroy_process_group()
    # A forked process ends without finalising the interpreter, so Gloo's threads cannot abort it.


def gloo() -> str:
    return "gloo"


def _tail(path: Path, lines: int = 60) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def run(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    dying: Collection[int] = (),
    hard_limit: float = HARD_LIMIT,
    group_timeout: float = GROUP_TIMEOUT,
    backend: Callable[[], str] = gloo,
) -> list[Any]:
    """What function(rank, world, *arguments) returned on each rank; ranks in `dying` may end without.
    backend: called on each rank, returns the name of the default group's backend.

    On a busy machine a rank that ends last may hang in destroy_process_group(), in the destructor of torch's
    default Gloo group: one of some 2,500 runs did. Then everything runs once more, and must end.
    """
    try:
        return _run(function, world, arguments, dying, hard_limit, group_timeout, backend)
    except HungAtEnd as e:
        warnings.warn(f"running {function.__name__} again: {e}", stacklevel=2)
        return _run(function, world, arguments, dying, hard_limit, group_timeout, backend)


def on_ranks(world: int | None = None, **how: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a function that judges by itself on each rank. None: as many ranks as its parameter
    `world` says. how: of `run`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        _, of_world, *others = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def test(**given: Any) -> None:
            ranks = given["world"] if world is None else world
            run(function, ranks, *(given[p.name] for p in others), **how)

        shown = [of_world, *others] if world is None else others
        test.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        test.on_rank = function  # type: ignore[attr-defined]
        function.__qualname__ += ".on_rank"  # by which the ranks find it, since its name is the test's
        return test

    return decorate


def _run(
    function: Callable[..., Any],
    world: int,
    arguments: tuple[Any, ...],
    dying: Collection[int],
    hard_limit: float,
    group_timeout: float,
    backend: Callable[[], str],
) -> list[Any]:
    room = tempfile.mkdtemp(prefix="sidcomp-test-")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world):
            here, there = context().Pipe()
            process = context().Process(
                target=_rank_main,
                args=(function, rank, world, arguments, room, group_timeout, backend, there),
                daemon=True,
            )
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        return _collect(processes, pipes, Path(room), frozenset(dying), hard_limit)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()  # ends stopped processes too
            process.join(10)
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(room, ignore_errors=True)


def _has_collected(pipe: Connection) -> bool:
    """Whether a rank has freed what it made: all that is left is torch's."""
    try:
        return pipe.poll() and pipe.recv_bytes() == b"collected"
    except (EOFError, OSError):
        return False


def _tasks(pid: int) -> str:
    """What each thread of a process waits for in the kernel."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            name, where = (task / "comm").read_text().strip(), (task / "wchan").read_text().strip()
            found.append(f"thread {task.name} {name}: {where}, {(task / 'syscall').read_text().strip()[:40]}")
    return "\n".join(found)


def _collect(
    processes: list[BaseProcess],
    pipes: list[Connection],
    room: Path,
    dying: frozenset[int],
    hard_limit: float,
) -> list[Any]:
    world = len(processes)
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + hard_limit
    while any(rank not in dying for rank in waiting.values()):
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                fine, answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                processes[rank].join(10)
                if rank not in dying:
                    failures[rank] = f"died without a word, exit code {processes[rank].exitcode}"
                continue
            if fine:
                answers[rank] = answer
            else:
                failures[rank] = answer
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE)
    missing = [rank for rank in waiting.values() if rank not in dying]
    if failures or missing:
        for rank in missing:
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5 if missing else 0.0)
        text = [f"rank {rank}: {why}" for rank, why in sorted(failures.items())]
        text += [f"rank {rank}: no answer (its stack is at the end of its output)" for rank in missing]
        for rank in range(world):
            tail = _tail(room / f"{rank}.log")
            text += [f"--- output of rank {rank} ---\n{tail}"] if tail else []
        raise RankFailed("\n".join(text))
    for rank, pipe in enumerate(pipes):
        with contextlib.suppress(OSError):
            if rank in answers:
                pipe.send_bytes(b"bye")
    for rank in answers:
        process = processes[rank]
        process.join(END_LIMIT)
        if process.exitcode == 0:
            continue
        hung, tasks = process.exitcode is None, ""
        if hung:
            tasks = _tasks(process.pid or 0)
            os.kill(process.pid or 0, signal.SIGUSR1)  # its stack joins its output
            time.sleep(0.5)
        raise (HungAtEnd if hung and _has_collected(pipes[rank]) else RankFailed)(
            f"rank {rank}: returned, but then ended with exit code {process.exitcode}\n"
            f"--- output ---\n{_tail(room / f'{rank}.log')}\n{tasks}"
        )
    return [answers.get(rank) for rank in range(world)]
