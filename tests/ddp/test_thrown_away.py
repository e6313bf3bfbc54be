"""A step that is thrown away leaves nothing: what is kept, and every bit of all later steps, is as if it had
never been. One run has such steps, another one has not; they are compared after every step that both have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from buffers import fits
from cases import assert_same, square
from common import CODECS, KINDS, MEMORIES, begin, groups_of, residuals_of, with_density
from harness import at_end, on_ranks, run
from heard import logged
from sidcomp import _core
from sidcomp.config.grouping import Regime
from sidcomp.config.settings import PLAIN
from sidcomp.doors.ddp import register
from test_switch import scripted
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

SETTINGS = with_density(CODECS, 0.1)
STEPS = 5
HUGE = 1e30


class Run:
    """A Trainer with a State, whose gradients can be multiplied in single steps."""

    def __init__(self, rank: int, case: str = "cap-small", **arguments: Any) -> None:
        self.trainer, self.state = begin(rank, case, lr=0.01, **arguments)
        self.factors: dict[str, float] = {}
        for name, p in self.trainer.named():
            p.register_hook(lambda g, name=name: g * self.factors.get(name, 1.0))

    def backward(self, **factors: float) -> None:
        """A pass without the optimizer's step, in which gradients are multiplied."""
        self.factors = {name.replace("__", "."): factor for name, factor in factors.items()}
        self.trainer.optimizer.zero_grad()
        self.trainer.backward(0, "sync")
        self.factors = {}

    def overflow(self, rank: int, which: str = "second.weight") -> None:
        """On `rank` one parameter's gradient is Inf; all others are finite and enormous."""
        names = [n.replace(".", "__") for n, _ in self.trainer.named()]
        factors = {n: HUGE for n in names} | {which.replace(".", "__"): 1e300}
        self.backward(**(factors if rank == self.trainer.rank else {}))

    def not_finite(self) -> set[str]:
        """The parameters whose gradients are not."""
        return {n for n, g in self.trainer.gradients().items() if g is not None and not g.isfinite().all()}

    def everything(self) -> dict[str, Tensor | None]:
        saved = self.state.state_dict()
        found = self.trainer.snapshot()
        found |= {f"residual of {n}": r for n, r in saved["residuals"].items()}
        for i, g in enumerate(saved["layout"]):
            found |= {f"header of group {i}": g["header"], f"extra of group {i}": g["extra"]}
        rates = [saved["rates"].get(n, 0.0) for n in saved["residuals"]]
        return found | {"step": torch.tensor(saved["step"]), "rates": torch.tensor(rates)}


def in_step(rank: int, world: int, arguments: dict[str, Any], follows: bool = True) -> None:
    """With two states: steps that overflow in some groups and not in others, and finite ones that the program
    skips, in rows of one to three."""
    clean, other = (Run(rank, **arguments, **more) for more in ({}, {"nonfinite": "rollback"}))
    for r in (clean, other):
        if follows:
            r.state.follow(r.trainer.optimizer)
    # Other groups follow DDP, which forms its buckets anew.
    first = 0 if arguments.get("groups") == "explicit" else 2
    allocations = 0
    for step in range(STEPS):
        for k in range(step - first + 1 if step >= first else 0):
            if k % 2 == 0:
                other.overflow(world - 1)
                bad = other.not_finite()
                assert bad, "the overflow went by unnoticed"
                if len(groups_of(other.state)) > 1:
                    assert len(bad) < len(list(other.trainer.named())), "no group is finite: nothing to see"
            else:
                other.backward(first__weight=1e12, last__bias=-1e9)
                other.state.skip()
            other.state.skip()  # once is enough
        for r in (clean, other):
            for group in r.trainer.optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step % 2)
            r.trainer.step()
        assert_same(other.everything(), clean.everything(), f"{arguments}, step {step}")
        if step >= 2 and not isinstance(arguments.get("density"), sidcomp.Schedule):
            assert allocations in (0, other.state.stats()["allocations"])
            allocations = other.state.stats()["allocations"]
    assert other.state.engine.step == clean.state.engine.step == STEPS
    twice = other.state.stats()["state_bytes"], clean.state.stats()["state_bytes"]
    assert twice[0] == 2 * twice[1]


