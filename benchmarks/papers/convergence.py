"""What each codec with its paper's memory does to the final loss, beside the spread of dense seeds.

    python -m benchmarks.papers.convergence --task digits --world 2 4
    python -m benchmarks.papers.convergence --task lm --only topk,dgc --seeds 1

The ranks of a run are simulated in one process, so that no network and no scheduler has a part in it: each
rank's gradient comes from its own batches, all parameters form one group, payloads are encoded for each rank
and decoded as every rank would decode them. Tasks, learning rates, clipping are those of `make train`; where
a memory holds the momentum, the optimizer has none and does not clip (docs/memories.md).
"""

import argparse
import math
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import sidcomp
import torch
from sidcomp import schedule

from benchmarks.common import RESULTS, report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from tasks import TASKS

Schedule = sidcomp.Schedule
# DGC's warm-up of the density (section 3.3), in steps that suit some hundreds of them.
DGC_RAMP = {0: 0.25, 20: 0.0625, 40: 0.015625}

# Beside each codec with its defaults: what could keep more accuracy at no more than a fortieth of the bytes.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "signum, magnitude .01": ("signum", {"magnitude": 0.01}),
    "topk, no memory": ("topk", {"memory": "none"}),
    "topk, values f16, 1.25 %": ("topk", {"values": "f16", "density": 0.0125}),
    "topk, warm-up": ("topk", {"density": Schedule({**DGC_RAMP, 60: 0.01})}),
    "topk, warm-up, f16, 1.25 %": ("topk", {"values": "f16", "density": Schedule({**DGC_RAMP, 60: 0.0125})}),
    "topk, beta .9": ("topk", {"beta": 0.9}),
    "topk + dgc memory": ("topk", {"memory": "dgc"}),
    "topk + dgc memory, warm-up": ("topk", {"memory": "dgc", "density": Schedule({**DGC_RAMP, 60: 0.01})}),
    "topk + dgc memory, no masking": ("topk", {"memory": "dgc", "masking": "off"}),
    "topk .1 % + dgc memory, warm-up": (
        "topk",
        {"memory": "dgc", "density": Schedule({**DGC_RAMP, 60: 0.004, 80: 0.001})},
    ),
}


def train(
    task_name: str, world: int, steps: int, seed: int, codec: str | None, settings: dict[str, Any]
) -> tuple[float, float]:
    """The task's metric at the end, and a payload's share of a dense gradient's bytes, on average."""
    kind = TASKS[task_name]
    torch.manual_seed(seed)
    tasks = [kind(rank, world, kind.batch, torch.device("cpu")) for rank in range(world)]
    torch.manual_seed(seed)
    model = tasks[0].model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    n = sum(p.numel() for p in parameters)
    settings = dict(settings)
    memory = settings.pop("memory", None)
    ranks: list[sidcomp.Compressor] = []
    now: dict[str, Any] = {}
    holds_momentum, sent = False, 0.0
    optimizer = torch.optim.SGD(parameters, lr=kind.lr, momentum=kind.momentum)
    carry: list[Any] = [None] * world
    for step in range(steps):
        rate = kind.lr * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = rate
        gradients = []
        for rank, task in enumerate(tasks):
            loss, carry[rank] = task.loss(model, step, carry[rank])
            optimizer.zero_grad()
            loss.backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in reversed(parameters)]).numpy())  # type: ignore[union-attr]
        if codec is None:
            total = torch.from_numpy(np.mean(gradients, axis=0))
            sent += 1
        else:
            if not ranks or schedule.at(settings, step) != now:
                now = schedule.at(settings, step)
                kept = [c.residual() for c in ranks]
                ranks = [
                    sidcomp.Compressor(codec, n, memory=memory, rank=rank, world=world, seed=seed, **now)
                    for rank in range(world)
                ]
                for c, residual in zip(ranks, kept, strict=False):
                    c.set_residual(residual)
                    c.step = step
                holds_momentum = ranks[0].memory.momentum
                optimizer.param_groups[0]["momentum"] = 0.0 if holds_momentum else kind.momentum
            payloads = [c.encode(g) for c, g in zip(ranks, gradients, strict=True)]
            outs = [c.decode(payloads, scale=1 / world) for c in ranks]
            total = torch.from_numpy(outs[0])
            assert all(np.array_equal(outs[0], o) for o in outs[1:]), "the replicas differ"
            sent += ranks[0].payload_bytes / (4 * n)
        at = 0
        for p in reversed(parameters):
            p.grad = total[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        if not holds_momentum:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        both = np.sum([task.measure(model) for task in tasks], axis=0)
    return float(both[0] / both[1]), sent / steps


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers.convergence", description=__doc__)
    parser.add_argument("--task", default="digits", choices=sorted(TASKS))
    parser.add_argument("--world", type=int, nargs="+", default=[2], help="simulated ranks (default 2)")
    parser.add_argument("--steps", type=int, help="the task's unless given")
    parser.add_argument(
        "--seeds", type=int, default=3, help="of the dense run; codecs: the first (default 3)"
    )
    parser.add_argument("--only", default="", help="codecs, with commas; variants of theirs come along")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/papers-convergence-TASK"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    steps = args.steps or TASKS[args.task].steps
    only = [name for name in args.only.split(",") if name]
    names = [c.name for c in sidcomp.codecs() if not c.lossless and (not only or c.name in only)]
    runs = [(name, name, {}) for name in names]
    runs += [(label, codec, how) for label, (codec, how) in VARIANTS.items() if codec in names]
    rows = []
    better_is_lower = TASKS[args.task].metric != "accuracy"
    for world in args.world:
        dense = [train(args.task, world, steps, seed, None, {})[0] for seed in range(args.seeds)]
        spread = f"{min(dense):.4f} to {max(dense):.4f}"
        print(f"{world} ranks, dense: {spread}", flush=True)
        for label, codec, how in runs:
            begun = time.monotonic()
            try:
                value, share = train(args.task, world, steps, 0, codec, how)
            except sidcomp.SidcompError as e:
                print(f"{label}: {e}")
                continue
            memory = how.get("memory") or next(c.memory for c in sidcomp.codecs() if c.name == codec)
            apart = value - mean(dense) if better_is_lower else mean(dense) - value
            inside = value <= max(dense) if better_is_lower else value >= min(dense)
            rows.append(
                {
                    "ranks": str(world),
                    "what": label,
                    "memory": memory,
                    "1 / bytes": 1 / share,
                    TASKS[args.task].metric: f"{value:.4f}",
                    "dense seeds": spread,
                    "worse by": f"{apart:+.4f}",
                    "within dense": "yes" if inside else "no",
                }
            )
            print(f"{label}: {value:.4f} ({apart:+.4f}), {time.monotonic() - begun:.0f} s", flush=True)
    note = (
        f"{args.task}, {steps} steps, all parameters in one group, {TASKS[args.task].metric} "
        f"{TASKS[args.task].unit} at the end; dense: {args.seeds} seeds. 1 / bytes: of a dense gradient over "
        "a payload, on average over the steps (a ring all-reduce of W ranks sends 2 (W - 1) / W gradients a "
        "rank, an all-gather W - 1 payloads)."
    )
    report(f"papers-convergence-{args.task}", "Convergence", rows, note, RESULTS if args.save else None)


if __name__ == "__main__":
    main()
