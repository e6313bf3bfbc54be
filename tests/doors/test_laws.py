"""What holds wherever updates are sent: in force or said, no NaN for ever, and parameters that the program
sets itself are a new start."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from heard import logged, warned
from local_training import alike, backward, flat, network, train
from sidcomp.local import saved_updates
from test_compress import adamw, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SGD_OUTSIDE = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
KINDS: dict[str, dict[str, Any]] = {
    "parameters": {"codec": "topk", "density": 0.3},
    "every": {"codec": "int4", "every": 3},
    "delay": {"codec": "int4", "every": 3, "delay": 2},
    "memory": {"codec": "int4", "options": sidcomp.Options(error="memory")},
    "parts": {"codec": "int4", "every": 4, "parts": 2},
    "outer": {"codec": "none", "every": 2, "outer": partial(torch.optim.SGD, lr=0.7, momentum=0.3)},
}


def caught(do: Any) -> str:
    try:
        do()
    except sidcomp.errors.SidcompError as e:
        return f"{type(e).__name__}: {e}"
    return ""


# ---- in force or said
# ------------------------------------------------------------------------------------------------------------


STEPS = 12
KEPT = sidcomp.Options(error="memory")


@pytest.mark.parametrize("how", ["ddp", "all-reduce", "same batches", "own"])
@on_ranks(2)
def test_gradients_that_something_else_averages(rank: int, world: int, how: str) -> None:
    """The module is given bare, and something else averages its gradients."""
    module = network()
    ddp = DistributedDataParallel(module)
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, "int4"):

        def loop() -> None:
            for step in range(STEPS):
                optimizer.zero_grad()
                backward(ddp if how == "ddp" else module, 0 if how == "same batches" else rank, step)
                for p in module.parameters() if how == "all-reduce" else ():
                    dist.all_reduce(p.grad)
                optimizer.step()

        said = caught(loop)
    assert ("SetupError: all ranks had the same gradients" in said) is (how != "own"), said


class Communicating(torch.optim.SGD):
    """Averages gradients itself, into tensors of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = [p.grad.clone() for g in self.param_groups for p in g["params"]]
        mean = [g.clone() for g in own]
        for g in mean:
            dist.all_reduce(g)
        with torch.no_grad():
            for p, g in zip((p for of in self.param_groups for p in of["params"]), mean, strict=True):
                p.sub_(g, alpha=0.1)


@on_ranks(2)
def test_an_optimizer_that_communicates_itself_is_refused(rank: int, world: int) -> None:
    module = network()
    optimizer = Communicating(module.parameters(), lr=0.1)
    with sidcomp.compress(module, optimizer, "int4") as it:
        said = caught(lambda: train(module, optimizer, rank, range(STEPS)))
        assert it.updates.steps == 3  # type: ignore[attr-defined]
    assert "SetupError: the ranks' gradients differ, and all optimizers did the same, to the bit" in said


