"""What each codec with its paper's memory does to the final loss, beside the spread of dense seeds.

    python -m benchmarks.papers.convergence --task digits --world 2 4
    python -m benchmarks.papers.convergence --task lm --only topk,dgc --seeds 1
    python -m benchmarks.papers.convergence --task lm --flags "--config marsit --lr 1"

A row is what `examples/train.py` would train with the row's flags, presets among them: the same task, groups
(one for each bucket of DDP unless the flags say otherwise), policy, schedules, steps in full precision, rate,
clipping. The ranks are simulated in one process, so that no network and no scheduler has a part in it: each
rank's gradient comes from its own batches, is encoded for each rank, and decoded as sidcomp's runtime would.
"""

import json
import math
import shlex
import time
from argparse import Namespace
from collections.abc import Sequence
from statistics import mean
from typing import Any, NamedTuple

import sidcomp
import torch
import torch.distributed as dist
from sidcomp import _core
from sidcomp.config import presets, schedule
from sidcomp.config.exchange_choice import MessagePlan
from sidcomp.config.grouping import DENSE, Piece, Regime, Spec, form_groups
from sidcomp.config.registry import find_codec
from sidcomp.config.settings import Settings
from sidcomp.doors.names import roles
from sidcomp.runtime.block import BODIES, Block

from benchmarks.common import RESULTS, command, report
from benchmarks.examples import TASKS, flags


class Result(NamedTuple):
    metric: float  # the task's, at the end; nan where a gradient was not finite
    share: float  # what a rank sends of a dense gradient's bytes, on average
    losses: list[float]  # rank 0's, of each step


