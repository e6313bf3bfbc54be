"""Updates with a deadline where each host has a torchrun of its own, as docs/updates.md recommends: a rank is
killed inside a round, its torchrun ends with it, and the others go on. Later its host is started again."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from late_ranks import LIMIT, examine, train, went

HOSTS = 3


class Hosts:
    """A torchrun for each host, with one rank each. That of host 0 serves the store."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.folder = folder
        self.runs: list[subprocess.Popen[bytes]] = []
        self.of_host: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, host: int, **plan: Any) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={HOSTS}", "--nproc-per-node=1"]
        command += [f"--node-rank={host}", "--master-addr=127.0.0.1", f"--master-port={self.port}"]
        command += ["--max-restarts=0", __file__, json.dumps(plan), str(self.folder / f"{host}.answer")]
        with open(self.folder / f"{host}.log", "ab") as log:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            run = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.runs.append(run)
        self.of_host[host] = run

    def ended(self, host: int) -> int:
        return self.of_host[host].wait(LIMIT)

    def wait_for(self, version: int) -> None:
        """Until the common point has this version."""
        store = dist.TCPStore("127.0.0.1", self.port, None, False, timedelta(seconds=LIMIT))
        keys = [f"{prefix}sidcomp/outer/1" for prefix in ("", "/worker/attempt_0/")]
        end, found = time.monotonic() + LIMIT, -1
        while found < version:
            assert time.monotonic() < end, f"no version {version}, but {found}: {self.said()}"
            time.sleep(0.05)
            for key in keys:
                if store.check([key]):
                    found = json.loads(store.get(key))["version"]

    def answer(self, host: int) -> Any:
        assert self.ended(host) == 0, self.said()
        return pickle.loads((self.folder / f"{host}.answer").read_bytes())

    def said(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(self.folder.glob("*.log")))

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self.runs:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, 9)
            run.wait(10)


@pytest.mark.slow
def test_a_host_that_is_lost_inside_a_round_costs_only_itself_and_comes_back(tmp_path: Path) -> None:
    given = {"lr": 0.5, "momentum": 0.6, "pause": 0.1}
    with Hosts(tmp_path) as hosts:
        for host in range(HOSTS):
            hosts.start(host, **given, **({"dies_sending": 2} if host == 2 else {}))
        assert hosts.ended(2) == 1, "torchrun ends with its rank"
        hosts.wait_for(4)
        assert all(hosts.of_host[host].poll() is None for host in (0, 1)), "the others go on"
        hosts.start(2, **given, joined=3)
        answers = [hosts.answer(host) for host in range(HOSTS)]
    assert went(answers[0])[:4] == [[0, 1, 2]] * 2 + [[0, 1]] * 2
    assert answers[2]["came"] > 2 and went(answers[2]) == [[0, 1, 2]] * 3
    examine(answers, 4)


if __name__ == "__main__":
    answer = train(int(os.environ["RANK"]), **json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_bytes(pickle.dumps(answer))
