"""Exchanges of messages through DDP: the bits of the loopback, in all modes, in any order of arrival, over
resumes, and when something fails on the way."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import re
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import sidcomp
import torch
import torch.distributed as dist
from cases import CASES, Case, Trainer, bits, square
from common import flat, groups_of, make_state, residuals_of, shaped
from harness import run
from sidcomp import Loopback, _core
from sidcomp.config.exchange_choice import MessagePlan
from torch import nn

Settings = dict[str, Any]
RING: Settings = {"codec": "marsit", "exchange": "ring1", "eta_s": 0.01}
TORUS: Settings = {"codec": "marsit", "exchange": "torus1", "eta_s": 0.01}
TWOSHOT: Settings = {"codec": "topk", "exchange": "twoshot", "density": 0.1}
BYTES: Settings = {"codec": "int8", "exchange": "twoshot"}
NODES: Settings = {"codec": "topk", "exchange": "hierarchical", "ranks_per_node": 2, "density": 0.1}
COUNTS: Settings = {"codec": "signum", "exchange": "expand"}
CASCADE: Settings = {"codec": "qsgd", "exchange": "cascade"}
ALL = {
    "ring1": RING,
    "torus1": TORUS,
    "twoshot": TWOSHOT,
    "twoshot-int8": BYTES,
    "hierarchical": NODES,
    "hierarchical-twoshot": {**NODES, "within": "twoshot"},
    "hierarchical-fp16": {**NODES, "codec": "fp16", "density": None},
    "expand": COUNTS,
    "cascade": CASCADE,
}
ALL = {k: {a: b for a, b in v.items() if b is not None} for k, v in ALL.items()}


# ---- the loopback's bits -----------------------------------------------------------------------------------


class Judge:
    """The loopback in place of the network: every rank's own gradient and memory go in."""

    def __init__(self, world: int, settings: Settings) -> None:
        self.world, self.settings = world, settings
        self.steps = 0

    def exchange(
        self, groups: list[dict[str, Any]], parameters: dict[str, nn.Parameter], kept: dict[str, Any]
    ) -> None:
        for number, names in enumerate([list(map(str, g["names"])) for g in groups]):
            own = [flat(parameters[name].grad, parameters[name]) for name in names]  # type: ignore[arg-type]
            gradient = torch.cat(own)
            dtype = str(gradient.dtype).removeprefix("torch.")
            loop = Loopback(self.world, n=len(gradient), group=number, dtype=dtype, **self.settings)
            mine = (
                np.concatenate([kept[name] for name in names], axis=1)
                if kept.get(names[0]) is not None
                else None
            )
            everyone: list[Any] = [None] * self.world
            dist.all_gather_object(everyone, (gradient, mine))
            for r, (_, residual) in enumerate(everyone):
                if residual is not None and loop.ranks[r].vectors:
                    loop.set_residual(r, np.ascontiguousarray(residual))
            loop.step_number = self.steps
            mean = loop.step([g for g, _ in everyone])
            at = 0
            for name in names:
                p = parameters[name]
                p.grad = shaped(mean[at : at + p.numel()], p)
                at += p.numel()
        self.steps += 1


def kept_by(state: sidcomp.State) -> dict[str, Any]:
    return {name: r.numpy() for name, r in state.state_dict()["residuals"].items()}


def follow(rank: int, world: int, groups: str | int, name: str, settings: Settings) -> list[Any]:
    ours, slow = (Trainer(CASES[name], rank, ddp=ddp) for ddp in (True, False))
    state = make_state(groups, ours.module, **settings)
    sidcomp.register(ours.wrapper, state)
    judge = Judge(world, settings)
    seen: list[Any] = []
    formed: list[Any] = []
    before: dict[str, Any] = {}
    for step in range(5):
        # DDP forms its buckets anew behind the first step (static: two); what is kept then moves with its
        # parameters, and the slices with the groups: what a rank keeps before such a step is needed elsewhere
        settled = state.state_dict()["settled"] if step else False
        before.clear()
        before.update(kept_by(state) if step else {})
        formed.clear()
        ours.step(lambda kind: formed.append(groups_of(state)) if kind == "sync" else None)
        if not settled:
            judge.steps += len(formed)
            slow.step(lambda kind: None)
            slow.module.load_state_dict(ours.module.state_dict())
            slow.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
            continue
        slow.step(
            lambda kind: judge.exchange(formed.pop(0), dict(slow.named()), before) if kind == "sync" else None
        )
        wanted = slow.gradients()
        for parameter, got in ours.gradients().items():
            assert bits(got) == bits(wanted[parameter]), (
                f"step {step}, {parameter}: {got} {wanted[parameter]}"
            )
        seen.append(step)
    assert len(seen) >= 2
    out = [bits(g) for g in ours.gradients().values()]
    ours.close()
    state.close()
    return out