class Group:
    """A group on all simulated ranks."""

    def __init__(self, index: int, spec: Spec, settings: Settings, gradients: Sequence[torch.Tensor]) -> None:
        self.index, self.candidate, self.settings = index, spec.candidate, settings
        self.n = sum(p.numel for p in spec.pieces)
        self.shapes = [p.matrix for p in spec.pieces]
        self.segments = [
            _core.Segments([g.data_ptr() + 4 * p.offset for p in spec.pieces], [p.numel for p in spec.pieces])
            for g in gradients
        ]
        self.full, self.marks = False, ()
        self.plan: _core.Plan | MessagePlan | None = None
        self.message_plans: list[MessagePlan] = []  # of the ranks, where the group travels in messages
        self.states: list[Block] = []

    def exchange(self, step: int, everywhere: bool, carry: float = 1.0) -> int:
        """Gradients of the ranks in, their decoded mean out; the bytes that a rank sends. carry: what is owed
        is multiplied by it.

        On rank 0 alone, unless asked or where a memory learns from what was decoded.
        """
        plan, world, gathered = self._plan(step), len(self.segments), self.gathered
        if isinstance(plan, MessagePlan):
            nonfinite, sent_by, _ = _core.loopback(
                [p.core for p in self.message_plans],
                [
                    _core.Buffers(segments, state.ptr, work.ptr, wire.ptr)
                    for segments, state, work, wire in zip(
                        self.segments, self.states, self.works, self.wires, strict=True
                    )
                ],
                step=step, seed=self.settings.seed, group=self.index, carry=carry,
            )  # fmt: skip
            if nonfinite:
                raise FloatingPointError
            return max(sent_by)
        at = [gathered.ptr + rank * plan.payload_bytes for rank in range(world)]
        sent = 0 if plan.linear else plan.payload_bytes
        for i in range(plan.reductions):
            for rank, segments in enumerate(self.segments):
                buffers = _core.Buffers(segments, self.states[rank].ptr, self.work.ptr, at[rank])
                here = {"seed": self.settings.seed, "group": self.index, "rank": rank, "world": world}
                if i == 0:
                    plan.encode(buffers, step=step, carry=carry, **here)
                else:
                    plan.next_reduction(i, buffers, step=step, **here)
            if plan.linear:
                dtype = BODIES[plan.body_dtype]
                offset, count = plan.slices[i]
                sent += count * dtype.itemsize
                rows = gathered.tensor[: world * plan.payload_bytes].view(world, -1)
                rows = rows[:, offset : offset + count * dtype.itemsize].view(dtype)
                for row in rows[1:]:
                    rows[0] += row
                rows[1:] = rows[0]
        learns = plan.memory == "compensation" or plan.extra_bytes
        for rank in range(world if everywhere or learns else 1):
            state = self.states[rank].ptr if plan.vectors or plan.extra_bytes else 0
            if plan.decode(
                gathered.ptr, plan.payload_bytes, 1 if plan.linear else world, 1 / world,
                _core.Buffers(self.segments[rank], state), step=step, group=self.index,
            ):  # fmt: skip
                raise FloatingPointError
        return sent

    def _plan(self, step: int) -> _core.Plan | MessagePlan:
        """This step's plan; what is kept goes over to it as in `sidcomp.runtime.layout.Group.turn`."""
        s = self.settings
        candidate = None if self.candidate == DENSE else s.candidate(self.candidate)
        marks = schedule.at((candidate or s.candidate(0)).parameters, step)
        full = candidate is not None and not candidate.codec.lossless and s.full(step)
        if self.plan is None or marks != self.marks:
            world = len(self.segments)
            plans = [
                s.plan(self.n, "float32", self.candidate, step=step, shapes=self.shapes, place=(rank, world))
                for rank in range(world)
            ]
            plan = plans[0]
            before = self.message_plans or [self.plan] * world
            self.message_plans = [p for p in plans if isinstance(p, MessagePlan)]
            self.works = [Block(p.work_bytes) for p in self.message_plans]
            self.wires = [Block(p.wire_bytes) for p in self.message_plans]
            states = [Block(plan.state_bytes) for _ in self.segments]
            for mine, his, old, new in zip(plans, before, self.states, states, strict=False):
                assert his is not None
                kept = Block(4 * self.n * max(1, plan.vectors))
                his.residual_out(old.ptr, kept.ptr)
                mine.residual_in(new.ptr, kept.ptr)
            other = (
                s.full_plan(self.n, "float32", self.candidate)
                if candidate is not None and s.full_every
                else plan
            )
            self.states, self.marks, self.full = states, marks, False
            self.plan, self.other = plan, other
            self.work = Block(max(plan.work_bytes, other.work_bytes))
            self.gathered = Block(world * max(plan.payload_bytes, other.payload_bytes))
        if full is not self.full:
            for state in self.states:
                self.plan.rescale(state.ptr, 1.0)
                self.other.unsend(state.ptr)
            self.plan, self.other, self.full = self.other, self.plan, full
        return self.plan


