"""State(transport="native"): a DDP step over NCCL that sidcomp drives itself.

Here it is the fake one of tests/cuda, on the CPU emulation; test_emulated.py runs this file there.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import fake_nccl
import pytest
import sidcomp
import sidcomp.runtime.cuda_executor
import torch
import torch.distributed as dist
from emulated import EmulatedExecutor, emulate
from harness import on_ranks, run
from sidcomp import _core
from sidcomp.autotune.codec_benchmark import Candidate, Gradients
from sidcomp.autotune.exchange_benchmark import DeviceTravelling, Travelling
from sidcomp.config import exchange_choice
from sidcomp.config.exchange_choice import ExchangeChoice
from sidcomp.doors.ddp import register
from sidcomp.runtime import nccl
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.group import Group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

emulated = pytest.mark.skipif(
    _core.cuda_archs != "emulated" or not fake_nccl.can_build(), reason="needs the CPU emulation of CUDA"
)


@pytest.fixture(autouse=True)
def log(tmp_path: Path) -> Iterator[Path]:
    """Calls of the fake, of all ranks; the library is built before they start."""
    if fake_nccl.can_build():
        fake_nccl.build()
    yield tmp_path / "log"


def _limited(limit: timedelta, library: _core.Nccl, exchange: Exchange, *rest: Any) -> nccl.Native:
    exchange.timeout = limit
    return nccl.Native(library, exchange, *rest)


class Run:
    """A model with three buckets and its State on this rank."""

    def __init__(
        self, rank: int, log: str = "", lane: bool = True, limit: float | None = None, **arguments: Any
    ) -> None:
        """limit: of the communicator; the process group's own may be too short for a slow machine."""
        if limit is not None:
            sidcomp.runtime.cuda_executor.Native = partial(_limited, timedelta(seconds=limit))  # type: ignore[misc, assignment]
        os.environ["SIDCOMP_NCCL"] = str(fake_nccl.LIBRARY)
        os.environ["FAKE_NCCL_LOG"] = log
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 50), nn.Linear(50, 3))
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.008)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = sidcomp.State(**arguments)
        self.lane = emulate(self.state) if lane else None
        register(self.ddp, self.state)
        self.rng = torch.Generator().manual_seed(100 + rank)

    def step(self) -> None:
        x = torch.randn(8, 40, generator=self.rng)
        self.optimizer.zero_grad()
        (self.ddp(x) ** 2).sum().backward()
        self.optimizer.step()

    def groups(self) -> list[Group]:
        layout = self.state.engine.layout
        assert layout is not None
        return layout.groups

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def fails(self) -> tuple[str, str, float]:
        start = time.monotonic()
        try:
            self.step()
        except RuntimeError as e:
            return type(self.state.error).__name__, str(e), time.monotonic() - start
        return "", "nothing was raised", 0.0

    def close(self) -> None:
        self.state.close()
        del self.ddp


def no_collectives(*_: object, **__: object) -> Any:
    raise AssertionError("torch's collectives were asked")


def trained(
    rank: int, world: int, how: str, codec: str, log: str, exchange: str | None = None
) -> tuple[list[list[torch.Tensor]], int]:
    """The weights after each of four steps, and the groups of the last."""
    more: dict[str, Any] = {"hierarchical": {"ranks_per_node": 2}, "cascade": {"memory": "none"}}.get(
        exchange or "", {}
    )
    r = Run(
        rank, log, codec=codec, lane=how != "cpu", exchange=exchange,
        transport="native" if how == "native" else "torch", **more,
    )  # fmt: skip
    if how == "native":
        r.state.engine.exchange = None
        Exchange.all_gather = no_collectives  # type: ignore[method-assign]
        Exchange.all_reduce = no_collectives  # type: ignore[method-assign]
        dist.batch_isend_irecv = no_collectives
    out = []
    for _ in range(4):
        r.step()
        out.append(r.weights())
    stats = r.state.stats()
    assert stats["steps"] == 4 and all(g["steps"] for g in stats["groups"])
    r.close()
    return out, len(stats["groups"])


def same(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> None:
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True)), f"step {i}"


