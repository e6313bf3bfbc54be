"""The ways of benchmarks/bench_outer.py to train, and what runs on each host with --lab: a task, trained in
several ways one after the other, and each step timed.

python -m benchmarks.netlab.outer '{"task": "lm", "bfloat16": true, "ways": [["Outer", 30]], ...}' result.json
"""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import sidcomp
import torch
import torch.distributed as dist
from sidcomp.config.accuracy import HUNDREDTH, OUTER
from sidcomp.doors.ddp import register
from sidcomp.local.steps import Updates
from torch.nn.parallel import DistributedDataParallel

from benchmarks.examples import Task
from benchmarks.netlab.rank import task_of, transmitted
from benchmarks.ranks import answer

WARM = 3
RATES = {"lm": 0.004, "gpt": 0.003, "gpt-paced": 0.003}


class Way(NamedTuple):
    """door: "nothing" (no communication), "DDP", or updates: "Outer" with an outer optimizer, or "LocalError"
    with errors in the parameters. state: makes the State, where it is not the default. how: further arguments
    for updates (delay: in parts of `every`). every: steps between two exchanges; None: as many as the caller
    says."""

    door: str
    state: Callable[[], sidcomp.State] | None = None
    how: Mapping[str, Any] = MappingProxyType({})
    every: int | None = None


def uncompressed() -> sidcomp.State:
    return sidcomp.State("none")


def deadzone() -> sidcomp.State:
    return sidcomp.State("deadzone", bits=0.5)


def twoshot() -> sidcomp.State:
    return sidcomp.State("deadzone", bits=1.0, exchange="twoshot")


WAYS = {
    "no communication": Way("nothing", every=1),
    "DDP": Way("DDP", every=1),
    # State() before it follows an optimizer. Beside AdamW one that does takes int4.
    "DDP, default topk": Way("DDP", lambda: sidcomp.preset("topk-fortieth"), every=1),
    "DDP, int4": Way("DDP", lambda: sidcomp.State("int4"), every=1),
    "DiLoCo": Way("Outer", uncompressed),
    "DiLoCo, delay": Way("Outer", uncompressed, {"delay": 0.5}),
    "Outer": Way("Outer"),
    "Outer, delay": Way("Outer", None, {"delay": 0.5}),
    "Outer, parts and delay": Way("Outer", None, {"delay": 0.1, "parts": 5}),
    "Outer, deadline": Way("Outer", None, {"deadline": 60.0}),
    "LocalError": Way("LocalError", every=1),
    "updates, 1/100": Way("LocalError", lambda: sidcomp.State(HUNDREDTH[0], **HUNDREDTH[1])),
    "updates, int4": Way("LocalError", lambda: sidcomp.State("int4")),
    "LocalError, deadzone": Way("LocalError", deadzone),
    "LocalError, deadzone, two-shot": Way("LocalError", twoshot),
    "LocalError, deadzone, two-shot, delay": Way("LocalError", twoshot, {"delay": 1}),
    "LocalError, deadzone, delay": Way("LocalError", deadzone, {"delay": 1}),
}