@pytest.mark.parametrize("world", [2, 4, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ALL)
def test_gives_the_bits_of_the_loopback(name: str, world: int) -> None:
    if world % 2 and "hierarchical" in name:
        pytest.skip("two ranks a node")
    results = run(follow, world, "bucket", "cap-small", ALL[name])
    assert all(r == results[0] for r in results)


@pytest.mark.parametrize("case", ["static", "no-sync", "channels-last", "shapes", "mixed", "unused-none"])
@pytest.mark.parametrize("name", ["ring1", "twoshot"])
def test_in_ddps_other_modes(name: str, case: str) -> None:
    results = run(follow, 2, "bucket", case, ALL[name])
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 5, 8])
@pytest.mark.parametrize("groups", ["layer", "model", 700])
@pytest.mark.parametrize("name", [n for n in ALL if "hierarchical" not in n])
def test_at_other_sizes(name: str, groups: str | int, world: int) -> None:
    results = run(follow, world, groups, "cap-small", ALL[name])
    assert all(r == results[0] for r in results)


def test_one_rank_needs_nobody() -> None:
    run(follow, 1, "bucket", "cap-small", RING)


# ---- full precision ----------------------------------------------------------------------------------------


def periodic(rank: int, world: int, exchange: str) -> list[Any]:
    """Marsit's K: in steps 0, K, ... the mean of gradient and compensation, and then no compensation."""
    trainer, slow = (Trainer(CASES["default"], rank, ddp=ddp) for ddp in (True, False))
    state = make_state("model", trainer.module, codec="marsit", exchange=exchange, K=3, eta_s=0.01)
    sidcomp.register(trainer.wrapper, state)
    for step in range(8):
        kept = residuals_of(state) if step else {}
        slow.module.load_state_dict(trainer.module.state_dict())
        slow.step()
        own = slow.gradients()
        trainer.step()
        got = trainer.gradients()
        after = residuals_of(state)
        for name, p in trainer.named():
            g = got[name]
            assert g is not None and own[name] is not None
            if step % 3:
                assert torch.allclose(g.abs(), torch.full_like(g, 0.01), rtol=1e-6), (step, name)
                continue
            mine = flat(own[name], p) + kept.get(name, torch.zeros(p.numel()))  # type: ignore[arg-type]
            dist.all_reduce(mine)
            assert torch.allclose(flat(g, p), mine / world, atol=1e-6), (step, name)
            assert not after[name].any(), (step, name)
    out = [bits(p) for _, p in trainer.named()]
    trainer.close()
    state.close()
    return out


@pytest.mark.parametrize("exchange", ["ring1", "torus1"])
def test_steps_of_full_precision(exchange: str) -> None:
    results = run(periodic, 3, exchange)
    assert all(r == results[0] for r in results)


# ---- order -------------------------------------------------------------------------------------------------

MANY = Case(
    lambda: nn.Sequential(*(m for i in range(8) for m in (nn.Linear(12 + i, 13 + i), nn.Tanh()))),
    square,
    ddp={"bucket_cap_mb": 1e-6},
)


def dawdle(rank: int, world: int, settings: Settings, steps: int, slowly: bool) -> list[Any]:
    """Every rank is late at other places; the groups are many and small."""
    sleep = random.Random(rank)
    if slowly:
        original = MessagePlan.advance

        def late(*args: Any, **named: Any) -> Any:
            time.sleep(sleep.choice([0, 0, 0, 0, 0.0005, 0.003]))
            return original(*args, **named)

        MessagePlan.advance = late  # type: ignore[method-assign]
    trainer = Trainer(MANY, rank)
    state = make_state("layer", trainer.module, checksum_every=7, **settings)
    sidcomp.register(trainer.wrapper, state)
    for _ in range(steps):
        trainer.step()
    assert len(groups_of(state)) == 16
    out = [bits(p) for _, p in trainer.named()]
    trainer.close()
    state.close()
    return out


