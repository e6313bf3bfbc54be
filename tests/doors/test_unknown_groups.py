"""Process groups that torch.distributed does not know: rank, size and store are asked of them, and their
members change between steps."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from changing import Changing, Silent, native, shared_store
from harness import on_ranks, run
from local_training import KINDS, updates
from sidcomp import rank_states
from sidcomp.backend import process_group
from sidcomp.doors.ddp import register
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

TOPK: dict[str, Any] = {"codec": "topk", "density": 0.2}
COMPRESSED = {**TOPK, "min_bytes": 0}
# Who trains, in the order of their ranks, and for how many steps.
PHASES = [((0, 1), 6), ((0, 1, 2), 7), ((2, 0), 6), ((2, 0), 6)]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))


def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 12, generator=draw)
    return (module(x) - x[:, :3]).square().mean()


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


class Step:
    """What one rank saw: its own gradient, the average, and what it keeps before and after."""

    def __init__(self, module: nn.Module, kept: Callable[[], torch.Tensor | None]) -> None:
        self.module, self._kept = module, kept

    @contextlib.contextmanager
    def around(self, rank: int, step: int) -> Iterator[dict[str, Any]]:
        own = torch.autograd.grad(loss(self.module, rank, step), list(self.module.parameters()))
        seen: dict[str, Any] = {"own": flat(own), "before": self._kept()}
        yield seen
        seen["mean"], seen["after"] = flat(p.grad for p in self.module.parameters()), self._kept()


def residual(state: sidcomp.State | None, module: nn.Module) -> torch.Tensor | None:
    """In the order of the parameters, whatever they are called."""
    if state is None or not (saved := state.state_dict()["residuals"]):
        return None
    names = [name for name, _ in module.named_parameters()]
    by_name = {name: x.flatten() for name, x in saved.items()}
    return flat(by_name[name] for name in (names if names[0] in by_name else by_name))


def torchft_group() -> Any:
    from torchft.process_group import ProcessGroupGloo

    return ProcessGroupGloo(timeout=timedelta(seconds=30))


def configure(group: Any, store: Any, number: int, rank: int, size: int) -> None:
    """Gives it these members, in the way in which its kind takes them."""
    if isinstance(group.inner, Changing):
        group.configure(PrefixStore(str(number), store), rank, size)
        return
    address = f"127.0.0.1:{store.port}/{number}"
    if hasattr(group.inner, "configure"):  # older versions of torchft
        group.configure(address, str(rank), rank, size)
    else:
        from torchft.process_group import reconfigure_with_store

        reconfigure_with_store(group, address, rank, size)


def hooked(rank: int, world: int, make: Callable[[], Any]) -> Any:
    """A program that averages each gradient in a hook, over the group that compresses."""
    store, inner = shared_store(rank, world), make()
    group = process_group(inner, **COMPRESSED)
    module = network()
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: group.allreduce([p.grad], average()).wait() and None  # type: ignore[func-returns-value]
        )
    order = [name for name, _ in module.named_parameters()]

    def kept() -> torch.Tensor | None:
        states = [p.state for p in (*group.programs, *group._former["passes"]) if p.state is not None]
        assert len(states) <= 1
        if not states or not (saved := states[0].state_dict()["residuals"]):
            return None
        arrived = list(saved.values())  # in the order of the calls: that of the backward pass
        back = {name: x.flatten() for name, x in zip(ARRIVAL, arrived, strict=True)}
        return flat(back[name] for name in order)

    return phases(rank, store, group, module, lambda: lambda: loss(module, rank, STEP[0]), kept)


def ddp_hook(rank: int, world: int, codec: str, more: dict[str, Any]) -> Any:
    """DDP's hook over a group whose members change. DDP itself must neither meet the others when it is made,
    nor form its buckets anew."""
    store, inner = shared_store(rank, world), Changing()
    group = process_group(inner, "off")
    module, state = network(), sidcomp.State(codec, **more)

    def begin() -> Callable[[], torch.Tensor]:
        ddp = DistributedDataParallel(
            module, process_group=group, init_sync=False, find_unused_parameters=True
        )
        register(ddp, state)
        return lambda: loss(ddp, rank, STEP[0])

    out = phases(rank, store, group, module, begin, lambda: residual(state, module))
    state.close()
    return out


# In which order the gradients of the network become ready.
ARRIVAL = ["2.bias", "2.weight", "0.bias", "0.weight"]
STEP = [0]


def average() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
    return options


def phases(
    rank: int,
    store: Any,
    group: Any,
    module: nn.Module,
    begin: Callable[[], Callable[[], torch.Tensor]],
    kept: Callable[[], torch.Tensor | None],
) -> list[list[dict[str, Any]]]:
    """Trains with these members and those. begin: called once by each rank, as soon as it is a member. It
    returns what computes the loss."""
    sgd, out = torch.optim.SGD(module.parameters(), lr=0.05), []
    watch, forward = Step(module, kept), None
    for number, (members, steps) in enumerate(PHASES):
        seen = []
        for p in module.parameters():  # who joins takes over
            dist.broadcast(p.detach(), members[-1])
        if rank in members:
            configure(group, store, number, members.index(rank), len(members))
            forward = forward or begin()
            for _ in range(steps):
                sgd.zero_grad()
                with watch.around(rank, STEP[0]) as one:
                    forward().backward()
                sgd.step()
                STEP[0] += 1
                seen.append(one)
        dist.barrier()
        step = [STEP[0]]
        dist.broadcast_object_list(step, members[0])
        STEP[0] = step[0]
        out.append(seen)
    return out


def conserved(seen: list[list[list[dict[str, Any]]]], learning: int) -> None:
    """In each step the ranks' gradients and what they kept before are the averages and what they keep."""
    last: dict[int, Any] = {}
    for number, (members, steps) in enumerate(PHASES):
        compressed = 0
        for i in range(steps):
            each = [seen[r][number][i] for r in members]
            assert all(torch.equal(one["mean"], each[0]["mean"]) for one in each)
            for r, one in zip(members, each, strict=True):
                if one["before"] is not None or r in last:
                    assert torch.equal(one["before"], last[r]), (number, i, r)
                if one["after"] is not None:
                    last[r] = one["after"]
            zero = torch.zeros_like(each[0]["own"])
            come = sum(one["own"] + (zero if one["before"] is None else one["before"]) for one in each)
            gone = sum(zero if one["after"] is None else one["after"] for one in each)
            torch.testing.assert_close(come, len(members) * each[0]["mean"] + gone, rtol=1e-4, atol=1e-6)
            mean = sum(one["own"] for one in each) / len(members)
            compressed += not torch.allclose(mean, each[0]["mean"], rtol=1e-3, atol=1e-6)
        assert compressed == steps - learning, number