def same_over_nccl_and_torch(world: int, codec: str, log: Path, *exchange: str) -> tuple[list[str], int]:
    """The native transport's bits are those of torch's, and of the CPU. The calls that it made, and its
    groups."""
    ours = run(trained, world, "native", codec, str(log), *exchange)
    for other in ("torch", "cpu"):
        for (a, _), (b, _) in zip(ours, run(trained, world, other, codec, "", *exchange), strict=True):
            same(a, b)
    return [line.split()[0] for line in log.read_text().splitlines()], ours[0][1]


@emulated
@pytest.mark.parametrize(
    "codec, world",
    [("topk", 1), ("sidco-e", 3), ("int8", 2), ("marsit", 4), ("fp16", 2), ("none", 1), ("powersgd", 2)],
)
def test_the_same_bits_as_torch_and_as_the_cpu(codec: str, world: int, log: Path) -> None:
    """Linear codecs up to two ranks, of which a sum has one order only."""
    lines, groups = same_over_nccl_and_torch(world, codec, log)
    plan = _core.Plan(codec, "residual", 1000, "float32")
    # one group in the first step, then one a bucket
    kind = "average" if codec == "none" else "all-reduce" if plan.linear else "all-gather"
    assert lines.count(kind) == world * plan.reductions * (1 + 3 * groups)
    assert lines.count("finalize") == world and "abort" not in lines
    assert set(lines) == {"finalize", kind}


def averaged(rank: int, world: int, how: str, log: str) -> tuple[list[list[torch.Tensor]], list[str], int]:
    """Six steps of the codec none; in the fifth, rank 0 has a NaN. The weights before it, the parameters that
    are not finite in the end, and the number of groups."""
    if how == "torch":
        Exchange.averages = True  # type: ignore[method-assign, assignment]
    r = Run(
        rank, log, codec="none", lane=how != "cpu", checksum_every=2,
        transport="native" if how == "native" else "torch",
    )  # fmt: skip
    r.optimizer.param_groups[0]["lr"] = 1e-3
    out = []
    for i in range(6):
        if i == 4 and rank == 0:
            with torch.no_grad():
                r.model[3].bias[0] = float("nan")
        r.step()
        if i < 4:
            out.append(r.weights())
    nan = [name for name, p in r.model.named_parameters() if not p.isfinite().all()]
    assert all(g.direct and g.form.allocations == (how != "cpu") for g in r.groups())
    stats = r.state.stats()
    assert [g["count"] for g in stats["groups"]] == [g.n for g in r.groups()]
    r.close()
    return out, nan, len(stats["groups"])


@emulated
@pytest.mark.parametrize("world", [1, 2, 3])
def test_dense_groups_are_averaged_where_they_are(world: int, log: Path) -> None:
    """A dense group has no payload. torch divides, or NCCL that sidcomp calls, and no kernel of ours reads or
    writes the gradient."""
    want = run(averaged, world, "cpu", "")
    for how in ("native", "torch"):
        for (a, *rest), (b, *others) in zip(run(averaged, world, how, str(log)), want, strict=True):
            assert rest == others and rest[0]
            if world < 3:  # sums of three have several orders
                same(a, b)
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in zip(x, y, strict=True)), i
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [x[0] for x in lines].count("average") == world * (1 + 5 * want[0][2])


def special(
    rank: int, world: int, how: str, settings: dict[str, Any]
) -> tuple[list[list[torch.Tensor]], str, int]:
    """Steps of full precision and checksums; then rank 1 has wrong ones. What that raises, and when."""
    r = Run(
        rank,
        lane=how != "cpu",
        checksum_every=2,
        transport="native" if how == "native" else "torch",
        **settings,
    )
    r.optimizer.param_groups[0]["lr"] = 1e-3
    out = []
    for _ in range(8):
        r.step()
        out.append(r.weights())
    assert all(w.isfinite().all() for w in out[-1])
    error = ""
    if r.lane is not None:
        assert r.lane._spare, "no checksums came"
        if rank == 1:
            executor = r.lane
            executor._sum = lambda *_: executor._check.mine.fill_(7)  # type: ignore[method-assign]
        while not error and len(out) < 16:
            error, text, _ = r.fails()
            out.append([])
            assert not error or "rank 1 differ" in text, text
    r.close()
    return out[:8], error, len(out)