@pytest.mark.parametrize(
    ("name", "world", "steps"),
    [
        ("torus1", 4, 25),
        ("twoshot", 3, 25),
        *(
            pytest.param(name, world, 1000, marks=pytest.mark.slow)
            for name, world in [
                ("ring1", 2),
                ("torus1", 4),
                ("twoshot", 3),
                ("hierarchical", 8),
                ("ring1", 8),
            ]
        ),
    ],
)
def test_the_order_of_arrival_does_not_matter(name: str, world: int, steps: int) -> None:
    quick = run(dawdle, world, ALL[name], steps, False, hard_limit=900)
    late = run(dawdle, world, ALL[name], steps, True, hard_limit=900)
    assert all(r == quick[0] for r in [*quick, *late])


# ---- what is kept ------------------------------------------------------------------------------------------


def resume(rank: int, world: int, settings: Settings, stop: int) -> list[Any]:
    """Six steps, or `stop` of them, then a new State from the old one's state."""
    trainer = Trainer(CASES["cap-small"], rank)
    state = make_state("bucket", trainer.module, **settings)
    sidcomp.register(trainer.wrapper, state)
    for step in range(6):
        if step == stop:
            saved = state.state_dict()
            state.close()
            old, trainer = trainer, Trainer(CASES["cap-small"], rank)
            trainer.steps = old.steps
            trainer.module.load_state_dict(old.module.state_dict())
            trainer.optimizer.load_state_dict(old.optimizer.state_dict())
            old.close()
            state = make_state("bucket", trainer.module, **settings)
            state.load_state_dict(saved)
            sidcomp.register(trainer.wrapper, state)
        trainer.step()
    out = [bits(p) for _, p in trainer.named()]
    trainer.close()
    state.close()
    return out


@pytest.mark.parametrize("name", ["ring1", "twoshot", "hierarchical", "hierarchical-twoshot"])
def test_resumes_bit_for_bit(name: str) -> None:
    whole, parts = run(resume, 4, ALL[name], -1), run(resume, 4, ALL[name], 4)
    assert all(r == whole[0] for r in [*whole, *parts])


def owed(state: sidcomp.State, world: int, parameters: list[str]) -> dict[str, Any]:
    """What the ranks together still owe the mean, of each parameter: their own, and what is kept for all."""
    saved = state.state_dict()
    out = {}
    for name in parameters:
        kept = saved["residuals"][name].double()
        mine = kept[0] * saved["shared"].get(name, [1])[0] / world
        if len(kept) > 1:
            mine = mine + kept[1]
        dist.all_reduce(mine)
        out[name] = mine.numpy()
    return out


def switch(rank: int, world: int, first: Settings, second: Settings) -> None:
    trainer = Trainer(CASES["cap-small"], rank)
    state = make_state("bucket", trainer.module, **first)
    sidcomp.register(trainer.wrapper, state)
    for _ in range(4):
        trainer.step()
    names = [name for name, _ in trainer.named()]
    before, saved = owed(state, world, names), state.state_dict()
    state.close()
    other = make_state("bucket", trainer.module, **second)
    other.load_state_dict(saved)
    wrapper = nn.parallel.DistributedDataParallel(trainer.module, bucket_cap_mb=0.001)
    sidcomp.register(wrapper, other)
    put_in: dict[str, Any] = {}
    twin = Trainer(CASES["cap-small"], rank, ddp=False)
    twin.module.load_state_dict(trainer.module.state_dict())
    twin.steps = trainer.steps
    twin.step()
    trainer.wrapper = wrapper
    trainer.step()
    after = owed(other, world, names)
    for name, p in trainer.named():
        g = twin.gradients()[name]
        assert g is not None and p.grad is not None
        put_in[name] = flat(g, p).double()
        dist.all_reduce(put_in[name])
        total = before[name] + put_in[name].numpy() / world
        np.testing.assert_allclose(flat(p.grad, p).double().numpy() + after[name], total, atol=1e-5)
    trainer.close()
    other.close()


PLAIN: Settings = {"codec": "topk", "density": 0.1}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PLAIN, TWOSHOT),
        (TWOSHOT, PLAIN),
        (PLAIN, NODES),
        (NODES, PLAIN),
        (TWOSHOT, {**NODES, "within": "twoshot"}),
        ({**NODES, "within": "twoshot"}, PLAIN),
        ({**NODES, "within": "twoshot"}, TWOSHOT),
        (NODES, {**NODES, "ranks_per_node": 4}),
    ],
)
def test_nothing_is_lost_when_the_exchange_changes(first: Settings, second: Settings) -> None:
    run(switch, 4, first, second)