def pieces_of(model: torch.nn.Module) -> list[Piece]:
    """The parameters as DDP's buckets have them, in their order; offset: in the whole gradient."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad][::-1]
    buckets, _ = dist._compute_bucket_assignment_by_size([p for _, p in named], [1 << 20, 25 << 20])
    bucket = {i: b for b, members in enumerate(buckets) for i in members}
    pieces, offset = [], 0
    for i, (name, p) in enumerate(named):
        pieces.append(Piece(name, tuple(p.shape), p.numel(), "float32", 4, "cpu", bucket[i], offset))
        offset += p.numel()
    return pieces


def groups_of(model: torch.nn.Module, settings: Settings, gradients: Sequence[torch.Tensor]) -> list[Group]:
    settings.policy.roles = roles(model)
    pieces = pieces_of(model)
    shapes = {p.name: p.shape for p in pieces}
    own = settings.assign(shapes)
    # What planned groups come to is a matter of speed; two is what MergeComp's search has by default.
    regime = Regime("even:2") if settings.planned else settings.start
    specs = form_groups(pieces, regime, settings.policy.excluded(shapes), own)
    return [Group(i, spec, settings, gradients) for i, spec in enumerate(specs)]


def settings_of(args: Namespace, seed: int) -> Settings:
    """Payloads that cannot be summed are gathered, whatever the number of ranks, unless an exchange is
    named."""
    summed = args.codec is not None and find_codec(args.codec).linear
    exchange = args.exchange or (None if summed else "allgather")
    return Settings.parse(
        args.codec, args.parameters, memory=args.memory, groups=args.groups, seed=seed, exclude=args.exclude,
        policy=args.policy, full_every=args.full_every, exchange=exchange,
    )  # fmt: skip


def train(args: Namespace, world: int, seed: int, autocast: bool = False) -> Result:
    """args: of `flags.parse`."""
    kind = TASKS[args.task]
    tasks = [kind(rank, world, args.batch, torch.device("cpu")) for rank in range(world)]
    torch.manual_seed(seed)
    model = tasks[0].model()
    settings = settings_of(args, seed)
    parameters = [p for p in model.parameters() if p.requires_grad][::-1]
    n = sum(p.numel() for p in parameters)
    gradients = [torch.zeros(n) for _ in range(world)]
    views = [
        [v.view_as(p) for v, p in zip(g.split([p.numel() for p in parameters]), parameters, strict=True)]
        for g in gradients
    ]
    groups = groups_of(model, settings, gradients)
    momentum = 0.0 if settings.momentum else args.momentum
    optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=momentum)
    hidden: list[Any] = [None] * world
    sent, losses, last = 0, [], 0.0
    for step in range(args.steps):
        rate = args.lr * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))
        optimizer.param_groups[0]["lr"] = rate
        carry = last / rate if args.follow and step else 1.0
        last = rate
        for rank in reversed(range(world)):  # p.grad is that of rank 0 in the end
            for p, view in zip(parameters, views[rank], strict=True):
                p.grad = view
            gradients[rank].zero_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss, hidden[rank] = tasks[rank].loss(model, step, hidden[rank])
            loss.backward()
        losses.append(loss.item())
        check = step < 3
        try:
            sent += sum(group.exchange(step, check, carry) for group in groups)
        except FloatingPointError:
            return Result(math.nan, sent / (4 * n * (step + 1)), losses)
        assert not check or all(torch.equal(gradients[0], g) for g in gradients), "the replicas differ"
        torch.nn.utils.clip_grad_norm_(parameters, settings.gain if args.clip is None else args.clip)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        both = [sum(column) for column in zip(*(task.measure(model) for task in tasks), strict=True)]
    return Result(both[0] / both[1], sent / (4 * n * args.steps), losses)


# Flags of codecs that hardly train these tasks at the rate and with the momentum of plain SGD: signs take the
# rate of signs; what a residual sends late must not have momentum on top, so the rate makes up for it.
SUITED = {
    "digits": {
        "signum": "--lr 0.0005 --clip inf",
        "marsit": "--full-every 100 --param eta_s=0.002 --momentum 0 --lr 0.5 --clip 5",
        "randk": "--momentum 0 --lr 1",
        "randk-own": "--momentum 0 --lr 1",
        "ssdm": "--momentum 0 --lr 0.0005 --clip inf",
    },
    "lm": {
        "signum": "--lr 0.004 --clip inf",
        "marsit": "--full-every 100",
        "randk": "--momentum 0 --lr 8.3",
        "randk-own": "--momentum 0 --lr 8.3",
        "ssdm": "--momentum 0 --lr 0.0005 --clip inf",
    },
}

LOG4 = "--codec topk --param values=log4 --param indices=packed --density .084"  # a fortieth of the bytes


def rows_of(task: str, only: Sequence[str]) -> dict[str, str]:
    """Labels, and train.py's flags."""
    m = TASKS[task].momentum
    holds = f"--param momentum={m}"  # a memory that holds the momentum has the task's
    own = {"dgc": holds, "redsync": holds, **SUITED.get(task, {})}
    rows = {c.name: f"--codec {c.name} {own.get(c.name, '')}" for c in sidcomp.codecs() if not c.lossless}
    for preset in sidcomp.presets():
        of_updates = presets.load(preset).program.get("updates")  # which are not simulated here
        if preset not in ("fp16", "topk-1pct", "topk-fortieth") and not of_updates:  # other rows have them
            rows[f"preset {preset}"] = f"--config {preset}"
    rows["topk log4"] = LOG4
    return {name: text.strip() for name, text in rows.items() if not only or name in only}