def in_steps(rank: int, world: int, runs: Sequence[dict[str, Any]]) -> None:
    """One start of the processes for several runs: that takes longer than a run."""
    for arguments in runs:
        in_step(rank, world, arguments)


def test_every_kind_of_codec() -> None:
    """The first of each kind, and those of several reductions."""
    codecs = [*KINDS, *(c for c in CODECS if "reductions" in CODECS[c].traits)]
    run(in_steps, 2, [{"codec": c, **SETTINGS.get(c, {}), "groups": "bucket"} for c in codecs])


@pytest.mark.parametrize("codec", ["topk", "fp16"])
def test_every_memory(codec: str) -> None:
    memories = [m for m in MEMORIES if fits(codec, m)]
    settings = {"codec": codec, **SETTINGS.get(codec, {}), "groups": "explicit"}
    run(in_steps, 2, [{**settings, "memory": m} for m in memories])


EXCHANGES: list[tuple[str, dict[str, Any], int]] = [
    ("ring1", {"codec": "marsit"}, 3),
    ("torus1", {"codec": "signum"}, 4),
    ("twoshot", {"codec": "topk", "density": 0.1}, 3),
    ("twoshot", {"codec": "int8"}, 2),
    ("hierarchical", {"codec": "topk", "density": 0.1, "ranks_per_node": 2}, 4),
    ("hierarchical", {"codec": "fp16", "ranks_per_node": 2}, 2),
    ("allgather", {"codec": "qsgd"}, 2),
    ("allreduce", {"codec": "terngrad-shared"}, 3),
    ("cascade", {"codec": "ssdm", "memory": "none"}, 2),
    ("expand", {"codec": "signsgd"}, 3),
]


def test_every_exchange_is_there() -> None:
    assert {e for e, *_ in EXCHANGES} == {e["name"] for e in _core.exchanges()}


@pytest.mark.parametrize("exchange, arguments, world", EXCHANGES)
def test_every_exchange(exchange: str, arguments: dict[str, Any], world: int) -> None:
    run(in_step, world, {"exchange": exchange, **arguments, "groups": "bucket"})


@pytest.mark.parametrize(
    "arguments",
    [
        {"full_every": 2, "codec": "powersgd", "groups": "explicit"},
        {"full_every": 3, "codec": "marsit", "exchange": "ring1"},
        {"full_every": 2, "density": 0.05, "groups": "explicit"},
        {"codec": "topk", "density": sidcomp.Schedule({0: 0.5, 2: 0.1, 3: 0.05}), "groups": "explicit"},
        {"codec": "randk", "density": 0.1, "memory": "none", "exclude": "1-D"},
        {"policy": [("1-D", "none"), ("second.weight", {"density": 0.5})]},
        {"checksum_every": 1},
    ],
    ids=lambda a: " ".join(map(str, a)),
)
def test_what_depends_on_the_step(arguments: dict[str, Any]) -> None:
    run(in_step, 2, arguments, False)


# ---- GradScaler ---


def scaled(rank: int, world: int, fused: bool, codec: str, groups: str) -> None:
    """The loop of the AMP manual. One run overflows in three steps; the other one is told the scales only."""
    runs = [Run(rank, codec=codec, groups=groups, **SETTINGS.get(codec, {})) for _ in range(2)]
    for r in runs:
        r.trainer.optimizer = torch.optim.SGD(r.trainer.module.parameters(), 0.01, momentum=0.9, fused=fused)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in runs]
    for r, scaler in zip(runs, scalers, strict=True):
        r.state.follow(r.trainer.optimizer, scaler)

    def step(i: int, at: int, bad: bool = False) -> None:
        r, scaler = runs[i], scalers[i]
        r.trainer.steps = at
        generator = torch.Generator().manual_seed(7 * at + rank)
        x = torch.randn(4, 12, generator=generator)
        r.trainer.optimizer.zero_grad()
        loss = scaler.scale(r.trainer.wrapper(x).pow(2).mean())
        names = [n for n, _ in r.trainer.named()]
        r.factors = dict.fromkeys(names, HUGE) | {"second.weight": 1e300} if bad and rank == 1 else {}
        loss.backward()
        r.factors = {}
        scaler.step(r.trainer.optimizer)
        scaler.update()

    for at in range(9):
        for _ in range({3: 1, 5: 2}.get(at, 0)):
            before = scalers[0].get_scale()
            step(0, at, bad=True)
            assert scalers[0].get_scale() == before / 2, "the scaler has not skipped"
            scalers[1].update(scalers[0].get_scale())
            scalers[1]._growth_tracker.zero_()  # type: ignore[union-attr]
        for i in range(2):
            step(i, at)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same(runs[0].trainer.snapshot(), runs[1].trainer.snapshot(), f"step {at}")
        if at != 6:  # the scale's last change is taken up at the next step
            assert_same(residuals_of(runs[0].state), residuals_of(runs[1].state), f"step {at}")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("codec, groups", [("topk", "bucket"), ("int8", "model")])
