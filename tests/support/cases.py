"""The ways DDP is used: small models, each with the DDP arguments and the order of passes that it is for.

    for name, case in CASES.items():
        trainer = Trainer(case, rank, ddp=True)
        trainer.wrapper.register_comm_hook(state, hook)
        trainer.step(); trainer.gradients()

Without DDP a Trainer gives the rank's own gradients, which is what a reference of the exchange needs.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

# One optimizer step is a list of backward passes, each synchronised ("sync") or under no_sync ("local").
Passes = Callable[[int], list[str]]
Loss = Callable[[nn.Module, Tensor, int, int], Tensor]  # (model, input, step, rank)


def once(step: int) -> list[str]:
    return ["sync"]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Loss
    shape: tuple[int, ...] = (4, 12)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    passes: Passes = once
    set_to_none: bool = True
    needs: str = ""  # a DDP argument that older versions of torch do not have


class Scrambled(nn.Module):
    """Defined in another order than it runs, so that the rebuilt buckets differ from the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(9, 5)
        self.first = nn.Linear(12, 17)
        self.third = nn.Linear(16, 9, bias=False)
        self.norm = nn.LayerNorm(17)
        self.second = nn.Linear(17, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.third(torch.tanh(self.second(x)))))


class Branchy(nn.Module):
    """`idle` never runs; `extra` only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 11)
        self.idle = nn.Linear(7, 13)
        self.extra = nn.Linear(11, 11)
        self.out = nn.Linear(11, 3)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        x = torch.tanh(self.inner(x))
        return self.out(self.extra(x) if extra else x)


class Tied(nn.Module):
    """One weight in two modules, and one module that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(12, 6, bias=False)
        self.twice = nn.Linear(6, 6)
        self.out = nn.Linear(12, 6)
        self.out.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.twice(torch.tanh(self.twice(self.inp(x)))))
        return x @ self.out.weight + self.out.bias.sum()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, 5, 3, padding=1)
        self.n1 = nn.BatchNorm2d(5)
        self.c2 = nn.Conv2d(5, 7, 3, bias=False)
        self.n2 = nn.BatchNorm2d(7)
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.n1(self.c1(x)))
        x = torch.relu(self.n2(self.c2(x)))
        return self.out(x.mean((2, 3)))


class Mixed(nn.Module):
    """float32, bfloat16 and float16 parameters, interleaved; the half ones act element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 10)
        self.h1 = nn.Parameter(torch.randn(10).half())
        self.b1 = nn.Parameter(torch.randn(4, 10).bfloat16())
        self.b = nn.Linear(10, 8)
        self.b2 = nn.Parameter(torch.randn(8).bfloat16())
        self.h2 = nn.Parameter(torch.randn(3, 8).half())
        self.c = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = (x.half() * self.h1).float()
        x = (x.bfloat16() * self.b1.sum(0)).float()
        x = torch.tanh(self.b(x))
        x = (x.bfloat16() * self.b2).float()
        x = (x.half() * self.h2.sum(0)).float()
        return self.c(x)


class Shapes(nn.Module):
    """0-dimensional, empty and one-element parameters, and one that outweighs all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0))
        self.empty2 = nn.Parameter(torch.zeros(3, 0))
        self.one = nn.Parameter(torch.ones(1))
        self.table = nn.Parameter(torch.randn(12, 301))
        self.bias = nn.Parameter(torch.zeros(301))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.table + self.bias
        return x * self.scalar + self.one + self.empty.sum() + self.empty2.sum()


class Frozen(Scrambled):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.third.weight.requires_grad_(False)