class BySign(torch.optim.SGD):
    """As Lion and signSGD: a rank's own gradients, of which only the signs count."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for of in self.param_groups for p in of["params"]):
            p.sub_(p.grad.sign(), alpha=1e-3)


@pytest.mark.parametrize("maker", [torch.optim.Adam, torch.optim.Adagrad, BySign])
@on_ranks(2)
def test_optimizers_that_do_the_same_on_their_own_are_none_that_communicate(
    rank: int, world: int, maker: Any
) -> None:
    """A small model far from its target: every gradient has the same sign on all ranks, so that the first
    step of Adam has the same bits, and each step by signs."""
    torch.manual_seed(3)
    module = nn.Linear(4, 1)
    optimizer = maker(module.parameters(), lr=1e-2)
    same: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: same.append(alike(flat(module))))  # then comes sidcomp
    with sidcomp.compress(module, optimizer):
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(1000 * step + rank)
            x = torch.rand(16, 4, generator=draw)
            optimizer.zero_grad()
            (module(x) - 3 * x.sum(1, keepdim=True) - 5).square().mean().backward()
            optimizer.step()
    assert same[0] and all(same) is (maker is BySign)


def toggled(rank: int, world: int, toggles: bool) -> tuple[str, torch.Tensor, bool]:
    """The idiom of many GPT scripts: micro-steps, of which the last one averages."""
    ddp = DistributedDataParallel(network())
    optimizer = adamw(ddp)

    def loop() -> None:
        for step in range(STEPS):
            for micro in range(2):
                if toggles:
                    ddp.require_backward_grad_sync = micro == 1
                backward(ddp, rank, 2 * step + micro)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    with sidcomp.compress(ddp, optimizer, "int4", updates=True) as it:
        said = caught(loop)
        different = not alike(flat(ddp))
        with it.common() as module:
            return said, flat(module), different


def test_a_loop_that_toggles_ddps_averaging_changes_nothing() -> None:
    plain, toggling = run(toggled, 2, False), run(toggled, 2, True)
    for a, b in zip(plain, toggling, strict=True):
        assert not a[0] and not b[0] and a[2] and b[2]
        assert torch.equal(a[1], b[1])


@on_ranks(2)
def test_an_optimizer_that_was_not_given_trains_no_rank_alone(rank: int, world: int) -> None:
    module = network()
    optimizer, other = adamw(module), sgd(module)
    with sidcomp.compress(module, optimizer, "int4") as it:
        train(module, optimizer, rank, range(2))
        with it.common():
            train(module, other, rank, range(3))  # which is undone
        train(module, other, rank, range(2, 3))
        train(module, optimizer, rank, range(3, 4))  # sends both
        said = caught(lambda: train(module, other, rank, range(4, 9)))
        assert "SetupError: SGD has parameter '0.weight'" in said and "no step of AdamW" in said
        assert it.updates.steps == 3  # type: ignore[attr-defined]
        it.average()
        assert alike(module)
    train(module, other, rank, range(9, 12))
    with sidcomp.compress(module, other, "int4") as it:
        train(module, other, rank, range(9, 12))
        assert it.updates.steps == 3  # type: ignore[attr-defined]


# ---- arguments
# ------------------------------------------------------------------------------------------------------------

OTHERS: dict[str, dict[str, Any]] = {
    "every": {"every": 4}, "delay": {"every": 2, "delay": 1}, "parts": {"every": 2, "parts": 2},
    "outer": {"every": 2, "outer": SGD_OUTSIDE}, "codec": {"every": 2, "codec": "int8"},
    "outer rate": {"every": 2, "outer": partial(torch.optim.SGD, lr=0.5)},
    "noise_correction": {"every": 2, "options": sidcomp.Options(noise_correction=False)},
    "error": {"every": 2, "options": sidcomp.Options(error="memory")},
    "seed": {"every": 2, "options": sidcomp.Options(seed=7)},
    "optimizer": {"every": 2},
}  # fmt: skip
OF_AUTO: dict[str, dict[str, Any]] = {
    "none": {"codec": "none"}, "accuracy": {"options": sidcomp.Options(accuracy="close")},
    "exact": {"options": sidcomp.Options(accuracy="exact")},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@on_ranks(2)
def test_ranks_with_other_arguments_are_refused(rank: int, world: int, name: str) -> None:
    module = network()
    arguments: dict[str, Any] = {"codec": "int4", "every": 2}
    make = adamw
    if name == "outer rate":
        arguments["outer"] = SGD_OUTSIDE
    if rank == 1:
        arguments |= OTHERS[name]
        make = sgd if name == "optimizer" else adamw

    def loop() -> None:
        optimizer = make(module)
        with sidcomp.compress(module, optimizer, **arguments):
            train(module, optimizer, rank, range(4))

    said = caught(loop)
    assert said.startswith(("SetupError: ", "RankError: ")) and "rank 1" in said, said


@pytest.mark.parametrize("name", OF_AUTO)
@on_ranks(2, group_timeout=20)
def test_ranks_that_do_not_choose_alike_are_refused(rank: int, world: int, name: str) -> None:
    module = network()

    def loop() -> None:
        optimizer = adamw(module)
        with sidcomp.compress(module, optimizer, **(OF_AUTO[name] if rank else {})):
            train(module, optimizer, rank, range(STEPS))

    said = caught(loop)
    assert said.startswith("SetupError: ") and "rank 1" in said, said


# ---- a NaN is not for ever
# ------------------------------------------------------------------------------------------------------------


def one_nan(rank: int, world: int, kind: str, often: bool) -> dict[str, Any]:
    module, lines = network(), logged()
    optimizer = adamw(module)
    late: dict[str, Any] = {"codec": "int4", "every": 3, "deadline": 20.0}
    with sidcomp.compress(module, optimizer, **KINDS.get(kind, late)) as it:
        losses = []

        def loop() -> None:
            for step in range(36):
                optimizer.zero_grad()
                losses.append(backward(module, rank, step))
                if rank == 1 and (often or step == 9):
                    next(module.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
                optimizer.step()

        said = caught(loop)
        moments = [x for of in optimizer.state.values() for x in of.values()]
        return {
            "said": said, "losses": losses, "discarded": it.stats()["discarded"], "log": lines,
            "finite": all(bool(torch.isfinite(x).all()) for x in moments), "page": str(it),
        }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_on_one_rank_is_said_and_passes(kind: str) -> None:
    for rank, r in enumerate(run(one_nan, 2, kind, False)):
        assert not r["said"] and r["discarded"] == 1 and r["finite"]
        assert all(x == x for x in r["losses"][14:]) and r["losses"][-1] < 0.7 * r["losses"][0]
        assert any("optimizer of rank 1 did was not finite" in line for line in r["log"]) is (rank == 0)
        assert "1 exchanges did not count" in r["page"]


def test_with_a_deadline_a_nan_costs_its_rank_alone_what_it_did() -> None:
    for rank, r in enumerate(run(one_nan, 2, "deadline", False)):
        assert not r["said"] and r["discarded"] == rank and r["finite"]
        assert all(x == x for x in r["losses"][14:]) and r["losses"][-1] < 0.7 * r["losses"][0]
        assert any("the optimizer of rank 1 did, which was not finite" in x for x in r["log"]) is (rank == 1)


IN_FLIGHT: dict[str, dict[str, Any]] = {
    "parameters": KINDS["delay"],
    "memory": {"codec": "none", "every": 2, "delay": 1, "options": KEPT},
    "parts": {**KINDS["parts"], "delay": 1},
}


def nan_in_flight(rank: int, world: int, folder: str, kind: str) -> list[Any]:
    """Saves while what rank 1 did is in flight and not finite, and goes on; then another object resumes."""
    out = []
    for first in (True, False):
        module = network(0 if first else 5)
        optimizer = adamw(module)
        with sidcomp.compress(module, optimizer, **IN_FLIGHT[kind]) as it:
            if first:
                train(module, optimizer, rank, range(6), nan=5)
                assert it.updates.flying  # type: ignore[attr-defined]
                it.save(folder)
            else:
                assert it.load(folder)
            assert bool(flat(module).isfinite().all()) is (rank == 0)
            train(module, optimizer, rank, range(6, 11))
            own = flat(module)
            with it.common():
                out.append([own, flat(module), it.stats()["discarded"]])
    return out


@pytest.mark.parametrize("kind", IN_FLIGHT)
def test_a_checkpoint_with_a_nan_in_flight_resumes(tmp_path: Path, kind: str) -> None:
    """The resumed run discards the exchange, as the run does that goes on."""
    for whole, resumed in run(nan_in_flight, 2, str(tmp_path), kind):
        assert bool(whole[0].isfinite().all()) and whole[2] == resumed[2] == 1
        assert torch.equal(whole[0], resumed[0]) and torch.equal(whole[1], resumed[1])


def test_a_nan_in_every_step_ends_the_run() -> None:
    for r in run(one_nan, 2, "parameters", True):
        assert r["said"].startswith("ExchangeError: 4 exchanges in a row") and "rank 1" in r["said"]


def test_with_a_deadline_a_nan_in_every_step_ends_that_rank_alone() -> None:
    fine, ended = run(one_nan, 2, "deadline", True)
    assert ended["said"].startswith("ExchangeError: 4 exchanges in a row") and "rank 1" in ended["said"]
    assert not fine["said"] and not fine["discarded"] and fine["losses"][-1] < 0.7 * fine["losses"][0]
    assert any("without rank 1" in line for line in fine["log"])


# ---- parameters that the program sets
# ------------------------------------------------------------------------------------------------------------


def best_of(
    it: sidcomp.Run, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """Trains past a point of the common parameters, which it returns."""
    train(module, optimizer, rank, range(5))
    with it.common():
        best, at = copy.deepcopy(module.state_dict()), flat(module)
    train(module, optimizer, rank, range(5, 11))
    return best, at


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_loading_the_best_parameters_is_a_new_start(rank: int, world: int, kind: str) -> None:
    """Trains, goes back to the best parameters, and trains on."""
    module = network()
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, **KINDS[kind]) as it:
        best, at = best_of(it, module, optimizer, rank)
        away = float((flat(module) - at).norm())
        module.load_state_dict(best)
        optimizer.zero_grad()
        train(module, torch.optim.SGD(module.parameters(), lr=0.0), rank, range(1))  # not one of ours
        for group in optimizer.param_groups:
            group["lr"] = 1e-6
        train(module, optimizer, rank, range(11, 23))
        it.average()
        end, equal = float((flat(module) - at).norm()), alike(flat(module))
    assert equal and end < 1e-3 < 0.1 < away, (away, end)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_the_best_parameters_stay_at_the_end(rank: int, world: int, kind: str) -> None:
    """Loads the best parameters after the last step: what is evaluated, averaged and saved are these."""
    module = network()
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, **KINDS[kind]) as it:
        best, at = best_of(it, module, optimizer, rank)
        module.load_state_dict(best)
        it.average()
        averaged = torch.equal(flat(module), at)
        train(module, optimizer, rank, range(11, 16))
        module.load_state_dict(best)
        with it.common():
            assert (averaged, torch.equal(flat(module), at)) == (True, True)


@on_ranks(2)
def test_a_save_that_fails_inside_common_leaves_the_common_parameters(rank: int, world: int) -> None:
    """Which are in the module until the end of the block, and this rank's own after it."""
    module = network()
    optimizer = sgd(module)
    with sidcomp.compress(module, optimizer, "topk", density=0.3) as it:
        train(module, optimizer, rank, range(3))
        own = flat(module)
        with it.common():
            common = flat(module)
            with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(saved_updates, "save", failing)
                it.state_dict()
            assert torch.equal(flat(module), common) and not torch.equal(common, own)
        assert torch.equal(flat(module), own)
        it.average()