def outer_of(state: sidcomp.State) -> Any:
    """The outer optimizer: DiLoCo's without a lossy codec, else SparseLoCo's."""
    if state.settings.lossy:
        return partial(torch.optim.SGD, lr=1.0)
    return partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class Run:
    """One way: its model and optimizer, and the ends of its steps by this rank's clock."""

    def __init__(self, spec: dict[str, Any], name: str, every: int, task: Task) -> None:
        self.task = task
        self.seed: int = spec["seed"]
        self.bfloat16: bool = spec["bfloat16"]  # forward and backward
        torch.manual_seed(self.seed)
        self.module = self.task.model()
        self.parameters = list(self.module.parameters())
        for p in self.parameters:
            p.data = p.data.clone()  # models of recorded gradients share theirs
        self.rate = rate = RATES[spec["task"]]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.model: torch.nn.Module = self.module
        self.updates: Updates | None = None
        self.in_parameters = False  # the error
        way = WAYS[name]
        self.state = way.state() if way.state is not None else None
        how = dict(way.how)
        if way.door == "DDP":
            self.model = DistributedDataParallel(self.module)
            if self.state is not None:
                register(self.model, self.state)
                self.state.follow(self.optimizer)
        elif way.door in ("LocalError", "Outer"):
            how["delay"] = round(how.get("delay", 0) * every)
            self.in_parameters = way.door == "LocalError"
            if self.in_parameters:
                self.state = self.state or sidcomp.State()
            else:
                self.state = self.state or sidcomp.State(OUTER[0], **OUTER[1])
                how |= {"error": "memory", "outer": outer_of(self.state)}
            self.updates = Updates(self.module, self.optimizer, self.state, every=every, **how)
        self.plain = self.updates is None  # every step takes equally long
        self.clip: float = spec["clip"]
        self.carry: torch.Tensor | None = None
        self.steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            loss, self.carry = self.task.loss(self.model, 1000 * self.seed + self.steps, self.carry)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.steps += 1

    def train(self, steps: int) -> None:
        """All steps, with a warm-up and a cosine down to a tenth."""
        warm = min(20, max(1, steps // 10))
        for step in range(steps):
            scale = min(1.0, (step + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            self.optimizer.param_groups[0]["lr"] = self.rate * scale
            self.step()

    def evaluate(self) -> float:
        """The loss on all that is held out, of what the ranks agree on; each rank measures its share."""
        with contextlib.ExitStack() as stack:
            if self.updates is not None:
                stack.enter_context(self.updates.common())
            self.module.eval()
            with torch.no_grad():
                total = torch.tensor(self.task.measure(self.module), dtype=torch.float64)
            self.module.train()
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def timed(self, steps: int) -> list[float]:
        stamps = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            stamps.append(time.perf_counter())
        return stamps

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def learn(rank: int, world: int, spec: dict[str, Any]) -> dict[str, float]:
    """Trains one way, for whole rounds: its loss, and how many times fewer bytes than an all-reduce it has
    sent."""
    run = Run(spec, spec["way"], spec["every"], task_of(spec["task"], rank, world, None))
    run.train(spec["steps"])
    if run.updates is not None and not run.in_parameters:
        run.updates.land()
    ratio = 1.0
    if run.state is not None:
        all_reduce = 2 * (world - 1) / world * 4 * sum(p.numel() for p in run.parameters)
        ratio = all_reduce * spec["steps"] / run.state.stats()["wire_bytes"]
    loss = run.evaluate()
    run.close()
    return {"loss": loss, "ratio": ratio}


def warm(run: Run, every: int) -> None:
    """To the end of an exchange, at least; the first one makes the groups."""
    if run.updates is None:
        run.timed(WARM)
    elif run.in_parameters:
        run.timed(math.ceil(WARM / every) * every + run.updates.delay)
    else:
        run.timed(WARM)
        run.updates.exchange()
        run.updates.land()
        run.timed(every - WARM + run.updates.delay)


def compare(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Every way: the ends of its steps on all ranks, and the bytes that this host sent. turns: so often the
    ways alternate, and all of them are alive meanwhile; with one turn each ends before the next begins. They
    share the task: the pace of a paced one is measured once."""
    rank, world, turns = dist.get_rank(), dist.get_world_size(), spec.get("turns", 1)
    task = task_of(spec["task"], rank, world, None)
    out = []
    alive: list[Run | None] = []
    for turn in range(turns):
        for i, (name, every) in enumerate(spec["ways"]):
            if turn == 0:
                alive.append(Run(spec, name, every, task))
            run = alive[i]
            assert run is not None
            if turn == 0:
                warm(run, every)
            steps = spec["steps"] if run.plain else max(spec["rounds"], spec["steps"] // every) * every
            dist.barrier()
            before = transmitted()
            mine: dict[str, Any] = {"stamps": run.timed(steps)}
            dist.barrier()
            after = transmitted()
            mine["bytes"] = after - before if before is not None and after is not None else None
            if turn == turns - 1:
                run.close()
                del run
                alive[i] = None
                gc.collect()
            gathered: list[Any] = [None] * world
            dist.all_gather_object(gathered, mine)
            out.append({"name": name, "every": every, "steps": steps, "ranks": gathered})
            if rank == 0:
                took = mine["stamps"][-1] - mine["stamps"][0]
                print(f"{name}, every {every}: {steps} steps in {took:.1f} s", flush=True)
    return out


if __name__ == "__main__":
    answer(compare, timeout=300)
