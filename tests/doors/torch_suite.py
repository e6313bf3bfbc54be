"""torch's own tests of torch.distributed, over Gloo and over the backend "sidcomp" in Gloo's place.

    python tests/doors/torch_suite.py

The tests are those of the installed torch (torch.testing._internal.distributed.distributed_test), all but
those in LEFT_OUT. A test has passed if torch's own judgement says so on all ranks.
With torch 2.13 118 tests pass over Gloo, and the same over this backend. torch tests reduce-scatter on GPUs
only; test_process_group.py compares it with Gloo's. torch's tests need the package expecttest.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

WORLD = 4  # some of the tests need this very number
LIMIT = 900.0  # seconds in which one backend must have run all tests
# torch decides by the backend's name which tests run. Those of all_to_all_single on CPUs run for MPI only,
# although Gloo has it, too.
GATES = ("gloo", "mpi")
LEFT_OUT = {
    "test_monitored_barrier_failure_order": "torch refuses monitored_barrier on every backend but Gloo",
    "test_monitored_barrier_gloo": "the same",
    "test_monitored_barrier_gloo_subgroup": "the same",
    "test_monitored_barrier_wait_all_ranks": "the same",
    "test_ddp_logging_data_cpu": "it judges times",
}


def suite(gate: str, backend: str) -> type[unittest.TestCase]:
    """torch's tests as a class: those that torch runs for `gate`, with process groups of `backend`."""
    os.environ.update(
        BACKEND=gate,
        WORLD_SIZE=str(WORLD),
        INIT_METHOD="file:///each/test/has/its/own",  # when torch decides which tests run
        SIDCOMP="none:min_bytes=1",
        OMP_NUM_THREADS="1",
    )
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import sidcomp.backend  # noqa: F401
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test as theirs

    init = dist.init_process_group

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            # torch starts new interpreters, each of which imports torch: seconds for each test
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, name: str, *arguments: Any, **more: Any) -> None:
            os.environ["BACKEND"] = "mpi"  # else the tests of groups want eight ranks
            # Some tests ask whether it is Gloo; one asks whether it is what it was asked for.
            theirs.BACKEND = backend if name == "test_get_backend" else "gloo"
            theirs.INIT_METHOD = os.environ["INIT_METHOD"]
            dist.init_process_group = lambda *a, **k: init(*a, **{**k, "backend": backend})
            super()._run(rank, name, *arguments, **more)

    return Suite


def outcome(tests: type[unittest.TestCase], name: str) -> str:
    """Runs a test. Returns "passed", "skipped: why" or the error."""
    found = unittest.TestResult()
    tests(name).run(found)
    bad = found.failures + found.errors
    if bad:
        return "failed: " + bad[0][1]
    return f"skipped: {found.skipped[0][1]}" if found.skipped else "passed"


def run_here(gate: str, backend: str, file: str, *names: str) -> None:
    """Runs the named tests, or all, in this process, and writes their outcomes as JSON."""
    tests = suite(gate, backend)
    found: dict[str, str] = {}
    for name in names or unittest.TestLoader().getTestCaseNames(tests):
        if name not in LEFT_OUT:
            found[name] = outcome(tests, name)
    Path(file).write_text(json.dumps(found))


def outcomes(backend: str) -> dict[str, str]:
    """Runs torch's tests over a backend. Returns their outcomes, by name."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as room:
        file, log = Path(room) / "outcomes.json", Path(room) / "log"
        for gate in GATES:
            skipped = [name for name, said in found.items() if said.startswith("skipped")]
            with log.open("wb") as output:
                done = subprocess.run(
                    [sys.executable, __file__, gate, backend, str(file), *skipped],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT,
                )
            if done.returncode:
                text = log.read_text(errors="replace")
                raise RuntimeError(f"exit status {done.returncode}: {text[-4000:]}")
            found |= json.loads(file.read_text())
    return found


def main() -> int:
    plain, ours = outcomes("gloo"), outcomes("sidcomp")
    passed = sorted(name for name, said in plain.items() if said == "passed")
    worse = [name for name in passed if ours[name] != "passed"]
    print(*passed, sep="\n")
    for name in worse:
        print(f"\nonly over Gloo: {name}\n{ours[name]}")
    failed = sorted(name for name, said in plain.items() if said.startswith("failed"))
    print(f"\n{len(passed)} pass over Gloo, {len(passed) - len(worse)} of them over sidcomp")
    print(f"fail over Gloo: {', '.join(failed) or 'none'}")
    return len(worse)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        raise SystemExit(main())
    run_here(*sys.argv[1:])