def save(rank: int, world: int, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    trainer = Trainer(CASES["cap-small"], rank)
    state = make_state("bucket", trainer.module, **settings)
    sidcomp.register(trainer.wrapper, state)
    for _ in range(4):
        trainer.step()
    out = state.state_dict(), owed(state, world, [name for name, _ in trainer.named()])
    trainer.close()
    state.close()
    return out


def load(
    rank: int, world: int, settings: Settings, states: list[dict[str, Any]], redistribute: str
) -> dict[str, Any]:
    """What is owed after a step, less what that step's gradients brought, plus what came out."""
    trainer, twin = (Trainer(CASES["cap-small"], rank, ddp=ddp) for ddp in (True, False))
    state = make_state("bucket", trainer.module, **settings)
    state.load_state_dict(states, redistribute=redistribute)
    sidcomp.register(trainer.wrapper, state)
    trainer.step()
    twin.step()
    out = owed(state, world, [name for name, _ in trainer.named()])
    for name, p in trainer.named():
        g = twin.gradients()[name]
        assert g is not None and p.grad is not None
        put_in = flat(g, p).double()
        dist.all_reduce(put_in)
        out[name] = out[name] + flat(p.grad, p).double().numpy() - put_in.numpy() / world
    trainer.close()
    state.close()
    return out


@pytest.mark.parametrize("redistribute", ["sum", "mean"])
@pytest.mark.parametrize("name", ["twoshot", "hierarchical", "hierarchical-twoshot"])
def test_another_world_size_owes_the_same(name: str, redistribute: str) -> None:
    """mean: what is added to the averaged gradient stays; sum: what the ranks owe together."""
    old = run(save, 4, ALL[name])
    new = run(load, 2, ALL[name], [s for s, _ in old], redistribute)
    for parameter, before in old[0][1].items():
        weight = 1.0 if redistribute == "mean" else 2.0
        np.testing.assert_allclose(new[0][parameter], weight * before, atol=1e-5)


def nonfinite_group(rank: int, world: int, settings: Settings) -> None:
    """One group is not finite: it owes what it did. The others forget, of the ranks and for all."""
    trainer = Trainer(CASES["cap-small"], rank)
    state = make_state("layer", trainer.module, **settings)
    sidcomp.register(trainer.wrapper, state)
    for _ in range(4):
        trainer.step()
    names = [name for name, _ in trainer.named()]
    before = owed(state, world, names)
    assert all(b.any() for b in before.values())
    if rank == 0:
        dict(trainer.named())[names[0]].register_hook(lambda g: torch.full_like(g, torch.nan))
    trainer.step()
    after = owed(state, world, names)
    for name in names:
        expected = before[name] if name == names[0] else np.zeros_like(before[name])
        np.testing.assert_allclose(after[name], expected, atol=1e-5, err_msg=name)
    trainer.close()
    state.close()


@pytest.mark.parametrize("name", ["twoshot", "hierarchical-twoshot"])
def test_what_a_nonfinite_step_leaves(name: str) -> None:
    run(nonfinite_group, 2, ALL[name])


# ---- faults ------------------------------------------------------------------------------------------------


def nan_once(rank: int, world: int, settings: Settings) -> list[Any]:
    """NaN on one rank in the fourth step: all ranks get what is not finite, and keep nothing of it."""
    trainer = Trainer(CASES["default"], rank)
    state = make_state("model", trainer.module, **settings)
    sidcomp.register(trainer.wrapper, state)
    seen = []
    for step in range(6):
        before = residuals_of(state) if step else {}
        if step == 3 and rank == world - 1:
            weight = next(p for _, p in trainer.named())
            hook = weight.register_hook(lambda g: torch.full_like(g, torch.nan))
        parameters = [p.detach().clone() for p in trainer.module.parameters()]
        trainer.step()
        seen.append(all(bool(torch.isfinite(g).all()) for g in trainer.gradients().values() if g is not None))
        if step != 3:
            continue
        if rank == world - 1:
            hook.remove()
        for name, kept in residuals_of(state).items():
            assert torch.isfinite(kept).all()
            if settings["exchange"] != "hierarchical":
                slack = 1e-5 * (1 + float(before[name].abs().max()))
                assert torch.allclose(kept, before[name], rtol=0, atol=slack), name
        with torch.no_grad():  # what GradScaler would have done: no step
            for p, old in zip(trainer.module.parameters(), parameters, strict=True):
                p.copy_(old)
            trainer.optimizer.state.clear()
    assert seen == [True, True, True, False, True, True]
    out = [bits(p) for _, p in trainer.named()]
    trainer.close()
    state.close()
    return out


@pytest.mark.parametrize("name", ["ring1", "twoshot", "hierarchical"])
def test_nan_on_one_rank(name: str) -> None:
    results = run(nan_once, 2, ALL[name])
    assert results[0] == results[1]


class Planted(Exception):
    pass


def fail_once(rank: int, world: int, settings: Settings, corrupt: bool) -> list[Any]:
    """In step 3 rank 0 fails on its way, or gets a message that has changed."""
    trainer = Trainer(CASES["default"], rank)
    state = make_state("model", trainer.module, **settings)
    sidcomp.register(trainer.wrapper, state)
    original, calls = MessagePlan.advance, 0

    def failing(
        self: MessagePlan, round: int, segments: Any, state_: int, work: int, wire: int, **at: Any
    ) -> bool:
        nonlocal calls
        calls += round == 1
        if rank == 0 and calls == 3 and round == 1:
            peer, offset, size = self.core.messages(0, True)[0]
            if not corrupt:
                raise Planted(f"while rank {peer} waits")
            import ctypes

            byte = ctypes.c_uint8.from_address(wire + offset + size // 2)
            byte.value ^= 0x10
        return original(self, round, segments, state_, work, wire, **at)

    MessagePlan.advance = failing  # type: ignore[method-assign]
    texts: list[Any] = []
    for step in range(5):
        before = residuals_of(state) if step else {}
        try:
            trainer.step()
            texts.append("fine")
        except RuntimeError as e:
            texts.append((type(state.error).__name__, str(e)))
            for name, kept in residuals_of(state).items():
                if settings["codec"] == "marsit" and corrupt:
                    assert torch.allclose(kept, before[name], atol=1e-6), name
    trainer.close()
    state.close()
    return texts


SUMMED: Settings = {"codec": "fp16", "exchange": "hierarchical", "ranks_per_node": 1}


@pytest.mark.parametrize(
    "settings",
    [*(ALL[name] for name in ("ring1", "torus1", "twoshot", "cascade")), SUMMED],
    ids=["ring1", "torus1", "twoshot", "cascade", "allreduce"],
)
def test_a_message_that_changed_fails_all_ranks(settings: Settings) -> None:
    for texts in run(fail_once, 4, settings, True):
        assert [t == "fine" for t in texts] == [True, True, False, True, True], texts
        kind, text = texts[2]
        assert kind == "CorruptPayloadError" and re.search(r"group 0 .*\.weight", text), texts


def lose_a_peer(rank: int, world: int, settings: Settings) -> tuple[str, str]:
    trainer = Trainer(CASES["cap-small"], rank)
    state = make_state("model", trainer.module, **settings)
    sidcomp.register(trainer.wrapper, state)
    for _ in range(3):
        trainer.step()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    before, kept = [bits(p) for p in trainer.module.parameters()], kept_by(state)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(100):
            trainer.step()
            before, kept = [bits(p) for p in trainer.module.parameters()], kept_by(state)
    assert before == [bits(p) for p in trainer.module.parameters()]
    for name, after in kept_by(state).items():
        np.testing.assert_allclose(after, kept[name], atol=1e-6)
    out = (str(caught.value), type(state.error).__name__)
    trainer.close()
    return out


@pytest.mark.parametrize("name", ["ring1", "twoshot"])
def test_a_peer_dies(name: str) -> None:
    for text, kind in run(lose_a_peer, 3, ALL[name], dying=[2], group_timeout=8)[:2]:
        assert kind == "ExchangeError" and re.search(r"group \d \(.*\.weight", text), (kind, text)


# ---- threads, refusals -------------------------------------------------------------------------------------


def forget(rank: int, world: int, close: bool) -> list[str]:
    trainer = Trainer(CASES["cap-small"], rank)
    state = make_state("bucket", trainer.module, **RING)
    sidcomp.register(trainer.wrapper, state)
    trainer.step()
    assert any(t.name == "sidcomp messages" for t in threading.enumerate())
    if close:
        state.close()
    trainer.close()
    del state, trainer
    gc.collect()
    end = time.monotonic() + 10
    while time.monotonic() < end and any(t.name == "sidcomp messages" for t in threading.enumerate()):
        time.sleep(0.02)
    return [t.name for t in threading.enumerate()]


@pytest.mark.parametrize("close", [True, False])
def test_the_threads_end_with_their_state(close: bool) -> None:
    for names in run(forget, 2, close):
        assert "sidcomp messages" not in names


def steady(rank: int, world: int) -> tuple[list[int], dict[str, Any]]:
    trainer = Trainer(CASES["cap-small"], rank)
    state = make_state("bucket", trainer.module, **TWOSHOT)
    sidcomp.register(trainer.wrapper, state)
    allocations = []
    for _ in range(6):
        trainer.step()
        allocations.append(state.stats()["allocations"])
    stats = state.stats()
    trainer.close()
    state.close()
    return allocations, stats


def test_counts_and_allocates_nothing_after_the_first_steps() -> None:
    for allocations, stats in run(steady, 2):
        assert len(set(allocations[1:])) == 1
        sizes = [
            _core.Exchange(
                "twoshot", "topk", "residual", g["n"], "float32", 0, 2, {"density": 0.1}
            ).sent_bytes
            for g in stats["groups"]
        ]
        assert [g["sent_bytes"] for g in stats["groups"]] == sizes
        assert stats["wait_seconds"] > 0 and stats["encode_seconds"] > 0


def refusals(rank: int, world: int) -> list[str]:
    texts = []
    for kind, arguments in [
        (sidcomp.UnsupportedError, {"codec": "topk", "exchange": "ring1"}),
        (sidcomp.UnsupportedError, {"codec": "fp16", "exchange": "twoshot"}),
        (sidcomp.UnsupportedError, {"codec": "topk", "exchange": "allreduce"}),
        (sidcomp.UnsupportedError, {"codec": "powersgd", "exchange": "twoshot"}),
        (sidcomp.ParameterError, {"codec": "topk", "exchange": "ringworld"}),
        (sidcomp.ArgumentError, {"codec": "topk", "exchange": ["twoshot", "allgather"]}),
        (sidcomp.UnsupportedError, {"codec": "auto", "exchange": ["twoshot", "ring1"]}),
        (sidcomp.ArgumentError, {"codec": "auto", "exchange": ["twoshot", "twoshot"]}),
        (sidcomp.ArgumentError, {"codec": "marsit", "exchange": "ring1", "K": 3, "full_every": 4}),
        (sidcomp.ParameterError, {"codec": "marsit", "exchange": "torus1", "rows": sidcomp.Schedule({0: 2})}),
        (sidcomp.ParameterError, {"codec": "marsit", "exchange": "ring1", "rows": 2}),
    ]:
        with pytest.raises(kind) as caught:
            sidcomp.State(**arguments)
        texts.append(str(caught.value))
    for arguments in [
        {"codec": "topk", "exchange": "hierarchical", "ranks_per_node": 3},
        {"codec": "marsit", "exchange": "torus1", "rows": 3},
        {"codec": "topk", "exchange": "twoshot", "full_every": 5},
    ]:
        trainer = Trainer(CASES["default"], rank)
        with contextlib.closing(sidcomp.State(**arguments)) as state:
            sidcomp.register(trainer.wrapper, state)
            with pytest.raises(RuntimeError) as failed:
                trainer.step()
            texts.append(str(failed.value))
            trainer.close()
    return texts


def test_what_makes_no_sense_is_refused() -> None:
    words = [
        "twoshot", "allreduce", "allgather", "leave the exchange out", "hierarchical", "takes a list",
        "signsgd", "twice", "the same", "cannot change", "rows", "ranks_per_node = 3", "rows = 3", "ring1",
    ]  # fmt: skip
    for texts in run(refusals, 2):
        for word, text in zip(words, texts, strict=True):
            assert word in text, (word, text)


def environment(rank: int, world: int) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    trainer = Trainer(CASES["default"], rank)
    state = make_state("model", trainer.module, codec="topk", exchange="hierarchical")
    sidcomp.register(trainer.wrapper, state)
    trainer.step()
    saved: dict[str, Any] = state.state_dict()["exchange"]
    trainer.close()
    state.close()

    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("node", "rank"))
    other = sidcomp.State("topk", exchange="hierarchical", ranks_per_node=mesh)  # type: ignore[arg-type]
    assert other.settings.saved()["exchange"] == saved
    return saved


def test_nodes_are_torchruns_or_a_meshs() -> None:
    for saved in run(environment, 2):
        assert saved == {"exchange": "hierarchical", "parameters": {"ranks_per_node": 2}}
