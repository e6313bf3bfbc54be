"""The commands of docs/two-machines.md, between two network namespaces."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.netlab.lab import Lab  # noqa: E402

PAGE = (ROOT / "docs" / "two-machines.md").read_text()
BLOCKS = re.findall(r"(?:^    .+\n)+", PAGE, re.M)


class Machines:
    """Two hosts with a disk each, on which the page's commands are typed."""

    def __init__(self, lab: Lab, room: Path) -> None:
        self.lab, self.room = lab, room
        tools = room / "bin"
        tools.mkdir()
        for name, module in (("torchrun", "torch.distributed.run"), ("sidcomp", "sidcomp")):
            (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            (tools / name).chmod(0o755)
        self.environment = {"PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        self.environment["PYTHONPATH"] = str(ROOT / "python")
        for host in range(2):
            gallery = room / str(host) / "examples" / "gallery"
            gallery.mkdir(parents=True)
            program = (ROOT / "examples" / "gallery" / "gpt.py").read_text()
            assert "timedelta(seconds=60)" in program and "timedelta(seconds=60)" in PAGE
            (gallery / "gpt.py").write_text(program.replace("seconds=60", "seconds=8"))
            program = (ROOT / "examples" / "gallery" / "diloco.py").read_text()
            assert "STEPS, EVERY = 300, 10" in program and "deadline=60" in program
            endless = program.replace("EVERY = 300, 10", "EVERY = 10**9, 10").replace("=60", "=2")
            (gallery / "diloco.py").write_text(endless)

    def type(self, *words: str) -> list[subprocess.Popen[str]]:
        """Types the page's first two blocks, which set variables, and then the one with these words."""
        (wanted,) = [b for b in BLOCKS if all(w in b for w in words)]
        return [self.start(host, wanted) for host in range(2)]

    def start(self, host: int, typed: str, out: Any = subprocess.PIPE) -> subprocess.Popen[str]:
        there = [b for b in BLOCKS if b.lstrip().startswith(("export", "run="))]
        assert len(there) == 2
        text = "".join([*there, typed]).replace("host0", self.lab.address).replace("eth0", self.lab.interface)
        command = ["sh", "-ec", text.replace("HOST=0", f"HOST={host}")]
        how = {"stdout": out, "stderr": subprocess.STDOUT, "text": True, "cwd": self.room / str(host)}
        return self.lab.start(host, command, self.environment, **how)

    def link(self, state: str) -> None:
        self.on(1, "ip", "link", "set", self.lab.interface, state)

    def on(self, host: int, *command: str) -> None:
        subprocess.run([*self.lab.enter[host], *command], check=True)


def ended(runs: list[subprocess.Popen[str]], status: int = 0) -> list[str]:
    said = [run.communicate(timeout=120)[0] for run in runs]
    assert all((run.returncode == 0) is (status == 0) for run in runs), said
    return said


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Lab.build(2, 10**8) as lab:
        if lab.emulation != "namespaces":
            pytest.skip("; ".join(lab.reasons))
        yield Machines(lab, tmp_path_factory.mktemp("machines"))


def test_the_link_is_measured_and_judged(machines: Machines) -> None:
    shapes = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_positions": 32, "vocab_size": 64}
    for host in range(2):
        (machines.room / str(host) / "config.json").write_text(json.dumps(shapes))
    first, other = ended(machines.type("sidcomp bench"))
    assert "int4" in first and "link.json" in first and "int4" not in other
    judged, _ = machines.type("sidcomp estimate")
    assert "updates" in ended([judged])[0]


@pytest.mark.slow
def test_it_trains_stops_and_resumes_and_a_dead_link_is_an_error(machines: Machines) -> None:
    whole = ended(machines.type("gpt.py checkpoints"))[0]
    (loss,) = re.findall(r"validation loss .*", whole)
    kept = [machines.room / str(host) / "checkpoints" for host in range(2)]

    def forget(step: int) -> None:
        """As if the run had been stopped just after this step."""
        for folder in kept:
            for saved in folder.iterdir():
                if int(saved.name) > step:
                    shutil.rmtree(saved)

    forget(100)
    resumed = ended(machines.type("gpt.py checkpoints"))[0]
    assert "step 100" not in resumed and loss in resumed

    forget(0)
    runs = machines.type("gpt.py checkpoints")
    while not all((folder / "50" / f"sidcomp-rank{r}.pt").exists() for r, folder in enumerate(kept)):
        assert all(run.poll() is None for run in runs)
        time.sleep(0.01)
    machines.link("down")
    (words,) = [b.strip() for b in BLOCKS if "the exchange failed" in b]
    try:
        assert any(words in said for said in ended(runs, status=1))
    finally:
        machines.link("up")
    assert loss in ended(machines.type("gpt.py checkpoints"))[0]


@pytest.mark.slow
def test_with_a_deadline_the_first_machine_goes_on_alone(machines: Machines) -> None:
    """And the other one learns it from its system, and joins again."""
    typed = "    exec $run examples/gallery/diloco.py\n"
    logs = [machines.room / f"{name}.log" for name in ("first", "other", "again")]

    def started(host: int, log: Path) -> subprocess.Popen[str]:
        with log.open("w") as out:
            return machines.start(host, typed, out)

    def wait_for(log: Path, pattern: str, after: int = 0) -> int:
        """Where it ends in the log, beyond `after`."""
        end = time.monotonic() + 120
        while not (found := re.compile(pattern).search(log.read_text(), after)):
            assert time.monotonic() < end, (pattern, [x.read_text() for x in logs if x.exists()])
            time.sleep(0.05)
        return found.end()

    machines.on(1, "sh", "-c", "echo 4 > /proc/sys/net/ipv4/tcp_retries2")  # seconds, and not 15 minutes
    runs = [started(host, logs[host]) for host in range(2)]
    try:
        wait_for(logs[0], "step 100: ")
        machines.link("down")
        alone = wait_for(logs[0], r"round \d+ takes place without rank 1")
        wait_for(logs[0], r"step \d+: .*\n.*step \d+: ", alone)
        wait_for(logs[1], "the store, in which the ranks agree on their rounds, does not answer")
        machines.link("up")
        runs.append(started(1, logs[2]))
        together = wait_for(logs[0], r"round \d+ takes place with rank 1 again", alone)
        wait_for(logs[0], r"step \d+: .*\n.*step \d+: ", together)
        assert runs[0].poll() is None and runs[2].poll() is None, [x.read_text() for x in logs]
    finally:
        for run in runs:
            run.kill()
        machines.link("up")
