"""What runs on each host for `python -m benchmarks.bench_outer --lab`: a task, trained in several ways one
after the other, and each step timed.

python -m benchmarks.netlab.outer '{"task": "lm", "ways": [["Outer", 30]], ...}' result.json
"""

import datetime
import gc
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import sidcomp
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.netlab.rank import transmitted

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from tasks import TASKS

WARM = 3
# The State, and the further arguments of Outer (delay: in parts of `every`) or LocalError.
WAYS: dict[str, tuple[tuple[str, dict[str, Any]] | None, dict[str, Any]]] = {
    "no communication": (None, {}),
    "DDP": (None, {}),
    "DDP, default topk": (("topk", {}), {}),
    "DiLoCo": (("none", {}), {}),
    "DiLoCo, delay": (("none", {}), {"delay": 0.5}),
    "Outer": (None, {}),
    "Outer, delay": (None, {"delay": 0.5}),
    "Outer, parts and delay": (None, {"delay": 0.1, "parts": 5}),
    "Outer, deadline": (None, {"deadline": 60.0}),
    "LocalError, deadzone": (("deadzone", {"bits": 0.5}), {}),
    "LocalError, deadzone, delay": (("deadzone", {"bits": 0.5}), {"delay": 1}),
}


class Run:
    """One way: its model and optimizer, and the ends of its steps by this rank's clock."""

    def __init__(self, spec: dict[str, Any], name: str, every: int, rank: int, world: int) -> None:
        kind = TASKS[spec["task"]]
        self.task = kind(rank, world, kind.batch, torch.device("cpu"))
        torch.manual_seed(spec["seed"])
        self.module = self.task.model()
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.004, betas=(0.9, 0.95), weight_decay=0.1)
        self.model: torch.nn.Module = self.module
        self.outer: sidcomp.Outer | None = None
        self.local: sidcomp.LocalError | None = None
        self.state: sidcomp.State | None = None
        codec, how = WAYS[name]
        if name.startswith("DDP"):
            self.model = DistributedDataParallel(self.module)
            if codec is not None:
                self.state = sidcomp.State()
                sidcomp.register(self.model, self.state)
        elif name != "no communication":
            self.state = sidcomp.State(codec[0], **codec[1]) if codec is not None else None
            how = {**how, **spec.get("how", {})}
            if name.startswith("LocalError"):
                assert self.state is not None
                self.local = sidcomp.LocalError(self.module, self.optimizer, self.state, every=every, **how)
            else:
                how["delay"] = round(how.get("delay", 0) * every)
                self.outer = sidcomp.Outer(self.module, self.optimizer, self.state, every=every, **how)
                self.state = self.outer.state
        self.plain = self.local is None and self.outer is None  # every step takes equally long
        self.clip = 1.0 if self.plain else math.sqrt(world)
        self.carry: torch.Tensor | None = None
        self.steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss, self.carry = self.task.loss(self.model, self.steps, self.carry)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        (self.local or self.outer or self.optimizer).step()
        self.steps += 1

    def timed(self, steps: int) -> list[float]:
        stamps = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            stamps.append(time.perf_counter())
        return stamps

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def compare(spec: dict[str, Any], rank: int, world: int) -> list[dict[str, Any]]:
    """Every way: the ends of its steps on all ranks, and the bytes that this host sent."""
    out = []
    for name, every in spec["ways"]:
        run = Run(spec, name, every, rank, world)
        steps = spec["steps"] if run.plain else spec["rounds"] * every
        if run.local is not None:
            run.timed((1 + run.local.delay) * every)  # the first exchange makes the groups
        elif run.outer is not None:
            run.timed(WARM)
            run.outer.average()  # makes the groups
            run.timed(every - WARM + run.outer.delay)  # to the end of an exchange
        else:
            run.timed(WARM)
        dist.barrier()
        before = transmitted()
        mine: dict[str, Any] = {"stamps": run.timed(steps)}
        dist.barrier()
        after = transmitted()
        mine["bytes"] = after - before if before is not None and after is not None else None
        run.close()
        del run
        gc.collect()
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, mine)
        out.append({"name": name, "every": every, "steps": steps, "ranks": gathered})
        if rank == 0:
            took = mine["stamps"][-1] - mine["stamps"][0]
            print(f"{name}, every {every}: {steps} steps in {took:.1f} s", flush=True)
    return out


def lose(spec: dict[str, Any], rank: int, world: int) -> list[dict[str, Any]]:
    """Outer with a deadline, in which the last rank ends in the middle of a round. Returns the end of each
    round, and who took part in it."""
    every = spec["every"]
    run = Run({**spec, "how": {"deadline": spec["deadline"]}}, "Outer, deadline", every, rank, world)
    assert run.outer is not None
    attendance = run.outer._attendance
    assert attendance is not None
    ends, end = [{"at": time.perf_counter(), "members": list(range(world))}], attendance.end

    def ended() -> Any:
        outcome = end()
        if outcome is not None:
            ends.append({"at": time.perf_counter(), "members": outcome.members})
        return outcome

    attendance.end = ended  # type: ignore[method-assign]
    while len(ends) <= spec["rounds"]:
        if rank == world - 1 and len(ends) == 3 and run.steps % every == every // 2:
            os._exit(0)  # without a word to anyone
        run.step()
        if rank == 0 and run.steps % every == 0:
            print(f"round {len(ends) - 1}: {ends[-1]['members']}", flush=True)
    run.close()
    return ends


def main() -> None:
    spec, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if spec["lose"]:
        found = lose(spec, rank, world)
    else:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
        found = compare(spec, rank, world)
    if rank == 0:
        out.write_text(json.dumps(found))
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
