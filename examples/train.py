"""Plain DDP beside sidcomp: the same model, seed and batches, trained with each.

    torchrun --standalone --nproc-per-node 2 examples/train.py

`make train` starts it by launch.py instead, with a link of limited bandwidth between the ranks. It prints a
table and writes it, with a picture, to --out. What is trained is in tasks.py, how it is shown in report.py.
What a script needs of sidcomp is in Trainer.compress.
"""

import gc
import math
import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import flags
import report
import sidcomp
import torch
import torch.distributed as dist
from sidcomp.doors.ddp import register
from sidcomp.run import UpdateRun
from tasks import TASKS, Task
from torch.nn.parallel import DistributedDataParallel
from wire import tcp_bytes_sent

LOOPBACK = "Network: as the ranks found it. On one machine that is loopback, where an exchange costs little."
CLIP = 1.0
WARM = 5  # steps that are not timed: DDP rebuilds its buckets, allocators settle


@dataclass
class Run:
    """What one run measured on this rank."""

    name: str
    step: int = 0
    seconds: float = 0.0  # spent in steps
    times: list[float] = field(default_factory=list)  # of timed steps, in seconds
    losses: list[float] = field(default_factory=list)  # of each step, on this rank's batch
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # step, seconds, the task's metric
    tcp_bytes: list[float] = field(default_factory=list)  # sent in a step, by the kernel, of each turn
    wire_bytes: list[float] = field(default_factory=list)  # sent in a step, by State.stats(), likewise
    elements: int = 0  # of the model's gradient
    stats: dict[str, float] = field(default_factory=dict)  # State.stats() over all steps
    groups: list[dict[str, Any]] = field(default_factory=list)  # State.stats(), each group
    explained: str = ""  # State.explain(), where something was planned
    found: bool = True  # False: "auto" still measures and compares; its steps are not timed


