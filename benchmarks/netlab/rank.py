"""What runs on each host: one rank that trains the same model with each hook, in turns of some steps.

python -m benchmarks.netlab.rank '{"task": "lm", "hooks": ["dense"], ...}' result.json
"""

import os
import sys
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import sidcomp
import torch
import torch.distributed as dist
from sidcomp.autotune.report import timelines
from sidcomp.planner.profile import Profile
from torch import nn

from benchmarks.examples import TASKS, Task, tcp_bytes_sent
from benchmarks.netlab import hooks
from benchmarks.netlab.replay import REPLAYS
from benchmarks.ranks import answer

CEILING = "no communication"
SETTLE = 400  # steps that a controller gets to find its plan, at most


def transmitted() -> int | None:
    """Bytes that this host has sent, headers included; without one, those of our TCP connections."""
    if not (interface := os.environ.get("NETLAB_INTERFACE")):
        return tcp_bytes_sent()
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise LookupError(f"/proc/net/dev has no {interface}")


class Run:
    """One hook's model, its optimizer, and what was measured of it."""

    def __init__(self, name: str, task: Task, seed: int) -> None:
        torch.manual_seed(seed)
        self.name, self.task = name, task
        self.module: nn.Module = task.model()
        self.hook = None if name == CEILING else hooks.parse(name)
        self.model, self.attached = (
            (self.module, None) if self.hook is None else self.hook.attach(self.module, task.momentum)
        )
        self.state = self.attached if isinstance(self.attached, sidcomp.State) else None
        held = self.state is not None and self.state.settings.momentum  # by the State's memory
        self.optimizer = torch.optim.SGD(
            self.module.parameters(), lr=task.lr, momentum=0.0 if held else task.momentum
        )
        self.run: sidcomp.Run | None = None
        if self.state is not None and self.hook is not None and self.hook.of_updates:
            self.run = sidcomp.compress(self.module, self.optimizer, self.state, updates=True)
        self.carry: torch.Tensor | None = None
        self.losses: list[float] = []
        self.milliseconds: list[float] = []
        self.bytes, self.counted = 0, 0  # sent by this rank, in so many steps

    def step(self) -> None:
        at = len(self.losses)
        self.optimizer.param_groups[0]["lr"] = self.task.lr * min(1.0, (at + 1) / 20)
        loss, self.carry = self.task.loss(self.model, at, self.carry)
        self.optimizer.zero_grad()
        loss.backward()
        self.clip()
        self.optimizer.step()
        self.losses.append(loss.item())

    def clip(self) -> None:
        """At the norm that corresponds to plain DDP's 1, whatever the optimizer is handed."""
        if self.run is not None:
            self.run.clip_grad_norm_(1.0)
        else:
            gain = 1.0 if self.state is None else self.state.settings.gain
            nn.utils.clip_grad_norm_(self.module.parameters(), gain)

    def warm_up(self, steps: int) -> None:
        """DDP forms its buckets anew, memory is allocated; a controller measures and chooses."""
        for _ in range(steps):
            self.step()
        while len(self.losses) < SETTLE and not _agreed(self._settled()):
            for _ in range(5):
                self.step()
        self.optimizer.zero_grad()

    def _settled(self) -> bool:
        report = self.report()
        return report is None or report["stage"] == "settled"

    def report(self) -> dict[str, Any] | None:
        """What a controller found out; None where there is none."""
        if self.state is None or self.hook is None or not self.hook.planned:
            return None
        return self.state.plan_report()

    def turn(self, steps: int) -> None:
        """The first step is not counted: caches hold the others' data.

        All ranks share one clock. A step ends when the last rank has ended it.
        """
        dist.barrier()
        before = transmitted()
        stamps = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            stamps.append(time.perf_counter())
        dist.barrier()  # and so all of ours has left
        after = transmitted()
        if before is not None and after is not None:
            self.bytes += after - before
            self.counted += steps
        ends = [max(of_ranks) for of_ranks in zip(*_gather(stamps), strict=True)]
        self.milliseconds += [(b - a) * 1e3 for a, b in pairwise(ends[1:])]
        self.optimizer.zero_grad()  # gradients of BERT-base for each hook would not fit

    def predicted(self, profiled: "list[Run]") -> int | None:
        """ps of a step, by the model of the planner. Where no plan of this run's own predicts it, a profile
        that another one measured over the same network does."""
        if self.state is None or self.hook is None or self.hook.exchange is not None:
            return None
        if (report := self.report()) and report["predicted_ps"]:
            return int(report["predicted_ps"])
        for run in profiled:
            assert run.state is not None and run.hook is not None
            profile = run.state.profile
            alike = run.hook.bucket_mb == self.hook.bucket_mb
            if profile is not None and (alike or self.hook.bucket_mb == 0):
                made = profile.instance(buckets=alike)
                if plan := _as_plan(self.state.stats()["groups"], made, profile):
                    return int(sidcomp.planner.evaluate(made, plan)["time_ps"])
        return None

    def error(self) -> float | None:
        """The distance of a step's averaged gradient from the mean in float64, over the norm of that mean.
        What error feedback holds back counts as error here."""
        if not isinstance(self.model, nn.parallel.DistributedDataParallel):
            return None
        exact = torch.cat([g.flatten().double() for g in self._gradients(synchronize=False)])
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        found = torch.cat([g.flatten().double() for g in self._gradients(synchronize=True)])
        return float((found - exact).norm() / exact.norm())

    def _gradients(self, synchronize: bool) -> list[torch.Tensor]:
        """Of the next step's batch; the parameters stay as they are."""
        self.optimizer.zero_grad()
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        with nullcontext() if synchronize else self.model.no_sync():
            loss, _ = self.task.loss(self.model, len(self.losses), self.carry)
            loss.backward()
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def seconds(self) -> dict[str, float] | None:
        """What this rank spent a step in encode, in waiting for the exchange, and in decode; of sidcomp's
        hooks."""
        if self.state is None:
            return None
        stats = self.state.stats()
        return {
            what: stats[f"{what}_seconds"] / max(1, stats["steps"]) for what in ("encode", "wait", "decode")
        }

    def timelines(self, folder: str | None) -> dict[str, Any] | None:
        """Predicted and of the last step, which are drawn too."""
        if folder is None or self.report() is None:
            return None
        assert self.state is not None
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.state.plot(Path(folder) / f"{self.name.replace(':', '-')}-rank{dist.get_rank()}.png")
        return timelines(self.state.engine)

    def result(self, profiled: "list[Run]", trace: str | None) -> dict[str, Any]:
        seconds = _gather(self.seconds())  # before a step that is not counted
        drawn = self.timelines(trace)
        error = self.error()
        self.optimizer.zero_grad()
        losses = [sum(of_ranks) / len(of_ranks) for of_ranks in zip(*_gather(self.losses), strict=True)]
        return {
            "name": self.name,
            "ms": self.milliseconds,
            "bytes": _gather(self.bytes / self.counted if self.counted else None),
            "losses": losses,
            "error": error,
            "seconds": seconds,
            "groups": len(self.state.stats()["groups"]) if self.state is not None else None,
            "predicted_ps": self.predicted(profiled),
            "plan": self.report(),
            "timelines": drawn,
        }