def test_a_followed_scaler(codec: str, groups: str, fused: bool) -> None:
    run(scaled, 2, fused, codec, groups)


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_what_only_the_scaler_knows(rank: int, world: int, fused: bool) -> None:
    """All that is averaged is finite; the scaler skips, since another parameter of the optimizer is not."""
    runs = [Run(rank, codec="topk", density=0.1) for _ in range(2)]
    for r in runs:
        extra = nn.Parameter(torch.ones(3))
        parameters = [*r.trainer.module.parameters(), extra]
        r.trainer.optimizer = torch.optim.SGD(parameters, 0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        r.state.follow(r.trainer.optimizer, scaler)
        for at in range(5):
            for bad in (True, False):
                if (bad and r is runs[0]) or (bad and at != 2):
                    continue
                r.trainer.steps = at
                r.trainer.optimizer.zero_grad()
                x = torch.randn(4, 12, generator=torch.Generator().manual_seed(at))
                loss = square(r.trainer.wrapper, x, at, rank)
                scaler.scale(loss + extra.sum()).backward()
                if bad:
                    extra.grad = torch.full((3,), float("inf"))
                scaler.step(r.trainer.optimizer)
                scaler.update(4.0)
    assert_same(runs[1].trainer.snapshot(), runs[0].trainer.snapshot(), "the end")
    assert_same(residuals_of(runs[1].state), residuals_of(runs[0].state), "the end")
    assert runs[1].state.engine.step == 5


@pytest.mark.parametrize(
    "density", [0.1, sidcomp.Schedule({0: 0.1, 5: 0.3})], ids=["fixed", "changes between"]
)
@on_ranks(2)
def test_several_passes_of_one_step(rank: int, world: int, density: float | sidcomp.Schedule) -> None:
    """Where the optimizer is followed, all passes since its last step are thrown away with the last one. So
    groups for another density wait for the next step of the optimizer."""
    clean, other = (Run(rank, "two-backwards", codec="topk", density=density, nonfinite=n)
                    for n in (None, "rollback"))  # fmt: skip
    for r in (clean, other):
        r.state.follow(r.trainer.optimizer)
    for step in range(4):
        if step >= 2:
            other.backward(first__weight=1e6)
            other.trainer.backward(1, "sync")
            other.state.skip()
            other.backward(second__weight=1e5)
            other.trainer.backward(1, "sync")
            other.overflow(1)
        for r in (clean, other):
            r.trainer.step()
        assert_same(other.everything(), clean.everything(), f"step {step}")


@on_ranks(2)
def test_auto_asks_for_groups_within_a_step_of_several_passes(rank: int, world: int) -> None:
    """A plan, plain DDP, and between the two a step that flushes: they wait for the next step of the
    optimizer, as groups for another density do."""
    clean, other = (
        Run(rank, "two-backwards", codec="auto", candidates=[("topk", {"density": 0.1})], nonfinite=n)
        for n in (None, "rollback")
    )
    plan = Regime([[name for name, _ in clean.trainer.named()]], (0,))
    for r in (clean, other):
        r.state.follow(r.trainer.optimizer)
    thrown = {2: (plan, PLAIN), 3: (PLAIN, PLAIN), 4: (PLAIN, plan), 5: (plan, PLAIN)}
    flushed = []
    for step, asked in enumerate([plan, plan, plan, PLAIN, PLAIN, plan]):
        for first, second in [thrown[step]] if step in thrown else []:
            scripted(other.state, [first])
            other.backward(first__weight=1e6)
            scripted(other.state, [second])
            other.trainer.backward(1, "sync")
            other.state.skip()
        for r in (clean, other):
            scripted(r.state, [asked])
            r.trainer.step()
        flushed.append(clean.state.engine.regime.flush)
        assert_same(other.everything(), clean.everything(), f"step {step}")
    assert flushed == [False, False, False, True, False, False]


@pytest.mark.parametrize("nonfinite", ["rollback", "drop"])
@pytest.mark.parametrize("groups", ["explicit", "bucket"])
@on_ranks(2)
def test_a_step_within_which_ddp_forms_its_buckets_anew(
    rank: int, world: int, groups: str, nonfinite: str
) -> None:
    """The first pass of the first step has other buckets than the second one, and is thrown away with it."""
    clean, other = (
        Run(rank, "two-backwards", codec="topk", density=0.1, groups=groups, nonfinite=n)
        for n in (None, nonfinite)
    )
    for r in (clean, other):
        r.state.follow(r.trainer.optimizer)
    other.backward(first__weight=1e6)
    first = [g["names"] for g in groups_of(other.state)]
    other.trainer.backward(1, "sync")
    assert groups == "explicit" or [g["names"] for g in groups_of(other.state)] != first
    assert any(r.any() for r in residuals_of(other.state).values())
    other.state.skip()
    assert not any(r.any() for r in residuals_of(other.state).values())
    if nonfinite == "rollback":
        assert other.state.engine.step == 0
    if groups == "explicit" and nonfinite == "rollback":
        for step in range(2):
            for r in (clean, other):
                r.trainer.step()
            assert_same(other.everything(), clean.everything(), f"step {step}")


class Two(nn.Module):
    """`a` and `c` have one optimizer, `b` another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(40, 40, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.a(x), self.b(x), self.c(x)


@pytest.mark.parametrize("looked", [False, True], ids=["", "looked"])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@on_ranks(2)
def test_a_scaler_skips_one_of_two_optimizers(rank: int, world: int, together: bool, looked: bool) -> None:
    """Steps in which only `a` is not finite stay for `b`, whose optimizer steps, and leave nothing of `c`,
    also if a group holds both. The rates change in the first of them. looked: before the scaler decides."""
    module = Two()
    ddp = DDP(module, bucket_cap_mb=0.0001)
    both = [["b.weight", "c.weight"]] if together else [["b.weight"], ["c.weight"]]
    state = sidcomp.State("topk", density=0.02, groups=[["a.weight"], *both])
    register(ddp, state)
    at_end(state.close)
    first = torch.optim.SGD([*module.a.parameters(), *module.c.parameters()], 1.0)
    second = torch.optim.SGD(module.b.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**6, backoff_factor=0.999999)
    state.follow([first, second], scaler)
    start, due = module.b.weight.detach().clone(), torch.zeros(40, 40)
    generator = torch.Generator().manual_seed(rank)

    def owed(name: str) -> Tensor:
        saved = state.state_dict()
        kept = saved["residuals"][name][0] * saved["rates"].get(name, 1.0)
        return kept.view(40, 40)  # type: ignore[no-any-return]

    for step in range(8):
        rate = 1.0 if step < 4 else 0.5
        bad = step in (4, 5)
        for optimizer in (first, second):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = rate
        before = owed("c.weight") if step else torch.zeros(40, 40)
        x, w = (torch.randn(4, 40, generator=generator) for _ in range(2))
        ya, yb, yc = ddp(x)
        scaler.scale(
            (ya * w).sum() * (float("inf") if bad else 1.0) + (yb * w).sum() + (yc * w).sum()
        ).backward()
        if looked:
            state.stats()
        c = module.c.weight.detach().clone()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        assert torch.equal(c, module.c.weight) is bad
        mean = w.t() @ x
        dist.all_reduce(mean)
        due += rate * mean / world
        if bad:
            torch.testing.assert_close(owed("c.weight"), before, rtol=1e-4, atol=1e-4)
        kept = owed("b.weight").clone()
        dist.all_reduce(kept)
        lost = (start - module.b.weight.detach() + kept / world - due).norm() / due.norm()
        assert lost < 1e-4, f"step {step}: {lost:.3f} is lost"
    assert state.error is None


class Plain:
    """An optimizer in its face only: it tells nothing when it steps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr}]

    def step(self) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None


