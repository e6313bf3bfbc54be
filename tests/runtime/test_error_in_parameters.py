"""error="parameters": what a rank's optimizers did and it has not sent stays in its own parameters."""

from __future__ import annotations

import copy
import io
import re
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any

import pytest
import sidcomp
import torch
from harness import on_ranks, run
from local_training import (
    KINDS,
    OPTIMIZERS,
    alike,
    backward,
    error_of,
    flat,
    mean,
    network,
    resumes,
    sgd,
    train,
    updates,
)
from sidcomp.config.grouping import DENSE, Regime
from sidcomp.config.settings import PLAIN
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 12
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("momentum", {"codec": "topk", "density": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"codec": "int4", "groups": "layer"}),
    ("AdamW", {"codec": "topk", "density": 0.1, "exchange": "twoshot", "groups": "model"}),
    ("AdamW", {"codec": "sidco-e", "density": 0.2, "groups": "even:2", "exclude": "1-D"}),
    ("AdamW", {"codec": "efsignsgd"}),
    ("AdamW", {"codec": "topk", "density": 0.1, "full_every": 4}),
]


@pytest.mark.parametrize(
    "every, delay",
    [(1, 0), pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(3, 0, marks=pytest.mark.slow), (3, 1)],
)
@pytest.mark.parametrize("optimizer, settings", SETTINGS)
@on_ranks(2)
def test_nothing_is_lost_and_the_loss_falls(
    rank: int, world: int, optimizer: str, settings: dict[str, Any], every: int, delay: int
) -> None:
    """Parameters = point - error, and nothing that an optimizer did is lost or told twice."""
    module, stepped = network(rank), []
    with sidcomp.State(**settings) as state:
        inner = OPTIMIZERS[optimizer](module.parameters())
        inner.register_step_post_hook(lambda *_: stepped.append(flat(module)))  # before it exchanges
        how = {"delay": every * delay, "noise_correction": False}
        local = updates("parameters", module, inner, state, every=every, **how)
        done = flat(module).double()  # where the optimizers have brought the mean of the ranks
        losses = []
        for step in range(30 * every):
            before = flat(module)
            losses += train(module, inner, rank, range(step, step + 1))
            done += mean(stepped.pop() - before)
            if local.steps % every == 0:
                for future in local._futures:
                    future.wait()
                with local.common():
                    point = flat(module)
                assert alike(point)
                error = error_of(state, module)
                if not delay:
                    assert torch.equal(flat(module), point - error)
                if settings.get("exchange") != "twoshot":  # which keeps a second error, for all ranks
                    flight = mean(flat(module)) if delay else point.double() - mean(error)
                    torch.testing.assert_close(flight, done, rtol=0, atol=2e-5)
        local.average()
        assert alike(flat(module))
        torch.testing.assert_close(flat(module).double(), done, rtol=0, atol=5e-5)
        assert not error_of(state, module).any()
        stats = state.stats()
    assert stats["steps"] == 30 and 0 < stats["sent_bytes"] < stats["dense_bytes"]
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])