class Trainer:
    """One run. The runs take turns of some steps, so that whatever else the machine does meets them alike."""

    def __init__(
        self, name: str, task: Task, args: Namespace, ddp: bool = True, compress: bool = False
    ) -> None:
        self.task, self.args, self.run = task, args, Run(name)
        torch.manual_seed(args.seed)
        self.module = task.model()
        self.model = self.module
        updates = compress and args.updates
        self.carry: torch.Tensor | None = None  # what the task keeps from step to step
        self.compressed: sidcomp.Run | sidcomp.State | None = None
        self.run.elements = sum(p.numel() for p in self.module.parameters())

        self.file: Path | None = None
        if ddp and args.checkpoint:
            self.file = args.checkpoint / f"{'compressed' if compress else 'dense'}-rank{dist.get_rank()}.pt"
        saved = None
        if args.resume and self.file is not None and self.file.exists():
            saved = torch.load(self.file, map_location=task.device, weights_only=True)
            self.module.load_state_dict(saved["model"])  # before DDP, which takes rank 0's for all
        if args.resume and self.file is not None:
            check_steps(self.file, saved["run"]["step"] if saved is not None else 0)

        if ddp and not updates:
            ids = [task.device] if task.device.type == "cuda" else None
            self.model = DistributedDataParallel(self.module, device_ids=ids)
        if compress:
            self.compress()
            self.run.found = not self.measuring
        else:
            self.optimizer = self.make_optimizer(args.momentum)
        if saved is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
            if self.compressed is not None:
                self.compressed.load_state_dict(saved["run of sidcomp"])
            self.carry = saved["carry"]
            self.run = Run(**saved["run"])
        self.first = self.run.step
        self.earlier = self.run.stats  # of the run that is resumed

    def compress(self) -> None:
        """Makes the optimizer, and compresses what the ranks send."""
        args = self.args
        names = ("memory", "groups", "exclude", "policy", "full_every", "exchange", "seed")
        arguments = {name: getattr(args, name) for name in names}
        if args.updates:
            others = shard(self.module, args.shards, self.task.device) if args.shards > 1 else None
            self.optimizer = self.make_optimizer(args.momentum)
            self.compressed = sidcomp.compress(
                self.module,
                self.optimizer,
                args.codec,
                every=args.every,
                delay=args.delay * args.every,
                process_group=others,
                options=sidcomp.Options(noise_correction=args.noise_correction, **arguments),
                updates=True,
                **args.parameters,
            )
            return
        state = sidcomp.State(args.codec, **arguments, **args.parameters)
        self.optimizer = self.make_optimizer(0.0 if state.settings.momentum else args.momentum)
        if args.follow:
            self.compressed = sidcomp.compress(self.model, self.optimizer, state)
        else:  # as in the papers that do not have it
            register(self.model, state)
            self.compressed = state

    @property
    def state(self) -> sidcomp.State | None:
        """The State in force. "auto" may replace it."""
        return getattr(self.compressed, "state", self.compressed)

    @property
    def measuring(self) -> bool:
        """Whether "auto" has not decided yet."""
        if isinstance(self.compressed, UpdateRun):
            return self.compressed.updates.observer is not None
        state = self.state
        return state is not None and state.settings.planned and state.plan_report()["stage"] != "settled"

    def make_optimizer(self, momentum: float) -> torch.optim.Optimizer:
        if not self.args.adamw:
            return torch.optim.SGD(self.module.parameters(), lr=self.args.lr, momentum=momentum)
        decayed = [p for p in self.module.parameters() if p.ndim > 1]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [p for p in self.module.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.args.lr, betas=(0.9, 0.95), fused=True)

    def advance(self, until: int, progress: report.Progress) -> None:
        """Steps up to number `until`. The first of a turn is not timed: caches hold the other runs' data."""
        run = self.run
        if not run.found:
            run.found = not self.measuring
        before, sent, stated = run.step, tcp_bytes_sent(), self.wire_bytes()
        for turn, step in enumerate(range(run.step, until)):
            start = perf_counter()
            loss = self.one_step(step)
            took = perf_counter() - start
            run.step = step + 1
            run.seconds += took
            run.losses.append(loss)
            if turn and run.found and step >= self.first + WARM:
                run.times.append(took)
            progress.step(run)
            if self.file is not None and run.step % self.args.checkpoint_every == 0:
                self.save()
        if isinstance(self.compressed, UpdateRun) and until == self.args.steps and until % self.args.every:
            self.compressed.average()  # what the last steps did
        now = tcp_bytes_sent()
        steps = until - before
        if run.found and sent is not None and now is not None:
            run.tcp_bytes.append((now - sent) / steps)
        if run.found and self.state is not None:
            run.wire_bytes.append((self.wire_bytes() - stated) / steps)

    def wire_bytes(self) -> int:
        """Bytes that a rank has sent to others so far, by the exchanges' own statements."""
        return 0 if self.state is None else self.state.stats()["wire_bytes"]

    def one_step(self, step: int) -> float:
        done = step / self.args.steps
        rate = self.args.lr * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.task.device.type, torch.bfloat16, enabled=self.args.autocast):
            loss, self.carry = self.task.loss(self.model, step, self.carry)
        self.optimizer.zero_grad()
        loss.backward()
        self.clip()
        self.optimizer.step()
        return loss.item()

    def clip(self) -> None:
        """All runs clip alike, whatever the optimizer is handed."""
        ours, given = self.compressed, self.args.clip
        if isinstance(ours, sidcomp.Run) and given is None:
            ours.clip_grad_norm_(CLIP)
            return
        limit = CLIP if ours is None else given
        if limit is None:  # a State without a Run
            limit = CLIP * self.state.settings.gain
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), limit)

    def evaluate(self) -> None:
        """The task's metric over all that is held out; each rank measures its share."""
        self.module.eval()
        updates = self.compressed if isinstance(self.compressed, UpdateRun) else None
        with torch.no_grad(), nullcontext() if updates is None else updates.common():
            both = torch.tensor(self.task.measure(self.module), dtype=torch.float64, device=self.task.device)
        self.module.train()
        dist.all_reduce(both)
        self.run.curve.append((self.run.step, self.run.seconds, float(both[0] / both[1])))

    def read_stats(self) -> None:
        if self.state is None:
            return
        stats = self.state.stats()
        sums = ("steps", "uncompressed", "wire_bytes", "encode_seconds", "wait_seconds", "decode_seconds")
        steps = self.run.step - self.first
        # "auto" for updates counts from its choice on; until then nothing was compressed.
        stats["uncompressed"] = max(0, steps - stats["steps"] * self.args.every) if self.args.updates else 0
        stats["steps"] = steps
        self.run.stats = {k: self.earlier.get(k, 0) + stats[k] for k in sums}
        self.run.stats["density"] = stats["density"]
        self.run.groups = stats["groups"]
        if isinstance(self.compressed, sidcomp.Run) and self.args.codec == "auto":
            self.run.explained = str(self.compressed)

    def save(self) -> None:
        """Each rank its own file: what the memory keeps differs from rank to rank."""
        assert self.file is not None
        self.read_stats()
        part, ours = self.file.with_suffix(".part"), self.compressed
        torch.save(
            {
                "model": self.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "run of sidcomp": None if ours is None else ours.state_dict(),
                "carry": self.carry,
                "run": asdict(self.run),
            },
            part,
        )
        os.replace(part, self.file)

    def close(self) -> None:
        if self.file is not None:
            self.save()
        self.read_stats()
        if isinstance(self.compressed, sidcomp.Run):
            self.compressed.average()
        if self.compressed is not None:
            self.compressed.close()
        del self.model


