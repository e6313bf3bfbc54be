"""Updates over the shards of FSDP2: two nodes of two ranks, sharded inside a node, with exchanges between the
nodes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from local_training import OPTIMIZERS, alike, backward, batch, flat, go_on, train, updates
from sidcomp.local import choice
from sidcomp.runtime import point_to_point
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

EVERY = 4
WHOLE = StateDictOptions(full_state_dict=True)
SLOW = pytest.mark.slow


def whole(seed: int) -> nn.Module:
    """Some dimensions are odd, so that shards differ in size; of 1 there is a shard on one rank only."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 17), nn.Tanh(), nn.Linear(17, 40), nn.Tanh(), nn.Linear(40, 1), nn.Linear(1, 3)
    )


def meshes() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: Any, seed: int, **how: Any) -> nn.Module:
    model = whole(seed)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"], **how)
    return fully_shard(model, mesh=mesh["shard"], **how)


def full(module: nn.Module) -> torch.Tensor:
    """All parameters, gathered from the shards."""
    own = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([p.detach().flatten() for p in own])


def average(module: nn.Module, group: Any) -> None:
    """What FSDP does to the gradients of the ranks of a node."""
    for p in module.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= 2


def beside(rank: int, world: int, kind: str, optimizer: str, steps: int, how: dict[str, Any]) -> list[int]:
    """Updates with codec none over shards, beside the same over whole models whose gradients a
    node averages. Returns how many elements this rank holds, and how many there are."""
    mesh = meshes()
    ours, plain = sharded(mesh, rank // 2), whole(rank // 2)  # node 0's parameters count
    of_ours, of_plain = (OPTIMIZERS[optimizer](m.parameters()) for m in (ours, plain))
    with sidcomp.State("none") as state, sidcomp.State("none") as of_whole:
        how = {"noise_correction": False, "process_group": mesh.get_group("replicate"), **how}
        local = updates(kind, ours, of_ours, state, **how)
        reference = updates(kind, plain, of_plain, of_whole, **how)
        assert torch.equal(full(ours), full(plain)) and alike(full(ours))
        for step in range(steps):
            for module in (ours, plain):
                module.zero_grad()
                backward(module, rank, step)
            average(plain, mesh.get_group("shard"))
            of_ours.step()
            of_plain.step()
            assert torch.equal(full(ours), full(plain)), step
            with local.common() as common, torch.no_grad():
                assert alike(full(common))
                before = common(torch.ones(1, 12))  # the root stays gathered after this forward pass
            with reference.common() as common, torch.no_grad():
                assert torch.equal(before, common(torch.ones(1, 12)))
            assert torch.equal(full(ours), full(plain)), "its own parameters are back"
        with local.common() as common:
            gathered = get_model_state_dict(common, options=WHOLE)
        with reference.common() as common:
            assert all(torch.equal(x, gathered[name]) for name, x in common.state_dict().items())
        assert alike(full(ours)) is (local.steps % local.every == 0 and not local.delay)
        local.average()
        reference.average()
        assert alike(full(ours)) and torch.equal(full(ours), full(plain))
        return [sum(x.numel() for v in local.vectors for x in v.parameters), full(ours).numel()]


@pytest.mark.parametrize(
    "optimizer, delay, parts",
    [("Adam", 0, 1), pytest.param("momentum", 2, 1, marks=SLOW), ("Adam", 1, 2)],
)
def test_without_a_codec_it_has_the_bits_of_whole_models(optimizer: str, delay: int, parts: int) -> None:
    how = {"every": EVERY, "delay": delay, "parts": parts}
    held = run(beside, 4, "outer", optimizer, 6 * EVERY + 1, how)
    assert held[0][0] + held[1][0] == held[0][1] and held[0][0] != held[1][0] and held[:2] == held[2:]


@pytest.mark.parametrize("every, delay", [(1, 0), (EVERY, 1)])
def test_errors_in_parameters_without_a_codec_have_the_bits_of_whole_models(every: int, delay: int) -> None:
    run(beside, 4, "parameters", "Adam", 3 * every + 2, {"every": every, "delay": delay * every})


@on_ranks(4)
def test_without_a_codec_it_is_diloco(rank: int, world: int) -> None:
    """Over shards, beside DiLoCo as torch's own SGD computes it without shards."""
    mesh = meshes()
    ours, theirs, point = sharded(mesh, 0), whole(0), whole(0)
    of_ours, of_theirs = (OPTIMIZERS["Adam"](m.parameters()) for m in (ours, theirs))
    sgd = torch.optim.SGD(point.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with sidcomp.State("none") as state:
        updates("outer", ours, of_ours, state, every=EVERY, process_group=mesh.get_group("replicate"))
        for step in range(6 * EVERY):
            for module in (ours, theirs):
                module.zero_grad()
                backward(module, rank, step)
            average(theirs, mesh.get_group("shard"))
            of_theirs.step()
            of_ours.step()
            if (step + 1) % EVERY == 0:
                for p, q in zip(point.parameters(), theirs.parameters(), strict=True):
                    p.grad = p.detach() - q.detach()
                    dist.all_reduce(p.grad)
                    p.grad /= world
                sgd.step()
                theirs.load_state_dict(point.state_dict())
        assert alike(full(ours))
    theirs, ours, start = full(theirs), full(ours), full(whole(0))
    assert (theirs - ours).norm() < 1e-4 * (theirs - start).norm()


@pytest.mark.parametrize("delay", [0, pytest.param(2, marks=SLOW)])
@on_ranks(4)
def test_it_learns_compressed_and_the_nodes_have_the_same_bits(rank: int, world: int, delay: int) -> None:
    mesh, losses = meshes(), []
    module = sharded(mesh, rank // 2)
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    with sidcomp.State("topk", density=0.1) as state:
        group = mesh.get_group("replicate")
        outer = updates("outer", module, optimizer, state, every=EVERY, delay=delay, process_group=group)
        for step in range(40 * EVERY):
            losses += train(module, optimizer, rank, range(step, step + 1))
            if not delay:
                assert alike(full(module)) is ((step + 1) % EVERY == 0)
        with outer.common() as common:
            assert alike(full(common))
        assert sum(losses[-6:]) < 0.7 * sum(losses[:6]) and state.stats()["ratio"] > 4


FSDPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    "gathered": {"reshard_after_forward": False},
    "on the host": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.parametrize(
    "every, delay, fsdp",
    [
        *[(1, 0, "plain"), (EVERY, 0, "in bfloat16")],
        *[pytest.param(EVERY, 1, fsdp, marks=SLOW) for fsdp in FSDPS],
    ],
)
@on_ranks(4)
def test_with_errors_in_parameters_it_learns_and_the_nodes_agree(
    rank: int, world: int, every: int, delay: int, fsdp: str
) -> None:
    mesh, losses = meshes(), []
    module = sharded(mesh, rank // 2, **FSDPS[fsdp])
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    with sidcomp.State("topk", density=0.1) as state:
        how = {"every": every, "delay": delay * every, "process_group": mesh.get_group("replicate")}
        local = updates("parameters", module, optimizer, state, **how)
        for step in range(80):
            losses += train(module, optimizer, rank, range(step, step + 1))
            if step % 8 == 7:
                assert not alike(full(module)), "each node has its own error"
                with local.common() as common:
                    assert alike(full(common))
        ratio = state.stats()["ratio"]
        local.average()
        assert alike(full(module))
    first, last = sum(losses[:6]), sum(losses[-6:])
    assert last < 0.7 * first and ratio > 2  # with the samples of gradients, many for such small tensors


@on_ranks(4)
def test_each_shard_finds_a_plan(rank: int, world: int) -> None:
    """Each shard plans for itself."""
    mesh = meshes()
    module = sharded(mesh, 0)
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    with sidcomp.State("auto", candidates=["int4", ("topk", {"density": 0.1})]) as state:
        group = mesh.get_group("replicate")
        local = updates("parameters", module, optimizer, state, process_group=group)
        for step in range(400):
            train(module, optimizer, rank, range(step, step + 1))
            settled = torch.tensor(float(state.plan_report()["stage"] in ("settled", "warming up")))
            dist.all_reduce(settled, dist.ReduceOp.MIN)
            if step > 2 and settled:
                break
        with local.common() as common:
            assert alike(full(common))
        report, said = state.plan_report(), state.explain()
        local.average()
        assert alike(full(module))
    assert report["stage"] in ("settled", "warming up") and report["dense_ps"] > 0
    assert "an uncompressed exchange" in said


def moved(rank: int, world: int, kind: str, corrected: bool | str, how: dict[str, Any]) -> float:
    """How far Adam goes in one direction, with far more noise than signal in the nodes' gradients."""
    mesh = meshes()
    module = sharded(mesh, 0)
    start = full(module)
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    with sidcomp.State("none") as state:
        how = {**how, "noise_correction": corrected, "process_group": mesh.get_group("replicate")}
        local = updates(kind, module, optimizer, state, **how)
        for step in range(80):
            module.zero_grad()
            backward(module, rank, step)
            for p in module.parameters():
                own = p.grad.to_local()
                draw = torch.Generator().manual_seed(7 * step + rank)
                own += 4 + 20 * torch.randn(own.shape, generator=draw)
            optimizer.step()
        local.average()
        assert alike(full(module))
    return float((full(module) - start).mean())


@pytest.mark.parametrize(
    "kind, corrected, how",
    [
        ("parameters", True, {}),
        ("parameters", True, {"every": EVERY}),
        pytest.param("parameters", "rows", {"delay": 1}, marks=SLOW),
        pytest.param("memory", True, {"every": EVERY, "parts": 2}, marks=SLOW),
    ],
)
def test_it_lengthens_the_steps_of_noisy_nodes(kind: str, corrected: bool | str, how: dict[str, Any]) -> None:
    plain, longer = (run(moved, 4, kind, c, how)[0] for c in (False, corrected))
    expected = ((16 + 400) / (16 + 400 / 2)) ** 0.5
    assert longer / plain == pytest.approx(expected, rel=0.15), "by the ratio of the second moments"


@pytest.mark.parametrize("kind", ["outer", "parameters"])
@on_ranks(4)
def test_what_is_not_finite_in_one_shard_is_undone_in_all(rank: int, world: int, kind: str) -> None:
    """A NaN in a gradient that one rank's shard alone has."""
    mesh = meshes()
    module = sharded(mesh, 0)
    sgd = OPTIMIZERS["SGD"](module.parameters())
    with sidcomp.State("topk", density=0.1, nonfinite="rollback") as state:
        group = mesh.get_group("replicate")
        outer = updates(kind, module, sgd, state, every=1, process_group=group)
        for step in range(6):
            module.zero_grad()
            backward(module, rank, step)
            before = full(module)
            kept = {n: x.clone() for n, x in state.state_dict()["residuals"].items()}
            if step == 3 and rank == 1:
                p = module[0].weight
                assert isinstance(p, DTensor) and p.grad is not None
                p.grad.to_local()[0, 0] = float("nan")
            sgd.step()
            if step == 3:
                assert torch.equal(full(module), before), "on the ranks of both shards"
                now = state.state_dict()["residuals"]
                assert kept and all(torch.equal(x, now[n]) for n, x in kept.items())
            else:
                assert not torch.equal(full(module), before)
        if kind == "parameters":
            outer.average()
        assert alike(full(module)) and torch.isfinite(full(module)).all()


@pytest.mark.parametrize(
    "kind, delay, fails", [("outer", 2, EVERY + 1), ("parameters", EVERY, 2 * EVERY - 1)]
)
@on_ranks(4)
def test_what_fails_in_one_shard_is_raised_in_all(
    rank: int, world: int, kind: str, delay: int, fails: int
) -> None:
    """The exchange of the first shard fails, on both nodes, in step `fails`."""
    mesh = meshes()
    module = sharded(mesh, 0)
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    with sidcomp.State("none") as state:
        group = mesh.get_group("replicate")
        outer = updates(kind, module, optimizer, state, every=EVERY, delay=delay, process_group=group)
        for step in range(fails + 1):
            module.zero_grad()
            backward(module, rank, step)
            if step == EVERY and rank % 2 == 0:
                for future in outer._futures:
                    future.wait()
                broken: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                broken.set_exception(RuntimeError("broken"))
                outer._futures = [broken]
            if step < fails:
                optimizer.step()
                continue
            with pytest.raises((RuntimeError, sidcomp.ExchangeError)) as raised:
                optimizer.step()
        with outer.common() as common:
            assert alike(full(common)), "nothing has moved on any rank, and the node's exchanges are in step"
        outer.average()
        assert alike(full(module))
        said = str(raised.value)
    assert ("another shard of this node has failed" if rank % 2 else "broken") in said


def broken(*_: Any) -> Any:
    raise RuntimeError("broken")


@pytest.mark.parametrize("error", ["parameters", "memory"])
@on_ranks(4)
def test_what_fails_in_one_shard_loses_nothing_in_any(rank: int, world: int, error: str) -> None:
    """Both nodes' exchange of the first shard fails once, and that of the second shard is fine: returns how
    much of what the optimizers did is missing or doubled, on this rank's shard."""
    mesh = meshes()
    module = sharded(mesh, 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    stepped: list[torch.Tensor] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(flat(module).double()))
    group = mesh.get_group("replicate")
    options = sidcomp.Options(error=error, nonfinite="rollback")
    with sidcomp.compress(module, optimizer, "topk", density=0.2, process_group=group, options=options) as it:
        start = flat(module).double()
        done = torch.zeros_like(start)
        for step in range(9):
            module.zero_grad()
            backward(module, rank, step)
            before, kept = flat(module).double(), point_to_point.post
            if step == 4 and rank % 2 == 0:
                point_to_point.post = broken
            with pytest.raises((RuntimeError, sidcomp.ExchangeError)) if step == 4 else nullcontext():
                optimizer.step()
            point_to_point.post = kept
            done += stepped.pop() - before
        it.average()
        went, mean = flat(module).double() - start, done.clone()
        dist.all_reduce(mean, group=group)
        away = float((went - mean / 2).norm() / (mean / 2).norm())
    assert away < 1e-5, f"{away:.1e} of what the optimizers did is missing or doubled"


# ---- checkpoints


def resumed(rank: int, world: int, kind: str, stop: int, delay: int, path: str) -> None:
    """A run that is stopped after `stop` steps and resumed, beside one that is not; and a dictionary of the
    other shard."""

    def part(seed: int, first: int, last: int, saved: dict[str, Any] | None) -> tuple[dict[str, Any], Any]:
        mesh = meshes()
        module = sharded(mesh, seed)
        optimizer = OPTIMIZERS["Adam"](module.parameters())
        state = sidcomp.State("topk", density=0.1)
        how: dict[str, Any] = {"lr": 0.7, "momentum": 0.5} if kind == "outer" else {}
        how |= {"noise_correction": True, "process_group": mesh.get_group("replicate")}
        outer = updates(kind, module, optimizer, state, every=EVERY, delay=delay, **how)
        with state:
            names = {"module": module, "optimizer": optimizer, "state": state, "outer": outer}
            return go_on(rank, first, last, saved, names), full(module)

    _, end = part(0, 0, 14, None)
    saved, _ = part(0, 0, stop, None)
    torch.save(saved, f"{path}/{rank}")
    saved = torch.load(f"{path}/{rank}", weights_only=True)
    _, again = part(5, stop, 14, saved)
    assert torch.equal(end, again)
    dist.barrier()
    other = torch.load(f"{path}/{rank ^ 1}", weights_only=True)
    for name in ("state", "outer"):
        with pytest.raises(sidcomp.errors.CheckpointError) as wrong:
            part(0, 0, EVERY, {**saved, name: other[name]})
        assert all(f"shard {shard} of 2" in str(wrong.value) for shard in (0, 1))


@pytest.mark.parametrize(
    "kind, stop, delay",
    [("outer", 6, 3), pytest.param("outer", 6, 0, marks=SLOW), ("parameters", 6, EVERY)],
)
def test_a_resumed_run_has_the_same_bits(kind: str, stop: int, delay: int, tmp_path: Path) -> None:
    run(resumed, 4, kind, stop, delay, str(tmp_path))


def on_nodes(rank: int, world: int, kind: str, path: str) -> list[float]:
    """Two nodes save between two exchanges, one takes over. Returns the losses."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    module = sharded(mesh, rank // 2)
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    state = sidcomp.State("topk", density=0.1)
    group = mesh.get_group("replicate")
    outer = updates(kind, module, optimizer, state, every=EVERY, process_group=group)
    with state:
        if world == 2:
            files = [torch.load(f"{path}/{r}", weights_only=True) for r in (rank, rank + 2)]
            both = {"model_state_dict": files[0]["module"], "optim_state_dict": files[0]["optimizer"]}
            set_state_dict(module, optimizer, **both, options=WHOLE)
            state.load_state_dict([f["state"] for f in files])
            outer.load_state_dict(files[0]["outer"])
            error = state.state_dict()["residuals"]
            for name, x in error.items():
                torch.testing.assert_close(x, sum(f["state"]["residuals"][name] for f in files))
            point = files[0]["outer"]["point"]
            for name, p in module.named_parameters():
                if name in point:
                    kept = error[name].view(p.to_local().shape) if kind == "parameters" else 0
                    assert torch.equal(p.to_local(), point[name] - kept)
        losses = train(module, optimizer, rank, range(6 if world == 4 else 120))
        if world == 4:
            own, adam = get_state_dict(module, optimizer, options=WHOLE)
            kept = {"state": state.state_dict(), "outer": outer.state_dict()}
            torch.save({"module": own, "optimizer": adam, **kept}, f"{path}/{rank}")
    return losses


@pytest.mark.parametrize("kind", ["outer", "parameters"])
def test_another_number_of_nodes_takes_over(kind: str, tmp_path: Path) -> None:
    before = run(on_nodes, 4, kind, str(tmp_path))
    after = run(on_nodes, 2, kind, str(tmp_path))
    assert max(sum(x[-6:]) for x in after) < 0.8 * min(sum(x[:6]) for x in before)


# ---- a GradScaler


@pytest.mark.parametrize("kind", ["outer", "parameters"])
@on_ranks(4)
def test_the_ranks_of_a_node_skip_a_step_together(rank: int, world: int, kind: str) -> None:
    """Each node has a scale of its own, and the second one skips a step because of an element that one of its
    ranks holds. Beside the same over whole models."""
    mesh = meshes()
    ours, plain = sharded(mesh, 0), whole(0)
    with sidcomp.State("none") as state, sidcomp.State("none") as of_whole:
        how = {"noise_correction": False, "every": 2, "process_group": mesh.get_group("replicate")}
        trained = []
        for module, of in ((ours, state), (plain, of_whole)):
            optimizer = OPTIMIZERS["Adam"](module.parameters())
            updates(kind, module, optimizer, of, **how)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + rank // 2))
            trained.append((module, optimizer, scaler))
        for step in range(8):
            for module, _, scaler in trained:
                module.zero_grad()
                x, y = batch(rank, step)
                scaler.scale((module(x) - y).square().mean()).backward()
            average(plain, mesh.get_group("shard"))
            if step == 4 and rank // 2 == 1:
                plain[0].weight.grad[0, 0] = torch.inf
                if rank == 2:
                    ours[0].weight.grad.to_local()[0, 0] = torch.inf
            before = full(ours)
            for _, optimizer, scaler in trained:
                scaler.step(optimizer)
                scaler.update()
            if step == 4:  # no exchange
                assert torch.equal(before, full(ours)) is (rank // 2 == 1)
            assert torch.equal(full(ours), full(plain)), step
    assert all(scaler.get_scale() == 2.0**10 for *_, scaler in trained)  # the second node's is halved once


# ---- what is refused


@on_ranks(4)
def test_what_does_not_fit_is_refused(rank: int, world: int) -> None:
    mesh = meshes()
    crossed = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])][rank in (1, 2)]
    hsdp = whole(0)
    fully_shard(hsdp, mesh=mesh)
    nodes = mesh.get_group("replicate")
    cases: list[tuple[str, nn.Module, str, dict[str, Any]]] = [
        ("give as process_group the ranks of all nodes", sharded(mesh, 0), "outer", {}),
        ("of them too", sharded(mesh, 0), "outer", {"process_group": dist.group.WORLD}),
        ("rank 1 of the process group holds shard", sharded(mesh, 0), "outer", {"process_group": crossed}),
        ("of them too", hsdp, "outer", {"process_group": nodes}),
        *[
            (
                "rounds are between all ranks",
                sharded(mesh, 0),
                "outer",
                {"process_group": nodes, "deadline": 5.0},
            )
        ],
        ("give as process_group the ranks of all nodes", sharded(mesh, 0), "parameters", {}),
    ]
    for said, module, kind, how in cases:
        state = sidcomp.State("none") if kind == "outer" else None
        with pytest.raises(sidcomp.errors.SidcompError, match=said):
            updates(kind, module, OPTIMIZERS["SGD"](module.parameters()), state, **how)


@on_ranks(4)
def test_auto_chooses_the_fewest_bytes_of_all_shards(rank: int, world: int) -> None:
    """Each shard measures for itself, and would choose something else."""
    mesh = meshes()
    module = sharded(mesh, 0)
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    own = choice.CANDIDATES[3 if rank % 2 else 1]
    choice.choose = lambda costs, *_: next(cost for cost in costs if cost.spec == own)
    with sidcomp.compress(module, optimizer, process_group=mesh.get_group("replicate")) as it:
        for step in range(8):
            module.zero_grad()
            backward(module, rank, step)
            optimizer.step()
        assert f"why: {choice.label(choice.CANDIDATES[3])} is chosen" in str(it), str(it)