@emulated
@pytest.mark.parametrize(
    "ways, settings",
    [
        (("native", "torch"), {"codec": "dgc", "full_every": 3}),
        (("torch",), {"codec": "marsit", "exchange": "ring1", "full_every": 3}),
        (("native",), {"codec": "topk", "exchange": "twoshot"}),
        (("torch",), {"codec": "powersgd", "r": 2, "full_every": 3}),
    ],
)
def test_full_precision_and_checksums_on_the_device(
    ways: tuple[str, ...], settings: dict[str, Any], log: Path
) -> None:
    want = run(special, 2, "cpu", settings)
    for how in ways:
        got = run(special, 2, how, settings)
        for (a, _, _), (b, _, _) in zip(got, want, strict=True):
            same(a, b)
        # of the tenth step, gathered in the eleventh: in all ranks the twelfth fails
        assert [(error, steps) for _, error, steps in got] == [("DivergenceError", 12)] * 2


def nonfinite_steps(rank: int, world: int, how: str, settings: dict[str, Any]) -> list[list[torch.Tensor]]:
    """The third and sixth steps are not finite on the last rank; nobody takes them."""
    r = Run(rank, lane=how != "cpu", transport="native" if how == "native" else "torch", **settings)
    out = []
    for step in range(6):
        before = r.weights()
        weight = r.model[2].weight
        bad = step in (2, 5)
        hook = weight.register_hook(lambda g: g * torch.nan) if bad and rank == world - 1 else None
        r.step()
        assert all(w.isfinite().all() for w in r.weights()) == (not bad)
        if hook is not None:
            hook.remove()
        if bad:
            with torch.no_grad():
                for p, w in zip(r.model.parameters(), before, strict=True):
                    p.copy_(w)
        out.append(r.weights())
        if step > 3:
            r.state.engine.quiet()
            assert r.state.engine.counts() == (step != 5), "a flush would not be done again"
    r.close()
    return out


@emulated
@pytest.mark.parametrize(
    "how, settings",
    [
        ("native", {"codec": "topk", "groups": "layer"}),
        ("torch", {"codec": "int8", "groups": "layer", "full_every": 4}),
        ("torch", {"codec": "topk", "memory": "none", "groups": "layer"}),
        ("native", {"codec": "topk", "exchange": "twoshot", "groups": "layer"}),
        ("torch", {"codec": "topk", "exchange": "hierarchical", "ranks_per_node": 1, "groups": "layer"}),
        ("native", {"codec": "topk", "groups": "layer", "nonfinite": "rollback"}),
        ("torch", {"codec": "powersgd", "groups": "layer", "full_every": 2, "nonfinite": "rollback"}),
        ("native", {"codec": "topk", "exchange": "twoshot", "groups": "layer", "nonfinite": "rollback"}),
        ("torch", {"codec": "powersgd", "r": 3, "groups": "model"}),  # between rounds
        ("native", {"codec": "powersgd", "r": 3, "groups": "model"}),
    ],
    ids=str,
)
def test_a_step_thrown_away(how: str, settings: dict[str, Any], log: Path) -> None:
    """One group is not finite: the others forget, or go back to the state before it. As on the CPU."""
    got, want = run(nonfinite_steps, 2, how, settings), run(nonfinite_steps, 2, "cpu", settings)
    for a, b in zip(got, want, strict=True):
        same(a, b)


def interrupted(rank: int, world: int) -> None:
    """A group cannot be launched: those before it in the step forget."""
    r = Run(rank, codec="topk", groups="layer")
    for _ in range(3):
        r.step()
    lane = r.lane
    assert lane is not None
    launch, launched = lane._launch, []

    def failing(g: Group) -> None:
        if len(launched) == 2:
            raise ValueError("no more")
        launched.append(g)
        launch(g)

    lane._launch = failing  # type: ignore[method-assign]
    name, text, _ = r.fails()
    assert name == "ExchangeError" and "no more" in text, text
    lane._launch = launch  # type: ignore[method-assign]
    assert len(launched) == 2

    def owes(g: Group) -> torch.Tensor:
        out = torch.empty(g.n)
        g.plan.residual_out(g.state.ptr, out.data_ptr())
        return out

    sent = [owes(g) for g in launched]
    r.state.engine.quiet()
    for g, before in zip(launched, sent, strict=True):
        assert before.any() and not owes(g).any()
    r.close()