def main(argv: list[str] | None = None) -> None:
    parser = command("papers.convergence", __doc__)
    parser.add_argument("--task", default="digits", choices=sorted(TASKS))
    parser.add_argument("--world", type=int, nargs="+", default=[2], help="simulated ranks (default 2)")
    parser.add_argument("--steps", type=int, help="the task's unless given")
    parser.add_argument(
        "--seeds", type=int, default=3, help="of each row (default 3); the saved dense row is taken as it is"
    )
    parser.add_argument("--only", default="", help="labels of rows, with commas")
    parser.add_argument("--flags", action="append", default=[], help="a row of its own: train.py's flags")
    parser.add_argument(
        "--bf16", action="store_true", help="forward and backward in bfloat16 (torch.autocast), dense too"
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="write benchmarks/results/papers-convergence-TASK; rows in it stay until run again",
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    kind = TASKS[args.task]
    steps = args.steps or kind.steps
    shown = f"{steps}{' bf16' if args.bf16 else ''}"
    only = [name for name in args.only.split(",") if name]
    runs = {text: text for text in args.flags} or rows_of(args.task, only)
    name = f"papers-convergence-{args.task}"
    file = RESULTS / f"{name}.json"
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    if file.exists():
        for row in json.loads(file.read_text())["rows"]:
            rows[row["ranks"], row["steps"], row["what"]] = row

    def measure(label: str, text: str, world: int) -> dict[str, Any]:
        begun, found = time.monotonic(), []
        parsed = flags.parse("", [*shlex.split(text), "--task", args.task, "--steps", str(steps)])
        for seed in range(args.seeds):
            found.append(train(parsed, world, seed, args.bf16))
            print(f"{label}, seed {seed}: {found[-1].metric:.4f}", flush=True)
        values = [result.metric for result in found]
        row = {
            "ranks": str(world),
            "steps": shown,
            "what": label,
            "memory": settings_of(parsed, 0).candidates[0].memory.name,
            "1 / bytes": 1 / mean(result.share for result in found),
            kind.metric: f"{mean(values):.4f}",
            "each seed": " ".join(f"{value:.4f}" for value in values),
        }
        print(*row.values(), f"{time.monotonic() - begun:.0f} s", flush=True)
        return row

    keys = []
    for world in args.world:
        keys.append((str(world), shown, "dense"))
        if keys[-1] not in rows:
            rows[keys[-1]] = measure("dense", "--codec none", world)
            rows[keys[-1]] |= {"worse by": "", "within dense": "", "flags": ""}
        dense = [float(v) for v in rows[keys[-1]]["each seed"].split()]
        worst = min(dense) if kind.metric == "accuracy" else max(dense)
        sign = 1 if kind.metric == "accuracy" else -1
        for label, text in runs.items():
            keys.append((str(world), shown, label))
            row = rows[keys[-1]] = measure(label, text, world)
            value = float(row[kind.metric])
            row["worse by"] = f"{sign * (mean(dense) - value):+.4f}"
            row["within dense"] = "yes" if sign * (value - worst) >= 0 else "no"
            row["flags"] = f"`{text}`"
    order = sorted(rows if args.save else keys, key=lambda key: (int(key[0]), -int(key[1].split()[0])))
    note = (
        f"{args.task}: {kind.metric} {kind.unit} at the end, mean of the seeds. worse by: than dense's mean; "
        "within dense: no worse than dense's worst seed. 1 / bytes: of a dense gradient over what a rank "
        "hands to the collective, on average over the steps (a ring all-reduce of W ranks sends "
        "2 (W - 1) / W gradients a rank, an all-gather W - 1 payloads). bf16: forward and backward in "
        "bfloat16 (torch.autocast)."
    )
    report(name, "Convergence", [rows[key] for key in order], note, RESULTS if args.save else None)


if __name__ == "__main__":
    main()