def channels_last() -> nn.Module:
    return Convolutions().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def square(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    return model(x).float().pow(2).mean()  # type: ignore[no-any-return]


def never(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    return model(x, extra=True).pow(2).mean()  # type: ignore[no-any-return]


def odd_on_rank_0(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    return model(x, extra=step % 2 == 1 and rank == 0).pow(2).mean()  # type: ignore[no-any-return]


def two_forwards(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    return (model(x) * model(x.flip(0))).mean()  # type: ignore[no-any-return]


def accumulate(step: int) -> list[str]:
    return ["local", "local", "sync"]


def accumulate_later(step: int) -> list[str]:
    """static_graph does not allow no_sync in the first iteration."""
    return ["sync"] if step == 0 else ["local", "sync"]


def twice(step: int) -> list[str]:
    return ["sync", "sync"]


DEVICE = torch.device(os.environ.get("SIDCOMP_TEST_DEVICE", "cpu"))  # all ranks share it (make gpu-check)
IMAGE = (4, 3, 6, 6)
UNUSED = {"find_unused_parameters": True}
TINY = 1e-6  # MB: one bucket a tensor

CASES: dict[str, Case] = {
    "default": Case(Scrambled, square),
    "cap-25": Case(Scrambled, square, ddp={"bucket_cap_mb": 25}),
    "cap-small": Case(Scrambled, square, ddp={"bucket_cap_mb": 0.001}),
    "cap-tiny": Case(Scrambled, square, ddp={"bucket_cap_mb": TINY}),
    "grad-kept": Case(Scrambled, square, ddp={"bucket_cap_mb": 0.001}, set_to_none=False),
    "unused-none": Case(Scrambled, square, ddp=UNUSED),
    "unused-never": Case(Branchy, never, ddp=UNUSED),
    "unused-never-tiny": Case(Branchy, never, ddp={**UNUSED, "bucket_cap_mb": TINY}),
    "unused-odd": Case(Branchy, odd_on_rank_0, ddp=UNUSED),
    "unused-odd-tiny": Case(Branchy, odd_on_rank_0, ddp={**UNUSED, "bucket_cap_mb": TINY}),
    "static": Case(Scrambled, square, ddp={"static_graph": True}),
    "static-tiny": Case(Scrambled, square, ddp={"static_graph": True, "bucket_cap_mb": TINY}),
    "static-unused": Case(Branchy, never, ddp={"static_graph": True, "bucket_cap_mb": 0.0005}),
    "no-sync": Case(Scrambled, square, ddp={"bucket_cap_mb": 0.001}, passes=accumulate),
    "no-sync-unused": Case(Branchy, odd_on_rank_0, ddp=UNUSED, passes=accumulate),
    "no-sync-static": Case(Scrambled, square, ddp={"static_graph": True}, passes=accumulate_later),
    "two-backwards": Case(Scrambled, square, ddp={"bucket_cap_mb": 0.001}, passes=twice),
    "two-forwards": Case(Scrambled, two_forwards),
    "tied": Case(Tied, square, ddp={"bucket_cap_mb": 0.0002}),
    "tied-unused": Case(Tied, square, ddp={**UNUSED, "bucket_cap_mb": 0.0002}),
    "convolutions": Case(Convolutions, square, IMAGE),
    "channels-last": Case(channels_last, square, IMAGE, ddp={"bucket_cap_mb": 0.0005}),
    "mixed": Case(Mixed, square),
    "mixed-tiny": Case(Mixed, square, ddp={"bucket_cap_mb": TINY}),
    "mixed-static": Case(Mixed, square, ddp={"static_graph": True, "bucket_cap_mb": 0.0002}),
    "shapes": Case(Shapes, square),
    "shapes-tiny": Case(Shapes, square, ddp={"bucket_cap_mb": TINY}),
    "frozen": Case(Frozen, square, ddp={"bucket_cap_mb": 0.0005}),
    "cap-list": Case(
        Scrambled, square, ddp={"bucket_cap_mb_list": [0.0003, 0.001]}, needs="bucket_cap_mb_list"
    ),
    "batched-copy": Case(Scrambled, square, ddp={"batched_grad_copy": True}, needs="batched_grad_copy"),
}


def available(case: Case) -> bool:
    return not case.needs or case.needs in inspect.signature(DDP.__init__).parameters


class Trainer:
    """A model of `case` under SGD with momentum: the same on every rank, with inputs of its own."""

    def __init__(
        self, case: Case, rank: int, *, ddp: bool = True, seed: int = 0, lr: float = 0.05, **arguments: Any
    ):
        torch.manual_seed(seed)
        self.case, self.rank, self.steps = case, rank, 0
        self.module = case.build().to(DEVICE)
        self.wrapper: Any = DDP(self.module, **{**case.ddp, **arguments}) if ddp else None
        self.optimizer = torch.optim.SGD(
            [p for p in self.module.parameters() if p.requires_grad], lr, momentum=0.9
        )

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)

    def backward(self, number: int, kind: str) -> None:
        generator = torch.Generator().manual_seed(1 + self.rank + 100 * (number + 100 * self.steps))
        x = torch.randn(self.case.shape, generator=generator).to(DEVICE)
        local = self.wrapper is not None and kind == "local"
        with self.wrapper.no_sync() if local else contextlib.nullcontext():
            self.case.loss(self.wrapper or self.module, x, self.steps, self.rank).backward()

    def step(self, after_pass: Callable[[str], None] = lambda kind: None) -> None:
        """One step of the optimizer; after_pass(kind) is called behind each backward pass."""
        self.optimizer.zero_grad(set_to_none=self.case.set_to_none)
        for number, kind in enumerate(self.case.passes(self.steps)):
            self.backward(number, kind)
            after_pass(kind)
        self.optimizer.step()
        self.steps += 1

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.named()}

    def snapshot(self) -> dict[str, Tensor | None]:
        """Gradients, parameters, buffers: everything that two equal runs must have in common."""
        found: dict[str, Tensor | None] = {f"gradient of {name}": g for name, g in self.gradients().items()}
        found |= {f"parameter {name}": p.detach().clone() for name, p in self.module.named_parameters()}
        return found | {f"buffer {name}": b.detach().clone() for name, b in self.module.named_buffers()}

    def close(self) -> None:
        self.wrapper = None


def explicit_groups(module: nn.Module, parts: int = 3) -> list[list[str]]:
    """Up to `parts` lists of parameter names for each dtype, in reverse order of definition."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, p in reversed(list(module.named_parameters())):
        if p.requires_grad:
            by_dtype.setdefault(p.dtype, []).append(name)
    lists = []
    for names in by_dtype.values():
        size = -(-len(names) // parts)
        lists += [names[i : i + size] for i in range(0, len(names), size)]
    return lists


def bits(x: Tensor | None) -> bytes | None:
    return (
        None if x is None else x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def assert_same(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], where: str) -> None:
    """Bit for bit, None for None."""
    assert list(got) == list(want), f"{where}: {list(got)} is not {list(want)}"
    for name, right in want.items():
        left = got[name]
        if bits(left) != bits(right):
            differ = ""
            if left is not None and right is not None and left.numel() == right.numel():
                a, b = left.reshape(-1).double(), right.reshape(-1).double()
                at = torch.nonzero((a != b) | (a.isnan() != b.isnan())).flatten()
                i = int(at[0]) if len(at) else 0
                differ = f" ({len(at)} of {a.numel()} elements; element {i} is {a[i]:.9g}, not {b[i]:.9g})"
            differ = differ or f": {left} is not {right}"
            raise AssertionError(f"{where}: {name} differs{differ}")


# ---- what sidcomp refuses ----------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x.long().abs() % 10))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(12, dtype=torch.complex64))
        self.out = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x * self.phase).abs())


def mixed_precision() -> DDP:
    from torch.nn.parallel.distributed import _MixedPrecision

    return DDP(Scrambled(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))


def python_reducer() -> DDP:
    import torch._dynamo

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return DDP(Scrambled())


def optimizer_in_backward() -> DDP:
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = Scrambled()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    return DDP(module)


SKIPPING = "skip_all_reduce_unused_params"  # of newer versions of torch
UNSUPPORTED: dict[str, Callable[[], DDP]] = {
    "sparse": lambda: DDP(Sparse()),
    "complex": lambda: DDP(Complex()),
    "mixed_precision": mixed_precision,
    "python_reducer": python_reducer,
    SKIPPING: lambda: DDP(Scrambled(), find_unused_parameters=True, **{SKIPPING: True}),
    "optimizer_in_backward": optimizer_in_backward,
    "float64": lambda: DDP(Scrambled().double()),
}