@emulated
def test_a_step_that_is_not_launched_to_its_end(log: Path) -> None:
    run(interrupted, 2)


@emulated
@pytest.mark.parametrize(
    "exchange, codec, world, sent",  # messages that a rank sends, and the last round's to each other one
    [
        ("ring1", "marsit", 1, 0),
        ("ring1", "marsit", 3, 4 + 2),
        ("torus1", "marsit", 4, 4 + 3),
        ("twoshot", "topk", 3, 2 * 2 + 2),
        ("twoshot", "onebit", 2, 2 * 1 + 1),
        ("hierarchical", "topk", 4, 1 + 1 + 1 + 3),  # scatter, the other node, gather
        ("expand", "signum", 3, 4 + 2),
        ("cascade", "qsgd", 2, 2 + 1),
    ],
)
def test_exchanges_in_messages(exchange: str, codec: str, world: int, sent: int, log: Path) -> None:
    lines, groups = same_over_nccl_and_torch(world, codec, log, exchange)
    assert lines.count("send") == world * sent * (1 + 3 * groups)
    assert set(lines) <= {"send", "finalize"} and lines.count("finalize") == world


class EmulatedTravelling(DeviceTravelling):
    def _place(self) -> dict[str, int]:
        return {"device": 0, "stream": 0}