@pytest.mark.parametrize("scales", [False, True])
@on_ranks(2)
def test_an_optimizer_unlike_torchs(rank: int, world: int, scales: bool) -> None:
    """One that has no hooks is seen to step by its parameters, and to be skipped by what the scaler found."""
    clean, other = (Run(rank, codec="topk", density=0.1, nonfinite=n) for n in (None, "rollback"))
    for r in (clean, other):
        r.trainer.optimizer = Plain(r.trainer.module.parameters(), 0.01)  # type: ignore[assignment]
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000) if scales else None
        r.state.follow(r.trainer.optimizer, scaler)
        for at in range(5):
            for bad in (True, False):
                if bad and (r is clean or at != 3):
                    continue
                r.trainer.steps = at
                r.trainer.optimizer.zero_grad()
                r.factors = {"first.weight": 1e300} if bad and rank == 0 else {}
                loss = square(r.trainer.wrapper, torch.full((4, 12), float(at + rank)), at, rank)
                (loss if scaler is None else scaler.scale(loss)).backward()
                if scaler is not None:
                    scaler.step(r.trainer.optimizer)
                    scaler.update(1.0)
                elif not bad:
                    r.trainer.optimizer.step()
        r.factors = {}
    assert_same(other.everything(), clean.everything(), "the end")