def failing(*_: Any) -> None:
    raise MemoryError


@on_ranks(2)
def test_nothing_moves_inside_common(rank: int, world: int) -> None:
    """What would be undone when common() ends is refused, and what was loaded inside is no new start."""
    module = network()
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, "topk", density=0.1, every=2) as it:
        train(module, optimizer, rank, range(5))
        saved, own = it.state_dict(), flat(module)
        for words, do in {
            "the optimizer would step": lambda: train(module, optimizer, rank, range(1)),
            "average()": it.average,
            "restart()": it.restart,
            "load_state_dict()": lambda: it.load_state_dict(saved),
        }.items():
            with it.common():
                said = caught(do)
                assert said.startswith(f"SetupError: {words}") and "inside" in said, said
        with it.common():
            module.load_state_dict(network(seed=3).state_dict())
        assert torch.equal(flat(module), own)
        train(module, optimizer, rank, range(5, 9))


@pytest.mark.parametrize("inference", [False, True])
@on_ranks(2)
def test_a_state_in_memory_is_a_snapshot(rank: int, world: int, inference: bool) -> None:
    """What is trained after it, and where it was taken, changes nothing."""
    module = network()
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, "int4") as it:
        train(module, optimizer, rank, range(3))
        with torch.inference_mode(inference):
            saved = it.rank_state()
        train(module, optimizer, rank, range(3, 6))
        expected = flat(module)
        it.load([saved])
        train(module, optimizer, rank, range(3, 6))
        assert torch.equal(flat(module), expected)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_loading_on_one_rank_alone_is_an_error_on_all(rank: int, world: int, kind: str) -> None:
    module = network()
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, **KINDS[kind]):
        train(module, optimizer, rank, range(6))
        if rank == 1:
            module.load_state_dict(network(seed=3).state_dict())
        said = caught(lambda: train(module, optimizer, rank, range(6, 20)))
    assert "RankError" in said and "begun anew since its last step" in said, said