def travelled(
    rank: int, world: int, codec: str, choice: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What three steps of a probe's exchange leave, on the device and on the CPU."""
    group = dist.group.WORLD
    assert group is not None
    exchange = Exchange(group, torch.device("cpu"))
    more = {"ranks_per_node": 1} if choice == "hierarchical" else {}
    candidate = Candidate(codec, choice=ExchangeChoice.parse([choice], more)[0])
    message_plan = candidate.message_plan(4 * 1999, torch.float32, (rank, world), None)
    source = Gradients(1999, message_plan.vectors, torch.float32, exchange.device, seed=rank)
    out = []
    for kind in (EmulatedTravelling, Travelling):
        one = kind(message_plan, source, exchange)
        out.append([])
        for _ in range(3):
            one.load()
            one.depart()
            one.travel()
            one.arrive()
            out[-1].append(one.vector.clone())
    exchange.close()
    return out[0], out[1]


@emulated
@pytest.mark.parametrize("codec, choice", [("topk", "twoshot"), ("int8", "hierarchical")])
def test_the_probes_exchanges_in_messages(codec: str, choice: str) -> None:
    results = run(travelled, 2, codec, choice)
    for device, host in results:
        assert all(torch.equal(a, b) for a, b in zip(device, host, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(device, results[0][0], strict=True))


def planned(rank: int, world: int, codec: str, exchange: str) -> tuple[str, list[torch.Tensor]]:
    """Groups that are found by measuring; until they are."""
    r = Run(rank, codec=codec, exchange=exchange, groups="auto")
    r.optimizer.param_groups[0]["lr"] = 1e-4
    stage = ""
    for _ in range(400):
        r.step()
        stage = r.state.plan_report()["stage"]
        if stage == "settled":
            break
    assert r.lane is not None and all(g.in_messages for g in r.groups())
    out = stage, r.weights()
    assert all(w.isfinite().all() for w in out[1])
    r.close()
    return out


@emulated
@pytest.mark.parametrize("codec, exchange", [("topk", "twoshot"), ("signsgd", "ring1")])
def test_groups_planned_for_messages(codec: str, exchange: str) -> None:
    (stage, weights), *others = run(planned, 2, codec, exchange)
    assert stage == "settled"
    for theirs, other in others:
        assert theirs == stage and all(torch.equal(a, b) for a, b in zip(weights, other, strict=True))


# ---- faults ------------------------------------------------------------------------------------


def broken(
    rank: int, world: int, fault: str, at: str, steps: int, log: str, limit: float = 3.0, exchange: str = ""
) -> tuple[str, str, float, str]:
    """What the step after so many raises, how soon, and what the one after it says. Rank 1 has the fault."""
    if rank == 1:
        os.environ[f"FAKE_NCCL_{fault}"] = at
    codec = "marsit" if exchange else "topk"
    r = Run(
        rank, log, limit=limit, codec=codec, exchange=exchange or None, groups="model", transport="native"
    )
    for _ in range(steps):
        r.step()
    first = r.fails()
    again = r.fails()
    r.close()
    return (*first, again[1])


@emulated
@pytest.mark.parametrize("fault", ["HANG", "DIE", "ERROR"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_fails(fault: str, world: int, log: Path) -> None:
    dying = (1,) if fault == "DIE" else ()
    out = run(broken, world, fault, "3", 3, str(log), dying=dying)
    told = [x for r, x in enumerate(out) if r not in dying]
    for r, (name, text, took, again) in ((r, x) for r, x in enumerate(out) if r not in dying):
        if fault == "ERROR" and r != 1:  # it got all it needed, and its next step finds that rank 1 has left
            continue
        assert name == "ExchangeError" and took < 20, (r, name, text)
        assert "group 0 (" in text and f"NCCL, rank {r} of {world}: all-gather: " in text, text
        assert "NCCL, rank" in again, again
    aborts = log.read_text().count("abort")
    assert aborts == len(told), "each rank that is left aborts, once"


@emulated
@pytest.mark.parametrize("fault", ["HANG", "DIE"])
def test_a_rank_that_fails_between_messages(fault: str, log: Path) -> None:
    """In the first step, in a ring's third call of five."""
    dying = (1,) if fault == "DIE" else ()
    out = run(broken, 3, fault, "2", 0, str(log), 3.0, "ring1", dying=dying)
    for r, x in enumerate(out):
        if r not in dying:
            assert x[0] == "ExchangeError" and "group 0 (" in x[1], x
            assert f"NCCL, rank {r} of 3: sending and receiving: " in x[1], x


def changed(rank: int, world: int, exchange: str, codec: str) -> tuple[str, str]:
    """Rank 1 gets a changed byte in the first message of a step."""
    r = Run(rank, codec=codec, exchange=exchange, groups="model")
    r.step()
    real, left = dist.batch_isend_irecv, [rank == 1]

    def corrupting(ops: list[dist.P2POp]) -> list[dist.Work]:
        works = real(ops)
        for work in works:
            work.wait()
        if left[0]:
            ops[0].tensor[40] ^= 2
            left[0] = False
        return []

    dist.batch_isend_irecv = corrupting
    for _ in range(2):
        name, text, _ = r.fails()
        assert not name, f"a rank is ahead of the others: {text}"
    name, text, _ = r.fails()
    r.step()
    r.close()
    return name, text


@emulated
@pytest.mark.parametrize(
    "exchange, codec", [("ring1", "marsit"), ("twoshot", "topk"), ("hierarchical", "int8")]
)
def test_a_message_that_is_changed(exchange: str, codec: str) -> None:
    """All ranks learn of it two steps later. The step after that is whole."""
    for name, text in run(changed, 3, exchange, codec):
        assert name == "CorruptPayloadError" and "in an earlier step" in text, (name, text)


@emulated
def test_a_rank_that_does_not_join(log: Path) -> None:
    for r, (name, text, took, _) in enumerate(run(broken, 2, "JOIN", "hang", 0, str(log), 1.5)):
        assert name == "ExchangeError" and took < 20, (name, text)
        assert f"NCCL, rank {r} of 2: joining: not done within 1500 ms" in text, text


class Hung:
    """In place of a group on a device that does not get to the group's step."""

    def step(self, *_: Any, **__: Any) -> None: ...


def watched(rank: int, world: int, how: str, log: str) -> tuple[str, str]:
    if how == "later" and rank == 0:
        os.environ["FAKE_NCCL_LATER"] = "1"
    r = Run(rank, log, limit=2, codec="topk", groups="model", transport="native", nonfinite="rollback")
    r.step()
    r.step()
    assert r.lane is not None and r.lane.native is not None
    resident = r.groups()[0].resident
    places = resident.places
    if how in ("stuck", "repeated"):
        if how == "repeated":
            r.state.skip()
        resident.places = dict.fromkeys(places, Hung())
        r.step()
    r.lane.native._thread.join(20)
    resident.places = places
    assert not r.lane.native._thread.is_alive(), "the watch goes on"
    assert "abort" in Path(log).read_text()
    name, text, _ = r.fails()
    r.close()
    return name, text


@emulated
@pytest.mark.parametrize(
    "how, words",
    [
        ("later", "while exchanging: remote error"),
        ("stuck", "the device has made no progress for 2 s: a rank has ended"),
        ("repeated", "the device has made no progress for 2 s: a rank has ended"),
    ],
)
def test_what_goes_wrong_on_the_device(how: str, words: str, log: Path) -> None:
    """No call tells: the thread that watches finds it, aborts, and the next step says so. It also finds it in
    a step that is repeated because it was discarded."""
    world = 1 if how == "later" else 2
    for r, (name, text) in enumerate(run(watched, world, how, str(log))):
        assert name == "ExchangeError" and f"NCCL, rank {r} of {world}: {words}" in text, (name, text)


@emulated
@on_ranks(2)
def test_idleness_is_no_fault(rank: int, world: int) -> None:
    """A rank that does nothing for longer than the limit is not stuck."""
    r = Run(rank, limit=2, codec="topk", transport="native")
    r.step()
    time.sleep(3)
    r.step()
    good = r.lane is not None and r.lane.native is not None and r.lane.native._thread.is_alive()
    r.close()
    assert good


def dropped(rank: int, world: int, log: str) -> None:
    r = Run(rank, log, codec="topk", transport="native")
    r.step()
    thread = r.lane.native._thread if r.lane is not None and r.lane.native is not None else None
    assert thread is not None
    del r
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@emulated
def test_a_state_that_nobody_closes(log: Path) -> None:
    run(dropped, 2, str(log))
    assert log.read_text().count("abort") == 2


# ---- what is refused ---------------------------------------------------------------------------


def refused(rank: int, world: int, how: str) -> tuple[str, str]:
    arguments: dict[str, Any] = {"transport": "native"}
    if how == "one has torch" and rank == 1:
        arguments = {}
    if how == "no kernels":
        arguments = {"exchange": "twoshot"}
        known = exchange_choice.find_exchange
        exchange_choice.find_exchange = lambda name: replace(known(name), cuda=False)
    r = Run(rank, lane=how != "cpu", **({"codec": "topk"} | arguments))
    if how == "no library" and rank == 1:
        os.environ["SIDCOMP_NCCL"] = "/no/libnccl.so.2"
    if how == "old library":
        os.environ["FAKE_NCCL_VERSION"] = "21212"
    name, text, _ = r.fails()
    r.close()
    return name, text


WITH_KERNELS = "these have: allreduce, allgather, ring1, torus1, twoshot, hierarchical, cascade, expand"
REFUSED = {
    "cpu": ("UnsupportedError", "transport='native' is NCCL, which is for CUDA"),
    "old library": ("UnsupportedError", "is NCCL 21212: 2.14 (21400) or later is needed"),
    "no kernels": ("UnsupportedError", "exchange='twoshot' has no CUDA kernels", WITH_KERNELS),
    "one has torch": ("RankError", "transport native", "transport torch"),
}


@pytest.mark.parametrize("how", ["cpu", *(pytest.param(x, marks=emulated) for x in [*REFUSED][1:])])
def test_what_is_refused_on_all_ranks(how: str) -> None:
    error, *words = REFUSED[how]
    for name, text in run(refused, 2, how):
        assert name == error and all(x in text for x in words), text


@emulated
def test_without_a_library() -> None:
    (name0, text0), (name1, text1) = run(refused, 2, "no library")
    assert name1 == "UnsupportedError", text1
    assert "NCCL cannot be loaded: /no/libnccl.so.2" in text1 and "SIDCOMP_NCCL" in text1
    assert name0 == "RankError" and "rank 1 could not form its groups" in text0 and "/no/libnccl" in text0


def test_names() -> None:
    with pytest.raises(sidcomp.ArgumentError, match="transport='nccl': choose one of torch, native"):
        sidcomp.State("topk", transport="nccl")


# ---- finding the library -----------------------------------------------------------------------

FIND = """
import ctypes, os, sys
library, folder, sys.path[:0] = sys.argv[1], sys.argv[2], sys.argv[3:]
from sidcomp.runtime.nccl import find_library
print(find_library())
sys.path.append(folder)
print(find_library())
ctypes.CDLL(library)
print(find_library())
os.environ["SIDCOMP_NCCL"] = "/here/it.is"
print(find_library())
"""


@pytest.mark.skipif(not fake_nccl.can_build() or sys.platform != "linux", reason="written for Linux")
def test_where_the_library_is(tmp_path: Path) -> None:
    """The wheel's, the one that is loaded, the one that is named: each before those before."""
    library, wheel = fake_nccl.build(), tmp_path / "nvidia" / "nccl" / "lib"
    wheel.mkdir(parents=True)
    (wheel / "libnccl.so.2").symlink_to(library)
    done = subprocess.run(
        [sys.executable, "-c", FIND, str(library), str(tmp_path), *sys.path],
        env={k: v for k, v in os.environ.items() if k != "SIDCOMP_NCCL"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *rest = done.stdout.split()
    assert "fake" not in first and rest == [str(wheel / "libnccl.so.2"), str(library), "/here/it.is"]


# ---- what gpu-check does -----------------------------------------------------------------------


@emulated
def test_ranks_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/one_gpu.py, with the emulation in the GPU's place."""
    monkeypatch.syspath_prepend(str(fake_nccl.ROOT))
    from benchmarks import one_gpu

    monkeypatch.setenv("SIDCOMP_NCCL", str(fake_nccl.LIBRARY))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    rows = list(one_gpu.check(2, steps=1))
    assert [row["what"] for row in rows] == [f"{codec}, 2 ranks" for codec in one_gpu.CODECS]
    assert all(row["wrong"] == "" and row["torch us"] > 0 and row["native us"] > 0 for row in rows)
    one = {"weights": "a", "host us": 1.0, "sums": False, "allocations": 0}

    def wrong(*ranks: dict[str, object]) -> str:
        """What differs between ranks. ranks: what differs from `one` over the native transport."""
        told = [{"codec": "c", "transports": {"torch": one, "native": one | other}} for other in ranks]
        return str(one_gpu.compare(told)["wrong"])

    assert wrong({}, {}) == ""
    assert "the ranks have different weights over native" in wrong({}, {"weights": "b"})
    assert wrong({"weights": "b"}, {"weights": "b"}) == "the transports give different weights"
    assert "3 allocations over native" in wrong({"allocations": 3}, {})
    one["sums"] = True
    assert wrong(*[{"weights": "b"}] * 3) == "" and wrong(*[{"weights": "b"}] * 2)
    monkeypatch.setenv("FAKE_NCCL_JOIN", "fail")
    (row,) = one_gpu.check(1, steps=1)
    assert "rank 0 ended with 1" in row["wrong"]


# ---- the limit ---------------------------------------------------------------------------------


def test_limit_is_the_process_groups() -> None:
    assert all(run(_timeout, 2, group_timeout=77.0))


def _timeout(rank: int, world: int) -> bool:
    group = dist.group.WORLD
    assert group is not None
    exchange = Exchange(group, torch.device("cpu"))
    good = exchange.timeout is not None and exchange.timeout.total_seconds() == 77
    exchange.close()
    return good


@emulated
@on_ranks(1)
def test_a_state_that_is_dropped_keeps_its_pinned_memory_until_the_device_is_done(
    rank: int, world: int
) -> None:
    """Drops a State without close()."""
    shown: list[weakref.ref[torch.Tensor]] = []
    waited: list[list[bool]] = []

    def waiting(executor: EmulatedExecutor) -> Callable[[], object]:
        return lambda: waited.append([x() is not None for x in shown])

    EmulatedExecutor._waiting = waiting  # type: ignore[method-assign]
    run = Run(rank)
    run.step()
    assert run.lane is not None
    shown += [weakref.ref(x) for x in run.lane._kept]
    lane = weakref.ref(run.lane)
    del run
    gc.collect()
    assert lane() is None
    assert all(x() is None for x in shown)
    assert len(waited) == 1 and waited[0] and all(waited[0])