class Changing:
    """Takes a controller's place: other groups, dense ones among them, in steps that are known."""

    def __init__(self, module: nn.Module, exchanges: int) -> None:
        names = [name for name, _ in module.named_parameters()][::-1]
        one, two = Regime([names], (0,)), Regime([names[:2], names[2:]], (0, 1))
        half = Regime([names[:3], names[3:]], (DENSE, 0))
        self._regimes = [PLAIN, one, PLAIN, two, half, one, replace(PLAIN, flush=True), PLAIN]
        self._each, self._step = exchanges // len(self._regimes), 0

    deferred, found = False, True

    def meet(self, *_: Any) -> Regime:
        return PLAIN

    def between(self, *_: Any) -> Regime:
        self._step += 1
        return self._regimes[min(self._step // self._each, len(self._regimes) - 1)]

    def begin(self, *_: Any) -> None: ...

    def saved(self) -> None: ...


@pytest.mark.parametrize("every", [1, 3])
@on_ranks(2)
def test_errors_stay_in_the_parameters_while_groups_change(rank: int, world: int, every: int) -> None:
    """Parameters are the point less the error, also where errors wait for a group that has a memory."""
    module, stepped = network(rank), []
    waited = 0
    with sidcomp.State("auto", candidates=[("topk", {"density": 0.1}), "int4"]) as state:
        inner = OPTIMIZERS["AdamW"](module.parameters())
        inner.register_step_post_hook(lambda *_: stepped.append(flat(module)))
        local = updates("parameters", module, inner, state, every=every, noise_correction=False)
        state.engine.tuner = Changing(module, 48)
        done, groups = flat(module).double(), set()
        for step in range(48 * every):
            before = flat(module)
            train(module, inner, rank, range(step, step + 1))
            done += mean(stepped.pop() - before)
            if local.steps % every == 0:
                groups.add(tuple(g.plan.codec for g in state.engine.groups))
                waited += bool(state.engine.unassigned)
                with local.common():
                    point = flat(module)
                assert alike(point)
                error = error_of(state, module)
                assert torch.equal(flat(module), point - error)
                torch.testing.assert_close(point.double() - mean(error), done, rtol=0, atol=5e-5)
            if step == 15 * every:  # errors wait, and are averaged
                assert state.engine.unassigned
                local.average()
                assert alike(flat(module)) and not error_of(state, module).any()
                torch.testing.assert_close(flat(module).double(), done, rtol=0, atol=5e-5)
    assert len(groups) >= 4 and waited >= 8


@on_ranks(2)
def test_auto_finds_a_plan(rank: int, world: int) -> None:
    """A search to its end, and the same run taken up again."""

    def search(state: sidcomp.State, saved: dict[str, Any] | None) -> dict[str, Any]:
        module = network(0)
        optimizer = OPTIMIZERS["AdamW"](module.parameters())
        local = updates("parameters", module, optimizer, state)
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
            state.load_state_dict(saved["state"])
            local.load_state_dict(saved["local"])
        for step in range(400):
            train(module, optimizer, rank, range(step, step + 1))
            if step > 2 and state.plan_report()["stage"] in ("settled", "warming up"):
                break
        with local.common():
            point = flat(module)
        assert alike(point)
        assert torch.equal(flat(module), point - error_of(state, module))
        return copy.deepcopy(
            {
                "optimizer": optimizer.state_dict(),
                "state": state.state_dict(),
                "local": local.state_dict(),
                "report": state.plan_report(),
                "said": state.explain(),
                "ready": [t["ready_ps"] for t in state.profile.tensors],
            }
        )

    with sidcomp.State("auto") as state:
        found = search(state, None)
    with sidcomp.State("auto") as state:
        again = search(state, found)
    assert again["report"]["why"] == found["report"]["why"], "it goes on with what it had found"
    report = found["report"]
    assert report["stage"] in ("settled", "warming up") and report["dense_ps"] > 0
    assert "an uncompressed exchange" in found["said"]
    assert found["ready"] and len(set(found["ready"])) == 1, "all parameters are ready together"


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("nonfinite", ["drop", "rollback"])
@on_ranks(2)
def test_what_is_not_finite_is_discarded_on_all_ranks(
    rank: int, world: int, nonfinite: str, delay: int
) -> None:
    module = network(0)
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    with sidcomp.State("topk", density=0.2, nonfinite=nonfinite, groups="layer") as state:
        local = updates("parameters", module, optimizer, state, delay=delay)
        for step in range(8):
            with local.common():
                before = flat(module)
            train(module, optimizer, rank, range(step, step + 1), nan=3)
            if step == 3 and not delay:
                assert torch.equal(flat(module), before - error_of(state, module))
                with local.common():
                    assert torch.equal(flat(module), before)
        assert torch.isfinite(flat(module)).all()
        local.average()
        assert alike(flat(module)) and torch.isfinite(flat(module)).all()


@on_ranks(2)
def test_a_rank_that_is_not_finite_leaves_the_average_finite(rank: int, world: int) -> None:
    """One rank's parameters are not finite, between two exchanges."""
    module = network(0)
    with sidcomp.State("topk", density=0.2) as state:
        sgd = OPTIMIZERS["SGD"](module.parameters())
        local = updates("parameters", module, sgd, state, every=4)
        train(module, sgd, rank, range(6), nan=5)
        assert bool(torch.isfinite(flat(module)).all()) == (rank == 0)
        local.average()
        assert alike(flat(module)) and torch.isfinite(flat(module)).all()


def counted(rank: int, world: int) -> dict[str, tuple[str, float, str]]:
    """What the first line says that the bytes are divided by, and what is counted in the end."""
    ways: dict[str, Any] = {
        "samples": ("parameters", {}),
        "rows": ("parameters", {"every": 2, "noise_correction": "rows"}),
        "sketches": ("parameters", {"every": 20}),
        "parts": ("memory", {"every": 4, "parts": 2, "noise_correction": True}),
        "outer": ("outer", {"every": 4, "noise_correction": True}),
        "none": ("parameters", {"noise_correction": False}),
    }
    found = {}
    for name, (kind, how) in ways.items():
        module = network(0)
        said = io.StringIO()
        with sidcomp.State("topk", density=0.05, groups="layer") as state, redirect_stderr(said):
            adamw = OPTIMIZERS["AdamW"](module.parameters())
            local = updates(kind, module, adamw, state, **how)
            train(module, adamw, rank, range(8 * local.every))
            found[name] = said.getvalue(), float(state.stats()["ratio"]), state.explain()
    return found


def test_the_line_counts_what_the_noise_correction_sends() -> None:
    said, other = run(counted, 2)
    for name, (text, ratio, explained) in said.items():
        (times,) = re.findall(r"\(([\d.]+) times as much\)", text)
        assert float(times) == pytest.approx(ratio, rel=0.02), name
        assert ("for the noise correction" in text) == (name != "none")
        assert f"({times} times as much)" in explained
        assert not other[name][0]


@pytest.mark.parametrize(("every", "fused"), [(1, False), (4, False), (4, True)])
@on_ranks(2)
def test_each_rank_may_have_a_scaler_of_its_own(rank: int, world: int, every: int, fused: bool) -> None:
    """Each rank has a GradScaler of its own, and one of them skips a step. Fused: the optimizer skips it."""
    module = network(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10 * (1 + rank))
    with sidcomp.State("int4") as state:
        local = updates("parameters", module, optimizer, state, every=every)
        for step in range(40):
            module.zero_grad()
            backward(module, rank, step, scaler.get_scale())
            scaler.scale(torch.zeros(()))  # makes its scale, as scaling the loss does
            if step == 5 and rank == 1:
                next(module.parameters()).grad[0, 0] = float("inf")
            before = flat(module).clone()
            scaler.step(optimizer)
            if step == 5 and rank == 1 and every > 1:
                assert torch.equal(flat(module), before), "no step, and no exchange"
            scaler.update()
        local.average()
        assert alike(flat(module)) and state.stats()["steps"] == 40 // every
    assert scaler.get_scale() == 2.0**10  # rank 1's is halved once from twice as much


@pytest.mark.parametrize(
    "stop, every, delay, noise",
    [
        *[(4, 1, 0, None), (4, 1, 1, None), (4, 3, 0, None), (5, 3, 1, None), (6, 3, 1, None)],
        *[(4, 1, 0, "rows"), (5, 3, 1, "rows")],
    ],
)
def test_a_resumed_run_has_the_same_bits(stop: int, every: int, delay: int, noise: str | None) -> None:
    how = {"every": every, "delay": delay * every, "noise_correction": noise}
    run(resumes, 2, "parameters", stop, STEPS, {"codec": "topk", "density": 0.1}, how)


@pytest.mark.parametrize("delay", [0, 1])
@on_ranks(2)
def test_looking_at_the_point_changes_nothing(rank: int, world: int, delay: int) -> None:
    ends = []
    for look in (False, True):
        module = network(0)
        with sidcomp.State("topk", density=0.1) as state:
            adamw = OPTIMIZERS["AdamW"](module.parameters())
            local = updates("parameters", module, adamw, state, delay=delay)
            for step in range(STEPS):
                train(module, adamw, rank, range(step, step + 1))
                if look:
                    own = flat(module)
                    with local.common() as m:
                        assert m is module and not torch.equal(flat(module), own)
                    assert torch.equal(flat(module), own)
                    local.state_dict()
            ends.append(flat(module))
    assert torch.equal(*ends)


@on_ranks(2)
def test_a_ddp_model_keeps_its_gradients_to_itself(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(network(0))
    adamw = OPTIMIZERS["AdamW"](ddp.parameters())
    with sidcomp.compress(ddp, adamw, "topk", updates=True, density=0.1):
        for step in range(4):
            ddp.zero_grad()
            backward(ddp, rank, step)
            gradient = torch.cat([p.grad.flatten() for p in ddp.parameters()])
            adamw.step()
    assert not alike(gradient)


@on_ranks(2)
def test_a_refusal_leaves_the_ddp_model_as_it_was(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(network(0))
    with pytest.raises(sidcomp.SetupError):
        sidcomp.compress(ddp, OPTIMIZERS["SGD"](network(1).parameters()), "topk", updates=True)
    assert ddp.require_backward_grad_sync and not ddp._comm_hooks


@pytest.mark.parametrize(
    "case, said",
    [
        ("every", "at least 1"),
        ("delay", "delay=2"),
        ("parts", 'parts=2 needs error="memory"'),
        ("outer", 'needs error="memory"'),
        ("host", 'host=True needs error="memory"'),
        ("deadline", 'deadline=5.0 needs error="memory"'),
        ("memory", 'memory="residual"'),
        ("qsgd", "memory that keeps what was not sent"),
        ("momentum", 'memory="residual"'),
        ("planned", "leave delay out"),
        ("bf16", "autocast"),
        ("double", "'0.weight' is float64, and updates are float32"),
        ("scripted", "ScriptModule takes no hook"),
        ("optimizer", "0.weight"),
        ("damaged", "4.bias"),
        ("order", "State's load_state_dict first"),
        ("follow", r"state.follow\(None\)"),
        ("hierarchical", "twoshot"),
        ("others", r"rank 1 has 'weight' of float32 \[5, 3\] where rank 0 has 'weight' of float32 \[4, 3\]"),
        ("shards", "is a shard: give as process_group the ranks of all nodes"),
    ],
)
@on_ranks(2)
def test_what_is_wrong_is_said(rank: int, world: int, case: str, said: str) -> None:
    module = network(0)
    optimizer = OPTIMIZERS["AdamW"](module.parameters())
    make: dict[str, Any] = {
        "every": lambda: updates("parameters", module, optimizer, every=0),
        "delay": lambda: updates("parameters", module, optimizer, delay=2),
        "parts": lambda: updates("parameters", module, optimizer, parts=2),
        "outer": lambda: updates("parameters", module, optimizer, outer=sgd()),
        "host": lambda: updates("parameters", module, optimizer, host=True),
        "deadline": lambda: updates("parameters", module, optimizer, deadline=5.0),
        "memory": lambda: updates("parameters", module, optimizer, sidcomp.State("topk", memory="none")),
        "qsgd": lambda: updates("parameters", module, optimizer, sidcomp.State("qsgd", memory="none")),
        "momentum": lambda: updates("parameters", module, optimizer, sidcomp.State("topk", memory="dgc")),
        "planned": lambda: updates("parameters", module, optimizer, sidcomp.State("auto"), delay=1),
        "bf16": lambda: updates("parameters", module.bfloat16(), optimizer),
        "double": lambda: updates("memory", module.double(), optimizer),
        "scripted": lambda: updates("parameters", torch.jit.script(module), optimizer),
        "optimizer": lambda: updates("parameters", module, OPTIMIZERS["SGD"](network(1).parameters())),
        "damaged": lambda: loads(base={}),
        "order": lambda: loads(**{"state step": 3}),
    }

    def loads(**wrong: Any) -> None:
        local = updates("parameters", module, optimizer)
        local.load_state_dict({**local.state_dict(), **wrong})

    def followed() -> None:
        state = sidcomp.State()
        updates("parameters", module, optimizer, state)
        state.follow(optimizer)
        optimizer.step()

    def others() -> None:
        model = nn.Linear(3, 4 + rank)
        updates("parameters", model, OPTIMIZERS["SGD"](model.parameters()))

    def shards() -> None:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(module, mesh=mesh)
        updates("parameters", module, OPTIMIZERS["SGD"](module.parameters()))

    def node() -> None:
        state = sidcomp.State("topk", exchange="hierarchical", ranks_per_node=2)
        updates("parameters", module, optimizer, state)

    make |= {"follow": followed, "hierarchical": node, "others": others, "shards": shards}
    with pytest.raises(sidcomp.errors.SidcompError, match=said):
        make[case]()


# ---- several optimizers


def split(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """An optimizer without betas for the matrices, as Muon is, and AdamW for the vectors."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [OPTIMIZERS[kind](matrices), OPTIMIZERS["AdamW"](vectors)]


def two_optimizers(rank: int, world: int, kind: str, first: str) -> tuple[float, float, int]:
    """The list does what its optimizers do one after the other, and only Adam's parameters are corrected."""
    module, alone = network(0), network(0)
    both, own = split(module, first), split(alone, first)
    losses = []
    with sidcomp.State("none") as state:
        more: dict[str, Any] = {"lr": 1, "momentum": 0} if kind == "outer" else {}
        local = updates(kind, module, both, state, every=2, **more)
        alone.load_state_dict(module.state_dict())
        for step in range(40):
            for model in (module, alone):
                model.zero_grad()
                losses.append(backward(model, rank, step))
            for optimizer in both:
                optimizer.step()
            assert local.steps == step + 1
            if step == 0:
                for optimizer in own:
                    optimizer.step()
                assert torch.equal(flat(module), flat(alone)), "before the first exchange"
        corrected = len(local.noise._parameters) if local.noise is not None else 0
    assert alike(flat(module))
    return losses[0], losses[-2], corrected


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_optimizers_steps_one_after_the_other(kind: str) -> None:
    for first, last, corrected in run(two_optimizers, 2, kind, "momentum"):
        assert last < 0.7 * first
        assert corrected == (3 if kind == "parameters" else 0), "the three vectors, which Adam has"


def test_all_parameters_are_corrected_where_adam_has_them() -> None:
    assert [corrected for *_, corrected in run(two_optimizers, 2, "parameters", "AdamW")] == [6, 6]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_checkpoint_keeps_what_one_optimizer_did_alone(rank: int, world: int, kind: str) -> None:
    """As in a GAN, one steps more often than the other."""
    saved: list[Any] = []
    for seed in (0, 7):
        module = network(seed)
        both = split(module, "momentum")
        with sidcomp.State("topk", density=0.1) as state:
            local = updates(kind, module, both, state, every=2)
            if saved:
                state.load_state_dict(saved[0])
                local.load_state_dict(saved[1])
                assert torch.equal(flat(module), saved[2])
                return
            for one in [*both, *both, both[0]]:
                module.zero_grad()
                backward(module, rank, 0)
                one.step()
            assert local.steps == 2, "an exchange has just taken place"
            saved = [state.state_dict(), local.state_dict(), flat(module)]


# ---- exchanges and a forward pass in bfloat16


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("exchange", ["ring1", "torus1"])
@on_ranks()
def test_over_one_bit_rings_the_error_stays_in_the_parameters(rank: int, world: int, exchange: str) -> None:
    """The ring and the torus of one bit draw each element's sign from one of the ranks. So what arrives is
    what the ranks sent only on average; but the replicas have the same bits, and the memory is the error."""
    module = network(rank)
    losses = []
    with sidcomp.State("marsit", memory="residual", eta_s=0.01, exchange=exchange) as state:
        adamw = OPTIMIZERS["AdamW"](module.parameters())
        local = updates("parameters", module, adamw, state)
        for step in range(120):
            losses += train(module, adamw, rank, range(step, step + 1))
            with local.common():
                point = flat(module)
            assert alike(point)
            error = error_of(state, module)
            assert error.any() and torch.equal(flat(module), point - error)
        sent = state.stats()["ratio"]
        local.average()
        assert alike(flat(module)) and not error_of(state, module).any()
    assert sent > 8  # 16 without the samples for the noise correction, which are many for so small a model
    first, last = sum(losses[:6]), sum(losses[-6:])
    assert last < 0.5 * first


# settings, and whether nothing is lost (docs/updates.md)
BALANCE: list[tuple[dict[str, Any], bool]] = [
    ({"codec": "marsit", "eta_s": 0.01}, False),
    ({"codec": "marsit", "eta_s": 0.01, "aggregate": "mean"}, True),
    ({"codec": "marsit", "eta_s": 0.01, "aggregate": "mean", "exchange": "ring1"}, False),
    ({"codec": "signsgd", "magnitude": 0.01}, True),
    ({"codec": "signsgd", "magnitude": 0.01, "exchange": "ring1"}, False),
    ({"codec": "signsgd", "magnitude": 0.01, "aggregate": "majority"}, False),
    ({"codec": "signum", "magnitude": 0.01}, False),
    ({"codec": "onebit"}, True),
    ({"codec": "redsync", "density": 0.1, "quantised": "on"}, True),
    ({"codec": "redsync", "density": 0.1, "quantised": "printed"}, False),
]


@on_ranks(3)
def test_what_the_ranks_sent_arrives_unless_a_sign_is_drawn_or_voted(rank: int, world: int) -> None:
    """How far each exchange moves the mean of the ranks' parameters. Where all that they sent arrives, it
    stays where the optimizers have brought it."""
    moved = []
    for settings, _ in BALANCE:
        module, left = network(rank), []
        with sidcomp.State(**{"memory": "residual", **settings}) as state:
            sgd = OPTIMIZERS["SGD"](module.parameters())
            sgd.register_step_post_hook(lambda *_, m=module, left=left: left.append(mean(flat(m))))
            updates("parameters", module, sgd, state)
            far = []
            for step in range(6):
                train(module, sgd, rank, range(step, step + 1))
                far.append(float((mean(flat(module)) - left[-1]).abs().max()))
        moved.append(max(far))
    for far, (settings, exact) in zip(moved, BALANCE, strict=True):
        assert far < 1e-6 if exact else far > 1e-3, (settings, far)


@on_ranks(2)
def test_the_forward_pass_may_be_in_bfloat16(rank: int, world: int) -> None:
    """Autocast computes in bfloat16 with float32 parameters, as DDP does; and the default codec trains."""
    ours, module, third = network(0), network(0), network(0)
    ddp = DistributedDataParallel(module)
    theirs = OPTIMIZERS["SGD"](module.parameters())
    losses, used = [], set()
    ours[0].register_forward_hook(lambda _, __, out: used.add(out.dtype))
    with sidcomp.State("none") as plain, sidcomp.State() as state:
        exact, adamw = OPTIMIZERS["SGD"](ours.parameters()), OPTIMIZERS["AdamW"](third.parameters())
        updates("parameters", ours, exact, plain)
        local = updates("parameters", third, adamw, state)
        start = flat(module)
        for step in range(60):
            for model in (ours, ddp, third):
                model.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = backward(model, rank, step)
            losses.append(loss)
            exact.step()
            theirs.step()
            adamw.step()
            with local.common():
                point = flat(third)
            assert alike(point) and torch.equal(flat(third), point - error_of(state, third))
            if step < STEPS:  # bfloat16 makes a difference in the last bit larger later
                far = float((flat(ours) - flat(module)).norm() / (flat(module) - start).norm())
    assert used == {torch.bfloat16} and flat(third).dtype is torch.float32
    first, last = sum(losses[:6]), sum(losses[-6:])
    assert far < 0.02 and last < 0.6 * first