@on_ranks(2)
def test_loading_inside_of_a_compiled_module_is_a_new_start(rank: int, world: int) -> None:
    module = network()
    compiled = torch.compile(module, backend="eager")
    optimizer = adamw(module)
    with sidcomp.compress(compiled, optimizer, "int4") as it:
        train(module, optimizer, rank, range(3))
        other = network(seed=3)
        module.load_state_dict(other.state_dict())
        with it.common():
            assert torch.equal(flat(module), flat(other))


@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(2)
def test_the_module_can_be_copied_and_saved_and_the_copy_is_another_one(
    rank: int, world: int, wrapped: bool
) -> None:
    module: Any = DistributedDataParallel(network()) if wrapped else network()
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, "int4", updates=True) as it:
        train(module, optimizer, rank, range(2))
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        copies = [torch.load(file, weights_only=False), copy.deepcopy(module)]
        copies.append(torch.optim.swa_utils.AveragedModel(module).module)
        for one in copies:
            assert torch.equal(flat(one), flat(module))
            one.load_state_dict(one.state_dict())
            one(torch.ones(4, 12)).sum().backward()
        assert it.updates._loaded._before is None  # type: ignore[attr-defined]
        train(module, optimizer, rank, range(2, 4))
        it.average()
        assert alike(module)