def test_residuals_outlive_a_change_of_members() -> None:
    conserved(run(hooked, 3, Changing), learning=2)


def test_torchft_s_own_group() -> None:
    pytest.importorskip("torchft.process_group", reason="needs torchft: pip install torchft-nightly")
    conserved(run(hooked, 3, torchft_group), learning=2)


def bereft(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The second of three ranks ends within a step. What each of the others keeps before that step and, with
    the members that are left, after it; and whether steps are compressed again."""
    store, inner = shared_store(rank, world), Changing()
    group = process_group(inner, **COMPRESSED)
    module = network()
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: group.allreduce([p.grad], average()).wait() and None)
    group.configure(PrefixStore("three", store), rank, 3)
    for step in range(6):
        loss(module, rank, step).backward()
    (state,) = (p.state for p in group.programs if p.state is not None)
    before = flat(state.state_dict()["residuals"].values())
    if rank == 1:
        os._exit(0)
    with pytest.raises(Exception, match=r"(?i)gloo|connection|rank"):
        loss(module, rank, 6).backward()
    group.configure(PrefixStore("two", store), rank // 2, 2)
    for step in range(7, 9):
        loss(module, rank, step).backward()
    after = flat(state.state_dict()["residuals"].values())
    steps = state.engine.step
    for step in range(9, 12):
        loss(module, rank, step).backward()
    return before, after, state.engine.step == steps + 3


def test_residuals_outlive_a_member_that_ends_within_a_step() -> None:
    left = run(bereft, 3, dying=[1])
    for before, after, again in (left[0], left[2]):
        assert torch.equal(before, after) and again


@pytest.mark.parametrize(
    ("codec", "more"),
    [("topk", {"density": 0.2}), ("topk", {"density": 0.2, "groups": "layer"}), ("powersgd", {"r": 1})],
)
def test_the_hook_follows_the_members(codec: str, more: dict[str, Any]) -> None:
    conserved(run(ddp_hook, 3, codec, more), learning=0)


# ---- the bits are those of a group that torch.distributed knows --------------------------------------------


def given_by_place(store: Any, rank: int, world: int, codec: str, **more: Any) -> dist.ProcessGroup:
    inner = Silent(native(PrefixStore("inner", store), rank, world))
    here = PrefixStore("ours", store)
    return process_group(inner, codec, place=lambda: (rank, world, here), **more)


def configured(store: Any, rank: int, world: int) -> Changing:
    group = Changing()
    group.configure(store, rank, world)
    return group


def by_hook(group: Any, rank: int) -> torch.Tensor:
    module = network()
    ddp = DistributedDataParallel(module, process_group=group)
    with sidcomp.State(**TOPK) as state:
        register(ddp, state)
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
        state.follow(sgd)
        for step in range(8):
            if step == 4:
                state.load_state_dict(state.state_dict())
            sgd.zero_grad()
            loss(ddp, rank, step).backward()
            sgd.step()
        return torch.cat([flat(module.parameters()), flat(state.state_dict()["residuals"].values())])


def by_backend(group: Any, rank: int) -> torch.Tensor:
    module = network()
    ddp = DistributedDataParallel(module, process_group=group)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(8):
        sgd.zero_grad()
        loss(ddp, rank, step).backward()
        sgd.step()
    assert sum(p.steps for p in group.programs) >= 4
    return flat(module.parameters())


DOORS: dict[str, tuple[Callable[[Any, int], torch.Tensor], dict[str, Callable[[Any, int, int], Any]]]] = {
    "hook": (
        by_hook,
        {
            "known": lambda store, rank, world: dist.group.WORLD,
            "unknown": native,
            "wrapped": lambda store, rank, world: process_group(configured(store, rank, world), "off"),
            "by place": lambda store, rank, world: given_by_place(store, rank, world, "off"),
        },
    ),
    "backend": (
        by_backend,
        {
            "known": lambda store, rank, world: process_group(dist.group.WORLD, **COMPRESSED),
            "unknown": lambda store, rank, world: process_group(native(store, rank, world), **COMPRESSED),
            "wrapped": lambda store, rank, world: process_group(configured(store, rank, world), **COMPRESSED),
            "by place": lambda store, rank, world: given_by_place(store, rank, world, **COMPRESSED),
        },
    ),
}


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_the_bits_are_those_of_a_known_group(rank: int, world: int, door: str) -> None:
    store = shared_store(rank, world)
    train, groups = DOORS[door]
    found = {kind: train(make(PrefixStore(kind, store), rank, world), rank) for kind, make in groups.items()}
    for kind, bits in found.items():
        assert torch.equal(bits, found["known"]), kind


# ---- what cannot work says so ------------------------------------------------------------------------------


REFUSED = {
    **dict.fromkeys(KINDS, "SetupError: ProcessGroup is .* give a deadline, and no process_group"),
    "auto": "UnsupportedError: .* name a codec and groups",
    "exchange": "UnsupportedError: .* leave exchange out",
    "place": "ArgumentError: place: .* leave it out",
    "other": "SetupError: .* give both the same process group",
    "silent": r"SetupError: Silent is .* give .*process_group\(group, place=",
    "not configured": "SetupError: Changing is .* configure it first",
    "rank": r"SetupError: place\(\) returned .* rank 2 of 2",
    "store": r"SetupError: place\(\) returned .* its store is None",
    "no tuple": r"SetupError: place\(\) returned 3: let it return \(rank, size, store\)",
    "managed": r"SetupError: .* Manager\(pg=.*process_group",
    "files": r"SetupError: .* save state.state_dict\(\) of each rank yourself",
}


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_what_cannot_work_says_what_to_do(rank: int, world: int) -> None:
    store = shared_store(rank, world)
    unknown = native(PrefixStore("a", store), rank, world)
    module = network()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    said: dict[str, str] = {}

    def note(what: str, call: Callable[[], Any]) -> None:
        try:
            call()
            said[what] = "nothing"
        except sidcomp.SidcompError as e:
            said[what] = f"{type(e).__name__}: {e}"

    def hook(group: Any, *codec: str, **more: Any) -> None:
        ddp = DistributedDataParallel(module, process_group=group)
        register(ddp, sidcomp.State(*codec, **more))

    for kind in KINDS:
        how = {"every": 2, "process_group": unknown}
        note(kind, lambda kind=kind, how=how: updates(kind, module, sgd, sidcomp.State(), **how))
    note("auto", lambda: hook(unknown, "auto"))
    note("exchange", lambda: hook(unknown, "topk", exchange="twoshot"))
    note("place", lambda: process_group(dist.group.WORLD, "int4", place=lambda: (0, 1, store)))
    note("other", lambda: hook(unknown, "int4", process_group=native(PrefixStore("b", store), rank, world)))
    silent = Silent(unknown)
    note("silent", lambda: process_group(silent, "int4").size())
    note("not configured", lambda: process_group(Changing(), "int4").size())
    for what, place in {"rank": (2, 2, store), "store": (rank, world, None), "no tuple": 3}.items():
        note(
            what,
            lambda place=place: process_group(silent, "int4", place=lambda: place).size(),
        )
    managed = Changing()
    managed._manager = None
    note("managed", lambda: process_group(managed, "int4"))
    state = sidcomp.State("int4")
    ddp = DistributedDataParallel(module, process_group=unknown)
    register(ddp, state)
    note("files", lambda: rank_states.agree_on_run(state))
    state.close()
    assert said.keys() == REFUSED.keys()
    for what, text in REFUSED.items():
        assert re.fullmatch(f"{text}.*", said[what], re.DOTALL), (what, said[what])


def met(rank: int, world: int, absent: bool) -> str:
    """What the first rank says if the second one is absent, or says that it is the first one too."""
    store = shared_store(rank, world)
    inner = native(store, rank, world, seconds=3)
    here = PrefixStore("ours", store)
    group = inner if absent else process_group(Silent(inner), "off", place=lambda: (0, world, here))
    said = "nothing"
    if not (absent and rank):
        ddp = DistributedDataParallel(network(), process_group=group, init_sync=False)
        try:
            register(ddp, sidcomp.State("int4"))
        except (sidcomp.SetupError, sidcomp.ExchangeError) as e:
            said = str(e)
    dist.barrier()
    return said


@pytest.mark.filterwarnings("ignore")
def test_an_absent_member_is_named() -> None:
    assert "rank 1 has not reached sidcomp.compress()" in run(met, 2, True)[0]


@pytest.mark.filterwarnings("ignore")
def test_two_members_of_one_rank_are_told() -> None:
    for said in run(met, 2, False):
        assert "two members of the process group say that they are rank 0 of 2" in said