def _as_plan(
    groups: list[dict[str, Any]], instance: dict[str, Any], profile: Profile
) -> dict[str, list[int]] | None:
    """The groups of a State as a plan of `instance`; None if they are none: another order, another codec."""
    names = [t["name"] for t in instance["tensors"]]
    codecs = [m.codec for m in profile.methods]
    ends, methods = [0], []
    for group in groups:
        end = ends[-1] + len(group["names"])
        if set(names[ends[-1] : end]) != set(group["names"]) or group["codec"] not in codecs:
            return None
        ends.append(end)
        methods.append(codecs.index(group["codec"]))
    return {"ends": ends[1:], "methods": methods}


def task_of(name: str, rank: int, world: int, batch: int | None) -> Task:
    """One of examples/tasks.py, or of replay.py. batch: None is the task's own."""
    if name in REPLAYS:
        replay, small = REPLAYS[name]
        own = TASKS[small].batch if replay.paced else replay.batch
        return replay(rank, world, batch or own, torch.device("cpu"), TASKS[small])
    kind = TASKS[name]
    return kind(rank, world, batch or kind.batch, torch.device("cpu"))


def _gather(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def _agreed(value: bool) -> bool:
    return all(_gather(value))


def train(spec: dict[str, Any]) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    task = task_of(spec["task"], rank, world, spec["batch"])
    runs = []
    for name in (CEILING, *spec["hooks"]):
        if rank == 0:
            print(f"netlab: {spec['task']}, {name}: warm-up", file=sys.stderr, flush=True)
        runs.append(Run(name, task, spec["seed"]))
        runs[-1].warm_up(spec["warmup"])
    for number in range(spec["blocks"]):
        if rank == 0:
            print(
                f"netlab: {spec['task']}, turn {number + 1} of {spec['blocks']}", file=sys.stderr, flush=True
            )
        for run in runs:
            run.turn(spec["steps"])
    profiled = [run for run in reversed(runs) if run.hook is not None and run.hook.planned]  # auto first
    results = [run.result(profiled, spec["trace"]) for run in runs]
    tensors = [p.numel() for p in runs[0].module.parameters()]
    for run in runs:
        if run.attached is not None:
            run.attached.close()
    return {**spec, "world": world, "elements": sum(tensors), "tensors": len(tensors), "runs": results}


if __name__ == "__main__":
    answer(train)