@on_ranks(2)
def test_a_second_run_over_the_module_is_refused_while_the_first_is_open(rank: int, world: int) -> None:
    module = network()
    optimizer = adamw(module)
    first = sidcomp.compress(module, optimizer, "int4")
    for again in (module, torch.compile(module, backend="eager"), module[2]):  # type: ignore[index]
        with pytest.raises(sidcomp.SetupError, match="that run is open"):
            sidcomp.compress(again, optimizer, "int4")
    train(module, optimizer, rank, range(2))
    first.close()
    sidcomp.compress(module, optimizer, "int4")
    train(module, optimizer, rank, range(2))
    del optimizer, first  # and the second run with them
    with sidcomp.compress(module, other := adamw(module), "int4") as it:
        train(module, other, rank, range(2))
        assert it.stats()["steps"] == 2


@on_ranks(2)
def test_one_optimizer_of_two_modules(rank: int, world: int) -> None:
    """A scaler that skips its step on one rank skips it in both runs."""
    modules = [network(), network(seed=1)]
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
    said = "6 of the optimizer's parameters are not the module's"
    with pytest.warns(sidcomp.SidcompWarning, match=said) if rank == 0 else nullcontext():
        runs = [sidcomp.compress(m, optimizer, "none", options=KEPT) for m in modules]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        for m in modules:
            backward(m, rank, step, float("inf") if (rank, step) == (1, 2) else float(scaler.get_scale()))
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
    assert [it.updates.steps for it in runs] == [4, 4]  # type: ignore[attr-defined]
    for it in runs:
        it.close()


@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(2)
def test_training_on_behind_a_closed_state_is_an_error(rank: int, world: int, wrapped: bool) -> None:
    module: Any = DistributedDataParallel(network()) if wrapped else network()
    optimizer = adamw(module)
    with sidcomp.State("int4") as state:
        sidcomp.compress(module, optimizer, state, updates=True)
        train(module, optimizer, rank, range(2))
    with pytest.raises(sidcomp.SetupError, match="this State is closed"):
        optimizer.step()
    if wrapped:
        with pytest.raises(RuntimeError, match="the run is closed"):
            backward(module, rank, 2)


@on_ranks(2)
def test_what_is_for_gradients_is_refused(rank: int, world: int) -> None:
    module = network()
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, KINDS["parameters"]["codec"]) as it:
        train(module, optimizer, rank, range(2))
        for call in (it.state.skip, partial(it.state.rescale, 2.0), partial(it.state.update_scale, 2.0)):
            with pytest.raises(sidcomp.SetupError, match="unit of the parameters"):
                call()
        with pytest.raises(sidcomp.SetupError, match="gradients of a DDP model"):
            it.rewrap()