def check_steps(file: Path, step: int) -> None:
    """Ends every rank if their files are of different steps, as when a rank was killed before it saved, or
    if there are more ranks now."""
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    if len(set(steps)) > 1:
        raise SystemExit(
            f"--resume: the ranks' files {file.stem.partition('-')[0]}-rank*.pt in {file.parent} are of the "
            f"steps {steps}, 0 where there is none: give a folder that as many ranks have saved at one step"
        )


def shard(module: torch.nn.Module, ranks: int, device: torch.device) -> dist.ProcessGroup:
    """Shards it over so many ranks each. Returns the ranks that hold the same shard as this one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # of a newer PyTorch than the rest needs

    nodes, rest = divmod(dist.get_world_size(), ranks)
    if rest:
        raise SystemExit(f"--shards {ranks}: give a number that divides the {dist.get_world_size()} ranks")
    mesh = init_device_mesh(device.type, (nodes, ranks), mesh_dim_names=("replicate", "shard"))
    for part in (m for m in module.children() if isinstance(m, torch.nn.ModuleList)):
        for layer in part:
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    return mesh.get_group("replicate")


def train(task: Task, args: Namespace, show: bool) -> list[Run]:
    """Runs of: no communication (some steps only, for their time), plain DDP, sidcomp."""
    alone = Trainer("no communication", task, args, ddp=False, compress=False)
    dense = Trainer("plain DDP", task, args, ddp=True, compress=False)
    ours = Trainer(name(args), task, args, ddp=True, compress=True)
    every = max(6, math.ceil(args.steps / 12))
    until = min(args.steps, args.stop_at or args.steps)
    with report.Progress([dense.run, ours.run], args.steps, show) as progress:
        for stop in [*range(every, until, every), until]:
            alone.advance(alone.run.step + 3, progress)
            for trainer in (dense, ours):
                if trainer.run.step < stop:
                    trainer.advance(stop, progress)
                    trainer.evaluate()
    for trainer in (alone, dense, ours):
        trainer.close()
    return [alone.run, dense.run, ours.run]


def name(args: Namespace) -> str:
    """What is compressed, in words."""
    if args.codec == "auto":
        return "sidcomp"
    settings = "".join(f" {k}={v}" for k, v in args.parameters.items())
    settings += f" groups={args.groups}" if args.groups not in (None, "bucket") else ""
    settings += ", updates" if args.updates else ""
    settings += f" every {args.every} steps" if args.updates and args.every > 1 else ""
    return f"{args.codec}{settings}"


def main() -> int:
    args = flags.parse(__doc__.split("\n")[0])
    if "LOCAL_RANK" not in os.environ:
        print("start it with: torchrun --standalone --nproc-per-node 2 examples/train.py", file=sys.stderr)
        return 2
    args.network = os.environ.get("TRAIN_NETWORK", LOOPBACK)
    if args.link not in (None, "none") and args.network == LOOPBACK:
        print("train.py cannot limit a link: start it by make train or examples/launch.py", file=sys.stderr)
        return 2
    local = int(os.environ["LOCAL_RANK"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(args.threads or max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    device = torch.device("cuda", local) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    if args.checkpoint:
        args.checkpoint.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    show = dist.get_rank() == 0
    try:
        task = TASKS[args.task](dist.get_rank(), dist.get_world_size(), args.batch, device)
        seeds = []
        for seed in range(args.seed, args.seed + args.seeds):
            if show and args.seeds > 1:
                print(f"seed {seed}", flush=True)
            seeds.append(train(task, Namespace(**{**vars(args), "seed": seed}), show))
        if show and args.stop_at:
            print(f"stopped at step {args.stop_at}; go on with --checkpoint {args.checkpoint} --resume")
        elif show:
            report.write(args, task, seeds, dist.get_world_size())
    finally:
        # A program that ends while Gloo's threads hold tensors can abort: docs/troubleshooting.md.
        gc.collect()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
