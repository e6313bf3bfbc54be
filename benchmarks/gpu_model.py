"""The steps of real models on one GPU, with codec work and without: what encode and decode cost a step.

    python benchmarks/gpu_model.py [--device cpu --small]

A ResNet-50 (25.6 M parameters) and a GPT-2 small (124 M) in plain torch, on synthetic batches, under DDP with
one rank: nothing is exchanged, so that what a hook adds to a step is its own work. All hooks of a model are
in this process, timed in turns. Prints a JSON list of rows: model, hook, ms a step, share of the dense step,
memory. A decode of more ranks' payloads costs more: gpu_check.py's other tables have it.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
OURS: dict[str, dict[str, Any]] = {  # State's arguments
    "default": {},
    "topk 1 %": {"codec": "topk", "density": 0.01},
    "sidco-e 1 %": {"codec": "sidco-e", "density": 0.01},
    "int8": {"codec": "int8"},
    "efsignsgd": {"codec": "efsignsgd"},
    "fp16": {"codec": "fp16"},
    "powersgd": {"codec": "powersgd"},
}
HIGH = ", high priority"  # of the side stream
HOOKS = ("dense", "torch fp16", "torch PowerSGD", *OURS, f"default{HIGH}", f"topk 1 %{HIGH}")
WARM, TURNS, STEPS = 8, 4, 6  # the first of a turn is not timed


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        same = inner == outer and stride == 1
        self.skip: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet(depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """ResNet-50 (He et al. 2015, table 1), the stride in the 3 x 3 convolution."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inner = width
    for i, depth in enumerate(depths):
        for j in range(depth):
            outer = 4 * width << i
            layers.append(Bottleneck(inner, width << i, outer, 2 if i and not j else 1))
            inner = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))


class Gpt(nn.Module):
    """GPT-2 (Radford et al. 2019): layer norm comes first, the last layer's weights are the embedding's."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, words: int = 50257, length: int = 1024
    ):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        h = self.words(x) + self.places(torch.arange(length, device=x.device))
        out: Tensor = F.linear(self.body(h, mask=mask, is_causal=True), self.words.weight)
        return out


class Case:
    """A model, its batch, its loss."""

    def __init__(self, name: str, device: torch.device, small: bool) -> None:
        self.device = device
        half = device.type == "cuda"
        self.cast: Callable[[], AbstractContextManager[object]] = (
            (lambda: torch.autocast("cuda", torch.bfloat16)) if half else nullcontext
        )
        if name == "resnet-50":
            batch, side = (2, 32) if small else (64, 224)
            self.make = (lambda: resnet((1, 1), 8, 10)) if small else resnet
            self.x = torch.randn(batch, 3, side, side, device=device)
            self.y = torch.randint(10, (batch,), device=device)
        else:
            batch, length = (2, 16) if small else (8, 1024)
            self.make = (lambda: Gpt(2, 32, 2, 99, length)) if small else Gpt
            self.x = torch.randint(99, (batch, length), device=device)
            self.y = torch.randint(99, (batch * length,), device=device)

    def loss(self, model: nn.Module) -> Tensor:
        with self.cast():
            return F.cross_entropy(model(self.x).flatten(0, -2).float(), self.y)


class Run:
    """One hook's model."""

    def __init__(self, name: str, case: Case) -> None:
        import sidcomp

        torch.manual_seed(0)
        self.case, self.state = case, None
        before = allocated()
        ids = [case.device.index] if case.device.type == "cuda" else None
        cap = (
            {"bucket_cap_mb": 4096} if name == "torch PowerSGD" else {}
        )  # two buckets deadlock (benchmarks/netlab)
        self.model = DistributedDataParallel(case.make().to(case.device), device_ids=ids, **cap)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        ours = name.removesuffix(HIGH)
        os.environ["SIDCOMP_STREAM_PRIORITY"] = "0" if ours == name else "-1"
        if ours in OURS:
            self.state = sidcomp.State(**OURS[ours])
            sidcomp.register(self.model, self.state)
        elif name == "torch fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "torch PowerSGD":
            kept = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self.model.register_comm_hook(kept, powerSGD_hook.powerSGD_hook)
        self.ms: list[float] = []
        for _ in range(WARM):
            self.step()
        self.memory = allocated() - before

    def step(self) -> float:
        wait(self.case.device)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.case.loss(self.model).backward()
        self.optimizer.step()
        wait(self.case.device)
        return (time.perf_counter() - start) * 1e3

    def turn(self) -> None:
        self.ms += [self.step() for _ in range(STEPS)][1:]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated() -> int:
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0


def measure(device: torch.device, small: bool, hooks: tuple[str, ...] = HOOKS) -> Iterator[dict[str, Any]]:
    """The rows of a model as soon as it is done: what comes next may hang."""
    for name in ("resnet-50", "gpt-2"):
        case = Case(name, device, small)
        runs = {hook: Run(hook, case) for hook in hooks}
        for _ in range(TURNS):
            for run in runs.values():
                run.turn()
        dense, size = runs["dense"], sum(p.numel() for p in runs["dense"].model.parameters())
        for hook, run in runs.items():
            low, middle, high = statistics.quantiles(run.ms, n=4, method="inclusive")
            yield {
                "model": name,
                "parameters": size,
                "hook": hook,
                "ms": [middle, low, high],
                "x dense": middle / statistics.median(dense.ms),
                "bytes more, a parameter": (run.memory - dense.memory) / size,
            }
            if run.state is not None:
                run.state.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that it runs")
    args = parser.parse_args()
    if args.device != "cpu":
        sys.path.insert(0, str(ROOT / "python"))
        torch.cuda.set_device(torch.device(args.device))
    with tempfile.TemporaryDirectory() as room:
        dist.init_process_group(
            "gloo" if args.device == "cpu" else "nccl",
            init_method=f"file://{room}/store",
            rank=0,
            world_size=1,
        )
        for row in measure(torch.device(args.device), args.small):
            print(json.dumps(row), flush=True)
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # Gloo's threads may outlive the interpreter


if __name__ == "__main__":
    main()