@on_ranks(2)
def test_an_optimizer_that_never_steps(rank: int, world: int) -> None:
    """The optimizer that is followed is not the one that steps: after a while every pass is a step again."""
    one = Run(rank, codec="topk", density=0.1, nonfinite="rollback")
    lines = logged()
    idle = torch.optim.SGD([nn.Parameter(p.detach().clone()) for p in one.trainer.module.parameters()], 0.01)
    idle.param_groups[0]["params"] += list(one.trainer.module.parameters())[:1]
    one.state.follow(idle)
    for p in one.trainer.module.parameters():
        p.requires_grad_(True)
    for _ in range(105):
        one.trainer.optimizer.zero_grad()
        one.trainer.backward(0, "sync")
        one.trainer.steps += 1
    before = residuals_of(one.state)
    one.backward(first__weight=1e6)
    one.state.skip()
    assert_same(residuals_of(one.state), before, "after skip")
    assert sum("has not stepped in the last 100 backward passes" in line for line in lines) == 1


# ---- without a second state ---


def dropped(rank: int, world: int, arguments: dict[str, Any], infinite: str) -> None:
    """Groups that were finite are forgotten; those that were not keep no more than they had, to a rounding;
    nothing comes back."""
    one = Run(rank, nonfinite="drop", **arguments)
    for _ in range(3):
        one.trainer.step()
    before = residuals_of(one.state)
    bad: set[str] = set()
    if not infinite:
        one.backward(first__weight=HUGE, second__weight=HUGE)
        one.state.skip()
    else:
        one.overflow(world - 1, infinite)
        infinities = one.not_finite()
        assert infinities
        for group in groups_of(one.state):  # a sum's other elements stay finite, of a group that was not
            if infinities.intersection(group["names"]):
                bad.update(group["names"])
    after = residuals_of(one.state)
    for name, now in after.items():
        if name not in bad:
            assert not now.any(), f"{name} keeps something of a step that was thrown away"
        else:
            assert (now.abs() <= 2 * before[name].abs()).all(), f"{name} keeps more than it did"
    for _ in range(3):
        one.trainer.step()
        sent = max(float(g.abs().max()) for g in one.trainer.gradients().values() if g is not None)
        assert sent < 100, f"{sent} comes of the step that was thrown away"


DROPPED: list[tuple[dict[str, Any], int]] = [
    ({}, 2),
    ({"codec": "int4"}, 2),
    ({"codec": "fp16"}, 2),
    ({"codec": "powersgd"}, 2),
    ({"codec": "topk", "density": 1.0}, 2),
    ({"codec": "none", "memory": "dgc"}, 2),
    ({"codec": "signum"}, 2),
    *(({"exchange": exchange, **arguments}, world) for exchange, arguments, world in EXCHANGES),
    *(
        ({"exchange": "hierarchical", "ranks_per_node": 2, "codec": codec, "within": within}, 4)
        for codec, within in [("int8", "twoshot"), ("marsit", "ring1"), ("none", "allreduce")]
    ),
]