@on_ranks(2)
def test_where_tensors_cannot_be_exchanged_from_is_said(rank: int, world: int) -> None:
    module = network()
    group = dist.new_group(backend="cuda:gloo")
    with pytest.raises(sidcomp.SetupError, match=r"on cpu, and the process group has no backend for it"):
        sidcomp.compress(module, adamw(module), "int4", process_group=group)
    module = network().to("meta")
    with pytest.raises(sidcomp.UnsupportedError, match="parameters are on meta"):
        sidcomp.compress(module, adamw(module), "int4")


def swapped(rank: int, world: int, swaps: bool) -> torch.Tensor:
    """Averaged parameters are swapped in to evaluate, and the own ones back."""
    module = network()
    averaged = copy.deepcopy(module.state_dict())
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, "topk", density=0.1) as it:
        for step in range(STEPS):
            train(module, optimizer, rank, range(step, step + 1))
            if swaps and rank == 0:
                own = copy.deepcopy(module.state_dict())
                module.load_state_dict(averaged)
                module.load_state_dict(own)
        with it.common():
            return flat(module)


def test_averaged_parameters_may_be_swapped_in_and_out() -> None:
    assert torch.equal(run(swapped, 2, False)[0], run(swapped, 2, True)[0])


@on_ranks(2)
def test_restart_takes_the_parameters_as_they_are(rank: int, world: int) -> None:
    module = network()
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, "topk", density=0.1) as it:
        train(module, optimizer, rank, range(5))
        other = network(seed=9)
        with torch.no_grad():
            for p, q in zip(module.parameters(), other.parameters(), strict=True):
                p.copy_(q)
        it.restart()
        with it.common():
            off = float((flat(module) - flat(other)).norm())
        assert (caught(lambda: train(module, optimizer, rank, range(5, 8))), off) == ("", 0.0)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_parameter_that_is_released_is_averaged_from_then_on(rank: int, world: int, kind: str) -> None:
    """A layer begins to train later; the ranks' frozen parameters are rank 0's from the start."""
    module, said = network(seed=rank), io.StringIO()
    frozen = list(module[0].parameters())  # type: ignore[index]
    for p in frozen:
        p.requires_grad_(False)
    optimizer = adamw(module)
    with redirect_stderr(said), sidcomp.compress(module, optimizer, **KINDS[kind]) as it:
        assert alike(torch.cat([p.detach().flatten() for p in frozen]))
        train(module, optimizer, rank, range(7))
        kept = {n: x.clone() for n, x in it.state_dict()["updates"]["point"].items()}
        for p in frozen:
            p.requires_grad_(True)
        before = [p.detach().clone() for p in frozen]
        train(module, optimizer, rank, range(7, 19))
        assert min(float((p - q).norm()) for p, q in zip(frozen, before, strict=True)) > 1e-3
        assert backward(module, rank, 18) < 1.8
        it.average()
        assert alike(flat(module)) and not it.stats()["discarded"]
        assert len(it.state_dict()["updates"]["point"]) == len(kept) + 2
    assert ("begin to train in step 8" in said.getvalue()) is (rank == 0)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_parameter_that_one_rank_alone_releases_is_an_error_on_all(
    rank: int, world: int, kind: str
) -> None:
    module = network()
    frozen = list(module[0].parameters())  # type: ignore[index]
    for p in frozen:
        p.requires_grad_(False)
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, **KINDS[kind]):
        train(module, optimizer, rank, range(7))
        for p in frozen if rank == 1 else ():
            p.requires_grad_(True)
        said = caught(lambda: train(module, optimizer, rank, range(7, 20)))
    assert "RankError" in said and "begun anew since its last step" in said, said


