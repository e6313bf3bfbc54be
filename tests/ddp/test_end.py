"""A program ends cleanly: real interpreters, which finalise, unlike the forked ranks of the other tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sidcomp
from harness import context

PROGRAM = """
import gc, sys
import torch
import torch.distributed as dist
import sidcomp

rank, room, way, codec = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{room}/store", rank=rank, world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 2))
ddp = torch.nn.parallel.DistributedDataParallel(model)


def train(state):
    ddp.register_comm_hook(state, sidcomp.hook)
    for _ in range(5):
        ddp(torch.randn(4, 9)).sum().backward()


if way == "with":
    with sidcomp.State(codec) as state:
        train(state)
elif way == "close":
    state = sidcomp.State(codec)
    train(state)
    state.close()
else:  # neither: only the end that any DDP program needs
    train(sidcomp.State(codec))
del ddp
gc.collect()
dist.destroy_process_group()
print("the end")
"""


# An interpreter with torch takes seconds to start: two cases by default.
WAYS = [("topk", "with"), ("fp16", "neither")]
REST = [(codec, way) for codec in ("topk", "fp16", "none") for way in ("with", "close", "neither")] * 3


@pytest.mark.parametrize("codec, way", WAYS + [pytest.param(*c, marks=pytest.mark.slow) for c in REST])
def test_a_program_ends_cleanly(tmp_path: Path, codec: str, way: str) -> None:
    context()  # sets what Gloo needs in this environment
    package = str(Path(sidcomp.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path), way, codec],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0 and out.strip() == "the end", (rank, process.returncode, err)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
