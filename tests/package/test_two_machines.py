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

    def type(self, *words: str) -> list[subprocess.Popen[str]]:
        """Types the page's first two blocks, which set variables, and then the one with these words."""
        (wanted,) = [b for b in BLOCKS if all(w in b for w in words)]
        there = [b for b in BLOCKS if b.lstrip().startswith(("export", "run="))]
        assert len(there) == 2
        text = "".join([*there, wanted])
        text = text.replace("host0", self.lab.address).replace("eth0", self.lab.interface)
        started = []
        for host in range(2):
            command = ["sh", "-ec", text.replace("HOST=0", f"HOST={host}")]
            out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(self.lab.start(host, command, self.environment, cwd=self.room / str(host), **out))
        return started

    def link(self, state: str) -> None:
        enter = self.lab.enter[1]
        subprocess.run([*enter, "ip", "link", "set", self.lab.interface, state], check=True)


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
    first, other = ended(machines.type("sidcomp bench"))
    assert "int4" in first and "link.json" in first and "int4" not in other
    shapes = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_positions": 32, "vocab_size": 64}
    (machines.room / "0" / "config.json").write_text(json.dumps(shapes))
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