@pytest.mark.parametrize("when", ["average", "training", "assigned"])
@on_ranks(2)
def test_a_parameter_that_is_replaced_is_noticed(rank: int, world: int, when: str) -> None:
    module = network(seed=rank)
    optimizer = sgd(module)
    with sidcomp.compress(module, optimizer, "int4") as it:
        train(module, optimizer, rank, range(3))
        last = module[4]
        new = last.weight.detach().clone()  # type: ignore[index]
        if when == "assigned":  # the next step says so
            module.load_state_dict({n: x.clone() for n, x in module.state_dict().items()}, assign=True)
            steps = range(3, 4)
        else:
            last.weight = torch.nn.Parameter(new)  # type: ignore[index]
            steps = range(3, 70)
        does = it.average if when == "average" else partial(train, module, optimizer, rank, steps)
        said = caught(does)
    name = "0.weight" if when == "assigned" else "4.weight"
    assert f"SetupError: parameter {name!r} was replaced" in said, said


class Lookahead(torch.optim.SGD):
    """Named as those of several libraries are."""


class SGDScheduleFree(torch.optim.SGD):
    pass


class Own(Lookahead):
    pass


@on_ranks(2)
def test_optimizers_that_keep_a_copy_of_the_parameters_are_refused_by_name(rank: int, world: int) -> None:
    module, said = network(), []
    for kind in (Lookahead, SGDScheduleFree, Own):
        optimizer = kind(module.parameters(), lr=0.1)
        said.append(caught(partial(sidcomp.compress, module, optimizer, "int4")))
    ddp = DistributedDataParallel(module)
    optimizer = Lookahead(ddp.parameters(), lr=0.1)
    with sidcomp.compress(ddp, optimizer, "int4"):  # gradients reach every copy alike
        train(ddp, optimizer, rank, range(2))
    for name, text in zip(("Lookahead", "SGDScheduleFree", "Own"), said, strict=True):
        assert f"UnsupportedError: {name} keeps a second copy" in text, text


# ---- leaving
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("averages", [False, True])
@on_ranks(2)
def test_closing_says_how_far_the_ranks_are_apart(rank: int, world: int, averages: bool) -> None:
    module, err = network(), io.StringIO()
    optimizer = adamw(module)
    it = sidcomp.compress(module, optimizer, "int4", every=4)
    train(module, optimizer, rank, range(6))
    if averages:
        it.average()
    with redirect_stderr(err):
        it.close()
        it.close()
    before, said = flat(module), err.getvalue()
    train(module, optimizer, rank, range(6, 8))  # exchanges nothing
    assert not torch.equal(flat(module), before)
    assert ("closed after 6 steps without run.average()" in said) is (rank == 0 and not averages)
    assert said.count("closed") <= 1


@on_ranks(2)
def test_a_ddp_model_of_a_closed_run_does_not_drift_apart(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(network())
    optimizer = adamw(ddp)
    with sidcomp.compress(ddp, optimizer, "int4", updates=True) as it:
        train(ddp, optimizer, rank, range(4))
        it.average()
    with pytest.raises(RuntimeError, match="the run is closed"):
        train(ddp, optimizer, rank, range(4, 6))


@pytest.mark.parametrize("updates", [False, True])
@on_ranks(2)
def test_a_closed_run_says_that_it_is_closed(rank: int, world: int, updates: bool) -> None:
    """The common parameters are still there, to be saved."""
    model: Any = DistributedDataParallel(network())
    optimizer = adamw(model)
    with sidcomp.compress(model, optimizer, "int4", updates=updates) as it:
        train(model, optimizer, rank, range(4))
    assert str(it).startswith("sidcomp: closed after 4 "), str(it)
    with pytest.raises(sidcomp.SetupError, match="this State is closed"):
        it.restart()
    with it.common() as module:
        assert alike(module)


@on_ranks(2)
def test_a_run_that_ends_before_an_exchange_speaks_of_updates(rank: int, world: int) -> None:
    module = network()
    optimizer = adamw(module)
    with warned(sidcomp.SidcompWarning) as texts, sidcomp.compress(module, optimizer, "int4", every=4):
        train(module, optimizer, rank, range(2))
    assert len(texts) == (rank == 0)
    assert all("was closed before it had exchanged updates" in x and "gradient" not in x for x in texts)