@pytest.mark.many
@pytest.mark.parametrize("infinite", ["second.weight", "", "first.bias", "last.bias"])
@pytest.mark.parametrize(
    "arguments, world",
    DROPPED,
    ids=lambda a: str(a) if isinstance(a, int) else " ".join(map(str, a.values())) or "default",
)
def test_dropped(arguments: dict[str, Any], world: int, infinite: str) -> None:
    """infinite: the parameter, "": none, the program skips the step. A small one leaves slices of a
    group finite."""
    if infinite.endswith("bias"):
        if "exchange" not in arguments:
            pytest.skip("a group's payload is one, and not finite as a whole")
        arguments = {"groups": "model", **arguments}
    run(dropped, world, arguments, infinite)


# ---- the rest ---


@on_ranks(2)
def test_calls(rank: int, world: int) -> None:
    one = Run(rank)
    with pytest.raises(sidcomp.SetupError, match="after backward"):
        one.state.skip()
    one.trainer.step()
    size = one.state.stats()["state_bytes"]
    assert size > 0
    kept = residuals_of(one.state)
    one.state.update_scale(8.0)  # somebody scales, and may skip: two states from here on
    assert one.state.stats()["state_bytes"] == 2 * size
    assert_same(residuals_of(one.state), kept, "after the second state came")
    one.trainer.step()
    kept = residuals_of(one.state)
    one.backward(first__weight=1e5)
    one.state.update_scale(2.0)  # both states are rescaled
    one.state.skip()
    assert_same(residuals_of(one.state), {n: r / 4 for n, r in kept.items()}, "after skip")
    saved = one.state.state_dict()
    one.state.load_state_dict(saved)
    with pytest.raises(sidcomp.SetupError, match="load_state_dict"):
        one.state.skip()
    for forget in (lambda: one.state.load_state_dict(saved), one.state.engine.restart):
        one.trainer.step()  # which stays
        forget()
        with pytest.raises(sidcomp.SetupError, match="load_state_dict"):
            one.state.skip()
    one.trainer.step()
    with pytest.raises(sidcomp.ArgumentError, match="GradScaler"):
        one.state.follow(one.trainer.optimizer, 3)  # type: ignore[arg-type]
    with pytest.raises(sidcomp.ArgumentError, match="optimizer"):
        one.state.follow(None, torch.amp.GradScaler("cpu"))
    with pytest.raises(sidcomp.ArgumentError, match="nonfinite='keep'"):
        sidcomp.State(nonfinite="keep")


@pytest.mark.parametrize("nonfinite", [None, "drop"])
@on_ranks(2, group_timeout=20)
def test_a_scaler_on_one_rank_is_found(rank: int, world: int, nonfinite: str | None) -> None:
    """Else one rank would go back after a step that the others count."""
    one = Run(rank, codec="randk", nonfinite=nonfinite)
    one.state.follow(one.trainer.optimizer, torch.amp.GradScaler("cpu") if rank == 0 else None)
    with pytest.raises(RuntimeError, match=r"follows optimizers, scaler.*follows optimizers, clip"):
        one.trainer.step()


@on_ranks(2)
def test_a_step_that_failed(rank: int, world: int) -> None:
    """A step that fails on one rank while it encodes: what every rank keeps is as before it."""
    one = Run(rank, codec="topk", density=0.1, nonfinite="rollback")
    for _ in range(3):
        one.trainer.step()
    before = one.everything()
    form = one.state.engine.groups[-1].form

    class Fails:
        def __init__(self, plan: Any) -> None:
            self.plan = plan

        def __getattr__(self, name: str) -> Any:
            return getattr(self.plan, name)

        def encode(self, *_: Any, **__: Any) -> None:
            raise MemoryError("planted")

    if rank == 1:
        form.plan = Fails(form.plan)
    with pytest.raises(
        RuntimeError, match=r"MemoryError: planted$" if rank else "rank 1 failed in this step"
    ):
        one.backward()
    if rank == 1:
        form.plan = form.plan.plan
    after = one.everything()
    same: Callable[[str], bool] = lambda k: k.startswith(("residual", "header", "extra"))  # noqa: E731
    assert_same(
        {k: v for k, v in after.items() if same(k)}, {k: v for k, v in before.items() if same(k)}, "after"
    )
    for _ in range(2):
        one.trainer.step()
