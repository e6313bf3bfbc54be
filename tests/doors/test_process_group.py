"""The backend "sidcomp": a process group that compresses gradients, and passes everything else."""

from __future__ import annotations

import gc
import io
import os
import re
import time
from contextlib import redirect_stderr
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from common import shaped
from harness import on_ranks, run
from heard import warned
from local_training import alike, backward, flat, network
from sidcomp.config import specification
from sidcomp.doors.backend.after_backward import _begun
from torch import nn
from torch.distributed import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

STEPS = 12


def compressing(codec: str | None = None, **arguments: Any) -> str:
    import sidcomp.doors.backend.process_group as door

    door.configure(codec, min_bytes=1000, **arguments)
    return "cpu:sidcomp,cuda:sidcomp"


def group() -> Any:
    return dist.group.WORLD


def train(model: nn.Module, rank: int, steps: int = STEPS, after: Any = None) -> list[float]:
    """after: what the program does after backward()."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        sgd.zero_grad()
        losses.append(backward(model, rank, step))
        if after is not None:
            after(model)
        sgd.step()
    return losses


def ddp_unmodified(rank: int, world: int) -> Any:
    """What an unmodified DDP program does over this backend."""
    said = io.StringIO()
    with redirect_stderr(said):
        model = DistributedDataParallel(network(), bucket_cap_mb=0.005)
        losses = train(model, rank)
    assert alike(model)
    programs = getattr(group(), "programs", [])
    stats = [p.state.stats() for p in programs if p.state is not None]
    return flat(model), losses, [(s["steps"], len(s["groups"]), s["ratio"]) for s in stats], said.getvalue()


@pytest.mark.parametrize("world", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ddp_with_codec_none_has_the_bits_of_plain_ddp(world: int) -> None:
    plain = run(ddp_unmodified, world)
    ours = run(ddp_unmodified, world, backend=partial(compressing, "none"))
    for (theirs, _, _, _), (mine, _, stats, _) in zip(plain, ours, strict=True):
        assert torch.equal(theirs, mine)
        assert [s[0] for s in stats] == ([STEPS - 3] if world > 1 else [])


def in_time(steps: int, passes: int = STEPS) -> bool:
    """Two passes are enough to learn where tensors move. Each time Gloo frees one late takes a pass more."""
    return passes - 4 <= steps <= passes - 2


def hsdp_unmodified(rank: int, world: int) -> Any:
    said = io.StringIO()
    with redirect_stderr(said):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        model = network()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses = train(model, rank)
    for _ in range(30):  # gathers from C++, on the heels of each other
        whole = [p.full_tensor() for p in model.parameters()]
    assert [x.shape for x in whole] == [p.shape for p in model.parameters()]
    assert alike(model, mesh.get_group("replicate"))
    replicas, shards = mesh.get_group("replicate"), mesh.get_group("shard")
    stats = [p.state.stats() for p in getattr(replicas, "programs", []) if p.state is not None]
    seen = [len(getattr(g, "programs", [])) for g in (shards, group())]
    return flat(model), losses, [(s["steps"], len(s["groups"])) for s in stats], said.getvalue(), seen


def test_hsdp_with_codec_none_has_the_bits_of_plain_hsdp() -> None:
    plain = run(hsdp_unmodified, 4)
    ours = run(hsdp_unmodified, 4, backend=partial(compressing, "none"))
    for (theirs, *_), (mine, _, stats, _, seen) in zip(plain, ours, strict=True):
        assert torch.equal(theirs, mine)
        ((steps, groups),) = stats
        assert groups == 2 and in_time(steps)  # the root's all-reduce is too small
        assert seen == [0, 0]


def test_hsdp_compresses_and_says_so() -> None:
    plain = run(hsdp_unmodified, 4)
    ours = run(hsdp_unmodified, 4, backend=partial(compressing, "topk", density=0.2))
    for rank, ((theirs, their_losses, *_), (mine, losses, stats, said, _)) in enumerate(
        zip(plain, ours, strict=True)
    ):
        assert not torch.equal(theirs, mine)
        assert losses[:3] == their_losses[:3]  # three passes: two to learn, and the first that is compressed
        assert losses[-1] == pytest.approx(their_losses[-1], rel=0.2)
        ((steps, groups),) = stats
        assert groups == 2 and in_time(steps)
        assert ("compresses 2 all-reduces of each backward pass" in said) == (rank in (0, 1))


# ---- what passes untouched


def collectives(rank: int, world: int) -> list[torch.Tensor]:
    """The results of many collectives, outside of a backward pass and of every kind."""
    out: list[torch.Tensor] = []
    draw = torch.Generator().manual_seed(rank)
    big = torch.randn(5000, generator=draw)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        x = big.clone()
        dist.all_reduce(x, op=op)
        out.append(x)
    for dtype in (torch.int64, torch.float64, torch.uint8):
        x = (big * 10).abs().to(dtype)
        dist.all_reduce(x)
        out.append(x)
    x = big.clone()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.is_completed()
    out.append(x)
    x = big.clone()
    dist.broadcast(x, 1)
    out.append(x)
    x = big.clone()
    dist.reduce(x, 0)
    out.append(x if rank == 0 else big)
    everyone = [torch.empty_like(big) for _ in range(world)]
    dist.all_gather(everyone, big)
    whole = torch.empty(world * len(big))
    dist.all_gather_into_tensor(whole, big)
    out += [*everyone, whole]
    part = torch.empty(len(big) // world)
    dist.reduce_scatter_tensor(part, big[: len(part) * world].clone())
    out.append(part)
    parts = [torch.empty(7) for _ in range(world)]
    dist.all_to_all(parts, list(big[: 7 * world].clone().split(7)))
    out += parts
    gathered = [torch.empty_like(big) for _ in range(world)] if rank == 0 else None
    dist.gather(big, gathered)
    x = torch.empty(9)
    dist.scatter(x, list(big[: 9 * world].split(9)) if rank == 0 else None)
    out.append(x)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == list(range(world))
    ring = dist.isend(big, (rank + 1) % world)
    dist.recv(x := torch.empty_like(big), (rank - 1) % world)
    ring.wait()
    out.append(x)
    dist.barrier()
    many = [big.clone(), 2 * big]
    dist.all_reduce_coalesced(many)
    out += many
    return out


def in_backward(rank: int, world: int, function: Any) -> Any:
    """Runs the function inside of a backward pass."""
    kept: list[Any] = []
    x = nn.Parameter(torch.zeros(1))
    x.register_hook(lambda _: kept.append(function(rank, world)))
    (2 * x).backward()
    return kept[0]


def both_places(rank: int, world: int) -> list[list[torch.Tensor]]:
    return [collectives(rank, world), in_backward(rank, world, collectives)]


def test_everything_else_passes_untouched() -> None:
    """Outside of a backward pass, and in one that comes only once."""
    plain = run(both_places, 3)
    ours = run(both_places, 3, backend=partial(compressing, "topk", density=0.01))
    for theirs, mine in zip(plain, ours, strict=True):
        for a, b in zip(theirs, mine, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and len(a) == len(b)


# ---- what carries gradients of parameters, and what does not


class Summed(torch.autograd.Function):
    """Sums its gradient over the ranks, as the backward pass of a differentiable all-gather does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reduce: Any) -> torch.Tensor:
        ctx.reduce = reduce
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.reduce(grad), None


class Normalized(torch.autograd.Function):
    """A batch norm over all ranks, by hand: its backward pass sums two vectors of statistics."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, reduce: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.reduce = reduce
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        mean, product = ctx.reduce(torch.cat([grad.sum(0), (grad * x).sum(0)])).chunk(2)
        return (grad - mean - x * product) * weight, (grad * x).sum(0), None


def passing(kind: str, x: torch.Tensor, weight: nn.Parameter, reduce: Any) -> torch.Tensor:
    """Puts into a graph what reduces the gradients of activations."""
    if kind == "function":
        return Summed.apply(x, reduce)
    if kind == "norm":
        return Normalized.apply(x, weight, reduce)
    if kind == "hook":
        x.register_hook(reduce)
    if kind == "module":
        layer = nn.Tanh()
        layer.register_full_backward_hook(lambda _, given, __: (reduce(given[0]),))
        return layer(x)
    if kind == "checkpoint":

        def again(y: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                y.register_hook(reduce)
            return y * weight

        return torch.utils.checkpoint.checkpoint(again, x, use_reentrant=True)
    return x


@pytest.mark.parametrize("kind", ["function", "norm", "hook", "module", "checkpoint", "stage"])
@on_ranks(2, backend=partial(compressing, "topk", density=0.02))
def test_gradients_of_activations_stay_exact_and_it_says_so(rank: int, world: int, kind: str) -> None:
    """DDP, and a part of the graph whose backward pass sums something over the default group, too."""
    exact, said, off = dist.new_group(backend="gloo"), io.StringIO(), []

    def reduce(grad: torch.Tensor) -> torch.Tensor:
        mine, right = grad.clone(), grad.clone()
        dist.all_reduce(mine)
        dist.all_reduce(right, group=exact)
        off.append(not torch.equal(mine, right))
        return mine

    model = DistributedDataParallel(nn.Linear(12, 200))
    weight = nn.Parameter(torch.ones(200))
    with redirect_stderr(said):
        for step in range(8):
            x = model(torch.randn(16, 12, generator=torch.Generator().manual_seed(100 * step + rank)))
            if kind == "stage":  # of a pipeline: the next one begins with a leaf, of the same memory
                y = x.detach().requires_grad_()
                y.register_hook(reduce)
                y.square().sum().backward()
                x.backward(y.grad)
            else:
                passing(kind, x, weight, reduce).square().sum().backward()
    assert off == [False] * 8
    (steps,) = steps_of()
    assert in_time(steps, 8)  # those of DDP are compressed
    assert said.getvalue().count("leaves a backward pass's all-reduces exact") == (rank == 0)


def average(grad: torch.Tensor) -> None:
    dist.all_reduce(grad)
    grad.div_(dist.get_world_size())


def average_flat(module: nn.Module) -> None:
    """Averages all gradients in one vector, as many programs without DDP do."""
    own = list(module.parameters())
    average(whole := torch.cat([p.grad.flatten() for p in own]))
    for p, part in zip(own, whole.split([p.numel() for p in own]), strict=True):
        p.grad.copy_(part.view_as(p))


def hooked(module: nn.Module, kind: str) -> None:
    """Averages gradients in hooks."""
    own = list(module.parameters())
    came: list[nn.Parameter] = []

    def count(p: nn.Parameter) -> None:
        came.append(p)
        if kind == "at the end" and len(came) == 1:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: average_flat(module))
        if len(came) == len(own):
            came.clear()
            if kind == "flat":
                average_flat(module)

    for p in own:
        if kind == "tensor":
            p.register_hook(average)
        elif kind == "node":
            node = p.view_as(p).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, p=p: average(p.grad))
            p.__dict__["node"] = node  # or it would be made anew
        elif kind == "accumulated":
            p.register_post_accumulate_grad_hook(lambda p: average(p.grad))
        else:
            p.register_post_accumulate_grad_hook(count)


@pytest.mark.parametrize(
    "kind",
    ["ddp", "static", "zero", "hsdp", "replicate", "tensor", "node", "accumulated", "flat", "at the end"],
)
@on_ranks(2, backend=partial(compressing, "int8"))
def test_gradients_of_parameters_are_compressed(rank: int, world: int, kind: str) -> None:
    model, replicas = network(), group()
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        replicas = mesh.get_group("replicate")
    elif kind == "replicate":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",))
        replicate(model, mesh=mesh)
        replicas = mesh.get_group()
    elif kind in ("ddp", "zero", "static"):
        model = DistributedDataParallel(model, static_graph=kind == "static", bucket_cap_mb=0.005)
    else:
        hooked(model, kind)
    if kind == "zero":
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        for step in range(STEPS):
            zero.zero_grad()
            backward(model, rank, step)
            zero.step()
    else:
        train(model, rank)
    assert alike(model)
    assert in_time(sum(steps_of(replicas)))


@on_ranks(2, backend=partial(compressing, "topk", density=0.1, exclude="<1KB"))
def test_sizes_in_exclude_are_those_of_parameters_under_ddp(rank: int, world: int) -> None:
    """The sizes and codecs of the groups of DDP's one bucket, and what is said."""
    said = io.StringIO()
    model = DistributedDataParallel(network())
    with redirect_stderr(said):
        train(model, rank, 6)
    assert alike(model)
    (state,) = [p.state for p in group().programs if p.known]
    groups = sorted((g["n"], g["codec"]) for g in state.stats()["groups"])
    assert groups == [(40 + 40 + 120 + 3, "none"), (480 + 1600, "topk")]
    line = "compresses 1 all-reduces of each backward pass (0.0 MB) with topk"
    assert (line in said.getvalue()) == (rank == 0)


# ---- gradients that are all-reduced after backward()


def exactly(rank: int, world: int, kind: str) -> None:
    """All-reduces something else than gradients."""
    if kind not in ("others", "same"):
        return
    x = torch.full((len(flat(network())) + (kind == "others"),), 1.0 + rank)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full_like(x, world * (world + 1) / 2))


def test_backward_passes_are_counted_inside_inference_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidcomp.doors.backend.after_backward._counter", None)
    with torch.inference_mode():
        first = _begun()
        assert _begun() == first
    torch.ones(1, requires_grad=True).sum().backward()
    assert _begun() == first + 1


def after_backward(rank: int, world: int, kind: str) -> Any:
    """A program that averages gradients itself, before the optimizer's step."""
    model, second = network(), network(1, 50)
    sgd, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, second))
    said = io.StringIO()
    with redirect_stderr(said), warned(sidcomp.SidcompWarning) as texts:
        for step in range(STEPS):
            exactly(rank, world, kind)
            sgd.zero_grad(set_to_none=kind != "kept")
            backward(model, rank, step)
            exactly(rank, world, kind)  # in the forward pass of another micro-batch
            if kind in ("others", "same"):
                backward(model, rank, step)
            if kind == "each":
                for p in model.parameters():
                    average(p.grad)
            else:
                average_flat(model)
            if kind != "scaler" or step not in (0, 1, 8):  # whose scale was too large
                sgd.step()
            if kind == "two":
                other.zero_grad()
                backward(second, rank, step)
                average_flat(second)
                other.step()
            exactly(rank, world, kind)
    assert alike(model) and alike(second)
    return flat(model), steps_of(), said.getvalue(), texts


@pytest.mark.parametrize("kind", ["flat", "kept", "each", "two", "scaler", "others", "same"])
def test_what_is_all_reduced_after_backward_is_compressed_where_asked(kind: str) -> None:
    backend = partial(compressing, "topk", density=0.05, outside=True)
    for rank, (_, steps, said, texts) in enumerate(run(after_backward, 2, kind, backend=backend)):
        late, models = 2 * (kind == "scaler"), {"two": 2, "same": 0}.get(kind, 1)
        assert steps == [STEPS - 2 - late] * models, steps
        assert ("all-reduces after each backward pass" in said) == (rank == 0 and models > 0)
        assert not texts


@pytest.mark.parametrize("kind", ["flat", "each", "others"])
def test_what_is_all_reduced_after_backward_is_exact_and_it_says_so(kind: str) -> None:
    plain = run(after_backward, 2, kind)
    ours = run(after_backward, 2, kind, backend=partial(compressing, "topk", density=0.05))
    for rank, ((theirs, *_), (mine, steps, _, texts)) in enumerate(zip(plain, ours, strict=True)):
        assert torch.equal(theirs, mine) and not steps
        assert len(texts) == (rank == 0)
        assert not texts or "add outside=True to SIDCOMP" in texts[0]


def one_rank_alone(rank: int, world: int, kind: str) -> list[int]:
    """The first rank has backward passes that the other one does not have: it counts operations, say."""
    model, other = network(), network(1, 50)
    trained = DistributedDataParallel(model) if kind == "ddp" else model
    sgd, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))

    def alone() -> None:
        if rank == 0:
            network(2)(torch.ones(2, 12)).sum().backward()

    def exact() -> None:
        x = torch.full((len(flat(model)),), 1.0 + rank)
        dist.all_reduce(x)
        assert torch.equal(x, torch.full_like(x, world * (world + 1) / 2))

    alone()
    exact()
    for step in range(STEPS):
        sgd.zero_grad()
        if step == 8:
            alone()
        backward(trained, rank, step)
        if kind == "outside":
            average_flat(model)
        if step in (1, 4, 6):
            alone()
        sgd.step()
        alone()
        exact()
        for p in other.parameters():
            p.grad = torch.ones_like(p)
        second.step()
    assert alike(model)
    return steps_of()


@pytest.mark.parametrize(("kind", "learning"), [("ddp", 2), ("outside", 4)])
def test_a_backward_pass_of_one_rank_alone_decides_nothing(kind: str, learning: int) -> None:
    """Between the calls and the step it says on all ranks that the calls may not be gradients: where they are
    not learnt yet, in step 1, two more steps learn them."""
    backend = partial(compressing, "topk", density=0.05, outside=kind == "outside")
    one, other = run(one_rank_alone, 2, kind, backend=backend, group_timeout=10)
    assert one == other and len(one) == 1 and in_time(one[0], STEPS - learning + 2), one


def without_a_batch(rank: int, world: int, kind: str) -> list[int]:
    """The last rank has no batch in some steps, and sends zeros: from its buffer, or from elsewhere."""
    model = network()
    sgd, own = torch.optim.SGD(model.parameters(), lr=0.1), list(model.parameters())
    buffer = torch.empty(len(flat(model)))
    for step in range(STEPS):
        sgd.zero_grad(set_to_none=kind != "kept")
        if rank == 0 or step not in (1, 5, 8, 9):
            backward(model, rank, step)
            whole = torch.cat([p.grad.flatten() for p in own], out=buffer if kind == "buffer" else None)
        else:
            whole = torch.zeros_like(buffer)
        average(whole)
        for p, part in zip(own, whole.split([p.numel() for p in own]), strict=True):
            p.grad = part.view_as(p).clone()
        sgd.step()
        x = torch.full_like(buffer, 1.0 + rank)  # of the same size, but of no gradients
        dist.all_reduce(x)
        assert torch.equal(x, torch.full_like(x, world * (world + 1) / 2))
    assert alike(model)
    return steps_of()


@pytest.mark.parametrize("kind", ["none", "kept", "buffer"])
def test_a_rank_without_a_batch_sends_zeros(kind: str) -> None:
    backend = partial(compressing, "topk", density=0.05, outside=True)
    one, other = run(without_a_batch, 2, kind, backend=backend, group_timeout=10)
    assert one == other and len(one) == 1 and STEPS - 5 <= one[0] <= STEPS - 2, one


@on_ranks(2)
def test_ranks_that_disagree_about_what_follows_a_backward_pass_are_refused(rank: int, world: int) -> None:
    """The first of them would compress it. One has had a backward pass."""
    ours = sidcomp.backend.process_group(
        dist.group.WORLD, "topk", density=0.1, min_bytes=1000, outside=rank == 0
    )
    if rank == 1:
        backward(network(), rank, 0)
    with pytest.raises(sidcomp.RankError, match=r"rank 0 has .outside True., rank 1 has .outside False."):
        dist.all_reduce(torch.ones(3000), group=ours)


@on_ranks(2)
def test_a_step_ends_lists_on_several_groups_in_one_order(rank: int, world: int) -> None:
    """One model's gradients are averaged over six groups in turn: a step ends a list on each."""
    junk = [bytearray(10_000) for _ in range(7 * rank)]  # objects lie elsewhere on each rank
    groups = [
        sidcomp.backend.process_group(dist.new_group(), "topk", density=0.1, min_bytes=1000, outside=True)
        for _ in range(6)
    ]

    def after(module: nn.Module) -> None:
        for p, to in zip([p for p in module.parameters() if p.numel() > 250] * 3, groups, strict=True):
            dist.all_reduce(p.grad, group=to)

    train(network(), rank, 6, after)
    del junk
    assert [step for to in groups for step in steps_of(to)] == [4] * 6


@on_ranks(2, backend=partial(compressing, "topk", density=0.05))
def test_metrics_are_not_taken_for_gradients(rank: int, world: int) -> None:
    """DDP, and what a program all-reduces in each step beside it: a loss, a matrix of confusion."""
    model = DistributedDataParallel(network(width=200))
    with warned(sidcomp.SidcompWarning) as texts:

        def after(_: nn.Module) -> None:
            for n in (1, 400):
                dist.all_reduce(torch.ones(n))

        train(model, rank, STEPS, after)
    assert not texts


# ---- models that are gone


def made(kind: str, seed: int, world: int) -> tuple[nn.Module, Any]:
    """A model, and the group over which its gradients are averaged."""
    model = network(seed)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh), mesh.get_group("replicate")
    if kind in ("ddp", "turns"):
        return DistributedDataParallel(model), group()
    if kind == "buckets":
        return DistributedDataParallel(model, bucket_cap_mb=0.005), group()
    if kind == "small":  # a bucket of the later ones is smaller than min_bytes
        return DistributedDataParallel(
            nn.Sequential(nn.Linear(12, 12), *model), bucket_cap_mb=0.0019
        ), group()
    if kind != "outside":
        hooked(model, kind)
    return model, group()


def after_others(rank: int, world: int, kind: str, others: int) -> Any:
    """Trains a model after others of its size, which are gone."""
    counts = []
    for seed in range(3 - others, 4):
        model, replicas = made(kind, seed, world)
        train(model, rank, 6, average_flat if kind == "outside" else None)
        mine = flat(model)
        del model
        gc.collect()
        counts.append((len(replicas.programs), len(steps_of(replicas))))
    return mine, counts


@pytest.mark.parametrize("kind", ["ddp", "hsdp", "accumulated", "outside"])
def test_a_model_inherits_nothing_of_those_that_are_gone(kind: str) -> None:
    backend = partial(compressing, "topk", density=0.05, outside=kind == "outside")
    alone = run(after_others, 2, kind, 0, backend=backend)
    after = run(after_others, 2, kind, 3, backend=backend)
    for (theirs, _), (mine, counts) in zip(alone, after, strict=True):
        assert torch.equal(theirs, mine)
        assert kind == "hsdp" or counts[-1][1] == 1, counts  # each of its meshes has groups of its own


@on_ranks(2)
def test_what_models_took_is_freed_when_they_are_gone(rank: int, world: int) -> None:
    """Models of different sizes, one after the other: threads and descriptors after each."""
    ours = sidcomp.backend.process_group(group(), "topk", density=0.1, min_bytes=1000)
    counts: list[tuple[int, int]] = []
    for width in range(40, 46):
        model = DistributedDataParallel(network(width=width), process_group=ours)
        train(model, rank, 5)
        del model
        gc.collect()
        end = time.monotonic() + 10
        while len(counts) > 1 and held() > counts[1] and time.monotonic() < end:
            time.sleep(0.02)  # a thread frees what was closed
        counts.append(held())
    assert len(ours.programs) <= 2
    assert max(counts[2:]) <= counts[1], counts


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@on_ranks(2, backend=partial(compressing, "topk", density=0.1))
def test_a_module_that_is_wrapped_again_keeps_its_residual(rank: int, world: int) -> None:
    """A module in another DDP, as in each epoch of some programs: the residual of its buckets stays."""
    module = network()
    for _ in range(3):
        model = DistributedDataParallel(module, bucket_cap_mb=0.005)
        train(model, rank, 5)
        del model
        gc.collect()
    assert max(steps_of()) >= 7, steps_of()


# ---- checkpoints


def local(p: torch.Tensor) -> torch.Tensor:
    return (p.to_local() if isinstance(p, DTensor) else p).detach()


def with_checkpoint(rank: int, world: int, kind: str, saved: Any, at: int, last: int) -> Any:
    """Trains to the step `last`. Returns what a checkpoint of the step `at` has. saved: one to begin with."""
    models = [made(kind, seed, world)[0] for seed in range(2 if kind == "turns" else 1)]
    replicas = group()
    if kind == "hsdp":
        models[0], replicas = made(kind, 0, world)
    own = [p for model in models for p in model.parameters()]
    first, checkpoint_ = 0, b""
    if saved is not None:
        state = torch.load(io.BytesIO(saved[rank]), weights_only=True)
        replicas.load_state_dict(state["group"])
        for p, value in zip(own, state["parameters"], strict=True):
            local(p).copy_(value)
        first = at
    sgd = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(first, last):
        for model, one in zip(models, sgd, strict=True):
            one.zero_grad()
            backward(model, rank, step)
            if kind == "outside":
                average_flat(model)
            one.step()
        if step + 1 == at:
            file = io.BytesIO()
            torch.save({"group": replicas.state_dict(), "parameters": [local(p).clone() for p in own]}, file)
            checkpoint_ = file.getvalue()
    kept = [p for p in replicas.programs if p.known]
    return checkpoint_, torch.cat([flat(m) for m in models]), len(kept), [p.steps for p in kept]


def keeping(kind: str) -> Any:
    return partial(compressing, "topk", density=0.05, outside=kind == "outside")


@pytest.mark.parametrize("kind", ["ddp", "buckets", "turns", "hsdp", "accumulated", "outside"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(kind: str) -> None:
    whole = run(with_checkpoint, 2, kind, None, 6, 10, backend=keeping(kind))
    again = run(with_checkpoint, 2, kind, [x[0] for x in whole], 6, 10, backend=keeping(kind))
    for (_, right, programs, _), (_, mine, same, steps) in zip(whole, again, strict=True):
        assert torch.equal(right, mine)
        assert programs == same == (2 if kind == "turns" else 1) and steps == [4] * programs


def test_a_residual_waits_for_the_buckets_that_it_is_of() -> None:
    """DDP's first buckets here hold parameters that the later ones send uncompressed: one pass is exact."""
    whole = run(with_checkpoint, 2, "small", None, 6, 10, backend=keeping("small"))
    again = run(with_checkpoint, 2, "small", [x[0] for x in whole], 6, 10, backend=keeping("small"))
    for _, _, programs, steps in again:
        assert programs == 1 and steps == [3]


def of_images(rank: int, world: int, now: torch.memory_format) -> None:
    """A checkpoint of contiguous weights, loaded into the same module in the memory format `now`."""
    images = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(rank))

    def wrapped(form: torch.memory_format) -> DistributedDataParallel:
        torch.manual_seed(0)
        module = torch.nn.Conv2d(3, 8, (2, 3), bias=False).to(memory_format=form)
        inside = sidcomp.backend.process_group(dist.group.WORLD, "topk", density=0.05, min_bytes=16)
        return DistributedDataParallel(module, process_group=inside)

    def mean_of_residuals(model: DistributedDataParallel) -> torch.Tensor:
        (program,) = model.process_group.programs
        kept = program.state.state_dict()["residuals"]["weight"][0] / world
        dist.all_reduce(kept)
        return shaped(kept, model.module.weight).contiguous()

    model = wrapped(torch.contiguous_format)
    for _ in range(6):
        model.zero_grad()
        model(images).pow(2).mean().backward()
    before, saved = mean_of_residuals(model), model.process_group.state_dict()
    model = wrapped(now)
    model.process_group.load_state_dict(saved)
    (model(images) * 0.0).sum().backward()
    after = mean_of_residuals(model)
    assert bool(after.any()) and not torch.equal(after, before)
    torch.testing.assert_close(after + model.module.weight.grad, before, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("now", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_residual_is_loaded_into_another_memory_format(now: torch.memory_format) -> None:
    run(of_images, 2, now)


def refused(rank: int, world: int, saved: list[bytes]) -> None:
    """What is wrong with a state is found before anything changes."""
    replicas = group()
    good = torch.load(io.BytesIO(saved[rank]), weights_only=True)["group"]
    other = torch.load(io.BytesIO(saved[1 - rank]), weights_only=True)["group"]
    (program,) = good["passes"]
    (name, residual), *_ = program["state"]["residuals"].items()
    nan = {**program["state"], "residuals": {**program["state"]["residuals"], name: residual * torch.nan}}
    for wrong, said in (
        (other, f"state of rank {1 - rank} of 2, and this is rank {rank}"),
        ({**good, "format": 9}, "has format 9; this sidcomp"),
        ({**good, "passes": [{**program, "calls": program["calls"][:-1]}]}, "damaged"),
        ({**good, "passes": [{**program, "calls": [[-1, "float32", "cpu", False]]}]}, "damaged"),
        ({**good, "passes": [{**program, "state": nan}]}, name),
        ({**good, "after": good["passes"]}, "outside=True"),
        ([], "the list of states is empty"),
        (7, "no state of a process group"),
    ):
        with pytest.raises(sidcomp.CheckpointError, match=re.escape(said)):
            replicas.load_state_dict(wrong)
        assert not replicas.programs
    if rank:
        replicas.load_state_dict(good)
    model = DistributedDataParallel(network(), bucket_cap_mb=0.005)
    with pytest.raises(sidcomp.RankError, match=r"rank 0 has .loaded nothing., rank 1 has .loaded 1 "):
        backward(model, rank, 0)


def too_late(rank: int, world: int) -> None:
    train(DistributedDataParallel(network()), rank, 1)
    with pytest.raises(sidcomp.SetupError, match="call it before"):
        group().load_state_dict({})


def test_a_wrong_state_is_refused_and_changes_nothing() -> None:
    saved = [x[0] for x in run(with_checkpoint, 2, "buckets", None, 4, 4, backend=keeping("buckets"))]
    run(refused, 2, saved, backend=keeping("buckets"))
    run(too_late, 2, backend=keeping("buckets"))


def on_others(rank: int, world: int, saved: list[bytes]) -> torch.Tensor:
    """The sum of the residuals of all ranks, after loading those of another number of ranks."""
    states = [torch.load(io.BytesIO(x), weights_only=True)["group"] for x in saved]
    if len(states) == world:
        group().load_state_dict(states[rank])
    else:
        group().load_state_dict(states)
    model = DistributedDataParallel(network(), bucket_cap_mb=0.005)
    backward(model, rank, 0)
    (program,) = group().programs
    came = torch.cat([p.grad.flatten() for p in model.parameters()])
    kept = program.state.state_dict()["residuals"]
    left = torch.cat([kept[name][0] for name, _ in network().named_parameters()]) / world
    dist.all_reduce(left)
    exact = network()
    backward(exact, rank, 0)
    mine = torch.cat([p.grad.flatten() for p in exact.parameters()]) / world
    dist.all_reduce(mine)
    return came + left - mine  # what the residuals had added to the mean


def test_another_number_of_ranks_takes_over_all_residuals() -> None:
    saved = [x[0] for x in run(with_checkpoint, 2, "buckets", None, 6, 6, backend=keeping("buckets"))]
    same = run(on_others, 2, saved, backend=keeping("buckets"))
    more = run(on_others, 3, saved, backend=keeping("buckets"))
    assert same[0].abs().max() > 1e-3
    # 3 ranks get the sum of 2 ranks' residuals, of which each has the weight of a rank's gradient.
    assert torch.allclose(more[0], same[0] * 2 / 3, atol=1e-6)


# ---- ranks that were set up differently


@pytest.mark.parametrize(
    "other, said",
    [
        ({"codec": "off"}, "rank 0 has [codec topk], rank 2 has [codec off]"),
        ({"codec": "topk", "density": 0.2}, "[parameters {'density': 0.2}]"),
        ({"min_bytes": 10**6}, "rank 0 has [min_bytes 1000], rank 2 has [min_bytes 1000000]"),
    ],
)
@on_ranks(3)
def test_ranks_with_other_settings_are_refused_at_their_first_pass(
    rank: int, world: int, other: dict[str, Any], said: str
) -> None:
    """The last rank has other settings."""
    usual: dict[str, Any] = {"codec": "topk", "density": 0.1, "min_bytes": 1000}
    mine = {**usual, **other} if rank == world - 1 else usual
    if mine["codec"] == "off":
        del mine["density"]
    ours = sidcomp.backend.process_group(dist.group.WORLD, mine.pop("codec"), **mine)
    texts = []
    for step in range(2):
        model = DistributedDataParallel(network(), process_group=ours)
        with pytest.raises(sidcomp.RankError) as e:
            backward(model, rank, step)
        texts.append((e.value.rank, str(e.value)))
    assert [rank for rank, _ in texts] == [2, 2] and all(said in text for _, text in texts), texts
    assert "give every rank the same SIDCOMP" in texts[0][1] and not ours.programs


# ---- ranks that run out of data


@pytest.mark.parametrize("begins", [0, 5])
@pytest.mark.parametrize("batches", [0, 3])
@on_ranks(2, backend=partial(compressing, "topk", density=0.1), group_timeout=10)
def test_join_is_refused_on_every_rank(rank: int, world: int, begins: int, batches: int) -> None:
    """DDP's join(), from the first pass on or once its calls are learnt. batches: those of the last rank."""
    model = DistributedDataParallel(network())
    train(model, rank, begins)
    said = "sends zeros for ranks that have run out of data"
    with pytest.raises(sidcomp.UnsupportedError, match=said), model.join():
        train(model, rank, batches if rank else 5)


# ---- which call is which


def averaged(tensors: list[torch.Tensor], ops: list[Any] | None = None, to: Any = None) -> None:
    """All-reduces these tensors at the end of a backward pass, as a data-parallel wrapper may."""

    def reduce() -> None:
        works = [
            dist.all_reduce(x, op=op, async_op=True, group=to)
            for x, op in zip(tensors, ops or [dist.ReduceOp.SUM] * len(tensors), strict=True)
        ]
        for work in works:
            assert work.wait()
            assert work.is_completed() and work.is_success() and work.exception() is None
            work.get_future().wait()

    at_end(reduce)


def at_end(function: Any) -> None:
    """Runs a backward pass, and the function at its end."""
    x = torch.zeros(1, requires_grad=True)
    x.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(function))
    (2 * x).backward()


def steps_of(to: Any = None) -> list[int]:
    return [p.state.stats()["steps"] for p in getattr(to or group(), "programs", []) if p.state is not None]


@pytest.mark.parametrize("world", [2, 3])
@on_ranks(backend=partial(compressing, "topk", density=0.1))
def test_sums_conserve_what_came_in(rank: int, world: int) -> None:
    """Sums a constant gradient for many steps: what was received and what is kept is what came in."""
    n, steps = 4000, 9
    mine = torch.randn(n, generator=torch.Generator().manual_seed(rank))
    x, total = torch.empty(n), torch.zeros(n)
    for _ in range(steps):
        averaged([x.copy_(mine)])
        total += x
    state = group().programs[0].state
    assert steps_of() == [steps - 2]
    own, *for_all = next(iter(state.state_dict()["residuals"].values()))
    kept = own + world * sum(for_all)  # what two-shot keeps for all ranks is a part of the mean itself
    whole = mine * steps * 1.0
    dist.all_reduce(kept)
    dist.all_reduce(whole)
    # A residual is in units of a rank's contribution to a mean, as it is behind DDP's hook.
    assert float((total + kept / world - whole).abs().max() / whole.abs().max()) < 1e-5


@on_ranks(2, backend=partial(compressing, "topk", density=0.1))
def test_models_that_take_turns_have_states_of_their_own(rank: int, world: int) -> None:
    """Two models take turns, as a generator and its critic do, of the same sizes; a third size comes once."""
    one, two = torch.zeros(3000), torch.zeros(3000)
    for step in range(8):
        for x in (one, two):
            x.copy_(torch.randn(3000, generator=torch.Generator().manual_seed(10 * step + rank)))
            averaged([x, x[:1000]])
        if step == 5:
            averaged([torch.ones(777)])
    assert steps_of() == [6, 6]


@on_ranks(2, backend=partial(compressing, "topk", density=0.1))
def test_models_that_share_a_buffer_have_states_of_their_own(rank: int, world: int) -> None:
    """Two models of one size take turns, and flatten their gradients into the same buffer."""
    buffer = torch.empty(len(flat(network())))

    def average_in_buffer(p: nn.Parameter, own: list[nn.Parameter]) -> None:
        if p is own[0]:  # the last one to come
            torch.cat([p.grad.flatten() for p in own], out=buffer)
            dist.all_reduce(buffer)
            for p, part in zip(own, buffer.split([p.numel() for p in own]), strict=True):
                p.grad.copy_(part.view_as(p) / world)

    models = [network(0), network(1)]
    for model in models:
        own = list(model.parameters())
        for p in own:
            p.register_post_accumulate_grad_hook(partial(average_in_buffer, own=own))
    for _ in range(5):
        for model in models:
            train(model, rank, 1)
    assert all(map(alike, models))
    assert steps_of() == [3, 3]


def different(rank: int, world: int) -> Any:
    """A pass that has other calls, fewer of them, or more: from there on it is uncompressed."""
    said = io.StringIO()
    kinds = [torch.zeros(3000), torch.zeros(2000), torch.zeros(1000)]
    off = []
    with redirect_stderr(said):
        for step in range(14):
            for i, x in enumerate(kinds):
                x.copy_(
                    torch.randn(len(x), generator=torch.Generator().manual_seed(100 * step + 10 * i + rank))
                )
            sums = [x.clone() for x in kinds]
            for x in sums:
                dist.all_reduce(x)
            calls = kinds
            if step == 5:
                calls = kinds[:2]
            elif step == 8:
                calls = [kinds[0], kinds[2], kinds[1]]
            elif step == 11:
                calls = [*kinds, kinds[0].clone()]
            averaged(calls)
            off.append([not torch.equal(x, y) for x, y in zip(kinds, sums, strict=True)])
    state = group().programs[0].state
    assert state.error is None
    return off, steps_of(), said.getvalue()


def test_a_pass_that_differs_is_sent_uncompressed_from_there() -> None:
    for rank, (off, steps, said) in enumerate(run(different, 2, backend=partial(compressing, "int8"))):
        assert off[0] == off[1] == [False] * 3  # learning
        assert off[2] == off[4] == off[7] == off[10] == off[13] == [True] * 3
        assert off[5][:2] == [True] * 2  # the third tensor was not reduced
        assert off[8] == [True, False, False]
        assert off[11] == [True] * 3  # the fourth call came on top
        assert steps == [12]
        assert ("uncompressed: call 1 of a backward pass" in said) or ("it had 2 all-reduces" in said) or rank


@on_ranks(2, backend=partial(compressing, "int8"))
def test_the_pass_after_an_error_under_strict_is_compressed_again(rank: int, world: int) -> None:
    """Under strict() passes that differ are errors; the passes after them are none."""
    kinds = [torch.full((n,), 1.0 + rank) for n in (3000, 2000, 1000)]
    texts = []
    with sidcomp.strict():
        for step in range(9):
            calls = {4: kinds[:2], 6: [kinds[0], kinds[2], kinds[1]]}.get(step, kinds)
            try:
                averaged(calls)
            except Exception as e:
                texts.append(f"{step}: {e}")
    assert [text[:2] for text in texts] == ["4:", "6:"], texts
    assert "it had 2 all-reduces" in texts[0] and "call 1 of a backward pass" in texts[1]


def ambiguous(rank: int, world: int, kept: bool, passes: int) -> Any:
    """Tensors of one size that move, in passes of different lengths: the first call does not tell which."""
    said = io.StringIO()
    right, keep = [], []
    with redirect_stderr(said):
        for step in range(passes):
            tensors = [torch.full((2000,), float(rank + i)) for i in range(2 + step % 2)]
            averaged(tensors)
            right.append(all(torch.equal(x, torch.full_like(x, 1.0 + 2 * i)) for i, x in enumerate(tensors)))
            if kept:
                keep.append(tensors)
    return right, said.getvalue(), len(group().programs)


@pytest.mark.parametrize("kept", [False, True])
def test_where_it_cannot_tell_it_does_not_compress(kept: bool) -> None:
    """kept: no tensor is ever freed, so every pass has new ones."""
    passes = 40 if kept else 12
    backend = partial(compressing, "topk", density=0.01)
    for rank, (right, said, programs) in enumerate(run(ambiguous, 2, kept, passes, backend=backend)):
        assert right == [True] * passes
        line = "has compressed nothing" if kept else "cannot tell which"
        assert (line in said) == (rank == 0)
        assert programs <= 32


def late_to_free(rank: int, world: int, late: list[int]) -> Any:
    """Tensors that move. On the last rank those of the passes `late` are freed only after the next one."""
    said = io.StringIO()
    with redirect_stderr(said):
        for step in range(8):
            averaged(tensors := [torch.ones(3000)])
            kept = tensors if step in late and rank == world - 1 else None  # noqa: F841
            del tensors
    return steps_of(), len(group().programs), said.getvalue()


@pytest.mark.parametrize(("late", "steps"), [([], 6), ([0], 5), ([0, 2], 5), ([0, 1], 4), ([0, 1, 2], 3)])
def test_tensors_that_are_freed_late_are_not_taken_for_another_models(late: list[int], steps: int) -> None:
    backend = partial(compressing, "topk", density=0.1)
    one, other = run(late_to_free, 2, late, backend=backend)
    assert one[:2] == other[:2] and "cannot tell" not in other[2]
    (had,), programs, said = one
    assert in_time(had, steps + 2) and programs == 1, said


@on_ranks(2, backend=partial(compressing, "topk", density=0.01))
def test_models_whose_tensors_move_in_turns_are_not_mixed(rank: int, world: int) -> None:
    """Two models take turns. Their tensors move, and each one's exist until it has its next ones."""
    held: list[Any] = [None, None]
    for step in range(16):
        averaged(new := [torch.full((3000,), float(rank + step % 2))])
        assert torch.equal(new[0], torch.full((3000,), 1.0 + 2 * (step % 2)))
        held[step % 2] = new
    assert sum(steps_of()) == 0


def nothing_twice(rank: int, world: int, room: str) -> str:
    first = nothing_to_compress(rank, world, "small")
    dist.destroy_process_group()
    dist.init_process_group("sidcomp", init_method=f"file://{room}/second", rank=rank, world_size=world)
    return first + nothing_to_compress(rank, world, "small")


def test_a_second_run_in_one_process_is_told_it_too(tmp_path: Path) -> None:
    said, other = run(nothing_twice, 2, str(tmp_path), backend=partial(compressing, "topk"))
    assert said.count("has compressed nothing in 20 backward passes") == 2 and not other


def nothing_to_compress(rank: int, world: int, kind: str) -> str:
    said = io.StringIO()
    model: nn.Module
    if kind == "sharded":
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "activations":
        model = network()
        model[0].register_full_backward_hook(lambda *x: dist.all_reduce(x[2][0].clone()))
    else:
        model = DistributedDataParallel(network(width=5))
    with redirect_stderr(said):
        for step in range(25):
            backward(model, rank, step)
    assert not group().programs
    return said.getvalue()


@pytest.mark.parametrize(
    "kind, advice",
    [
        ("sharded", "use sidcomp.compress for HSDP"),
        ("small", "min_bytes=1000"),
        ("activations", "hooks of the gradients of torch.nn.Parameter"),
    ],
)
def test_it_says_that_nothing_can_be_compressed(kind: str, advice: str) -> None:
    for rank, said in enumerate(run(nothing_to_compress, 2, kind, backend=partial(compressing, "topk"))):
        assert said.count("has compressed nothing in 20 backward passes") == (rank == 0)
        assert (advice in said) == (rank == 0)


@on_ranks(2, backend=partial(compressing, "topk", density=0.1))
def test_strict_makes_a_fallback_an_error(rank: int, world: int) -> None:
    x = [torch.ones(3000), torch.ones(2000)]
    for _ in range(4):
        averaged(x)
    said = "uncompressed: it had 1 all-reduces"
    with sidcomp.strict(), pytest.raises((RuntimeError, sidcomp.StrictError), match=said):
        averaged(x[:1])
    averaged(x)
    assert steps_of() == [4]


# ---- groups


def rules(rank: int, world: int, compressed: set[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    unnamed = dist.new_group([0, 1, 2, 3])
    mine = dist.new_group([0, 1, 2, 3], group_desc="mine")
    for name, to in {
        "default": None,
        "replicate": mesh.get_group("replicate"),
        "tensor": mesh.get_group("tensor"),
        "unnamed": unnamed,
        "mine": mine,
    }.items():
        x = torch.ones(3000)
        for _ in range(4):
            averaged([x], to=to)
        assert len(steps_of(to)) == (name in compressed), name


def test_groups_compress_by_the_names_of_their_mesh_dimensions() -> None:
    usual: dict[str, Any] = {"density": 0.1}
    run(rules, 4, {"default", "replicate"}, backend=partial(compressing, "topk", **usual))
    run(rules, 4, {"default", "mine"}, backend=partial(compressing, "topk", **usual, groups=["mine"]))


@on_ranks(3)
def test_a_group_around_ones_own(rank: int, world: int) -> None:
    """A group of one's own, of the last ranks."""
    members = list(range(1, world))
    inner = dist.new_group(members)
    if rank == 0:
        return
    ours = sidcomp.backend.process_group(inner, "topk", density=0.1, min_bytes=1000)
    model = DistributedDataParallel(network(), process_group=ours)
    train(model, rank)
    assert dist.get_process_group_ranks(ours) == members and dist.get_backend(ours) == "sidcomp"
    mine = flat(model)
    dist.broadcast(other := mine.clone(), 1, group=inner)
    assert steps_of(ours) == [STEPS - 2] and torch.equal(mine, other)


def failing(rank: int, world: int) -> str:
    """Rank 1 ends in the middle of training: the other one is told by the Work, as by torch's."""
    x = torch.ones(3000)
    for _ in range(4):
        averaged([x])
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError) as e:
        for _ in range(3):
            averaged([x])
    return str(e.value)


def test_an_error_of_the_exchange_reaches_wait() -> None:
    text = run(failing, 2, dying=[1], backend=partial(compressing, "topk", density=0.1))[0]
    assert "call0:3000" in text or "Connection" in text or "rank" in text


def late(rank: int, world: int) -> str:
    x = torch.ones(3000)
    for _ in range(4):
        averaged([x])
    if rank == 1:
        time.sleep(1.5)
        averaged([x])
        return ""
    caught = []

    def reduce() -> None:
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        try:
            work.wait(timedelta(seconds=0.2))
        except RuntimeError as e:
            caught.append(str(e))
        work.wait()

    at_end(reduce)
    return caught[0]


def test_a_wait_with_a_timeout() -> None:
    assert "timed out after 0.2 s" in run(late, 2, backend=partial(compressing, "topk", density=0.1))[0]


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"codec": "auto"}, "encodes each all-reduce for itself"),
        ({"codec": "topk", "groups": "replicate", "min_bytes": -1}, "min_bytes"),
        ({"codec": "topk", "density": 2.0}, "density"),
        ({"codec": "topkk"}, "topkk"),
        ({"codec": "topk", "exclude": ["<128KB", "1-D"]}, "flat tensors.*'1-D'"),
        ({"codec": "topk", "policy": [("head.*", "none")]}, r"'head\.\*'.*sidcomp.compress"),
    ],
)
def test_a_wrong_configuration_is_found_at_once(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises((sidcomp.ArgumentError, sidcomp.ParameterError), match=said):
        sidcomp.backend.configure(**wrong)


def from_environment(rank: int, world: int) -> Any:
    train(DistributedDataParallel(network()), rank)
    return [repr(p.state) for p in group().programs if p.state is not None]


def environment(text: str) -> str:
    import sidcomp.doors.backend.process_group as door

    os.environ["SIDCOMP"] = text
    return door.BACKEND


def test_the_environment_variable() -> None:
    for text, said in (
        ("topk:density=0.05,values=log4,min_bytes=1KB", "topk density=0.05 values=log4"),
        ("preset:redsync,density=0.02,min_bytes=1KB,full_every=0", "redsync density=0.02"),
        ("topk:outside=True,min_bytes=1KB", "topk"),
        ("off", None),
    ):
        for states in run(from_environment, 2, backend=partial(environment, text)):
            assert [said in s for s in states] == ([True] if said else [])
    with pytest.raises(Exception, match=r"SIDCOMP='topk:density'.*key=value"):
        run(from_environment, 1, backend=partial(environment, "topk:density"))


def test_none_is_a_memory_and_a_codec_in_the_environment() -> None:
    codec, arguments = specification.parse("topk:memory=none,exchange=none")
    assert arguments["exchange"] is None
    assert "memory='none'" in repr(sidcomp.State(codec, **arguments))
    assert specification.parse("preset:redsync,codec=none")[0] == "none"


# ---- an optimizer that the codec does not suit


def trained(rank: int, world: int, how: str) -> list[str]:
    """The warnings of some steps. how: what averages, or what steps."""
    kinds: dict[str, Any] = {"SGD": torch.optim.SGD}
    kind = kinds.get(how, torch.optim.AdamW)
    module, second = network(), network(1, 50)
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(module, mesh=mesh)
    if how == "hooks":
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    view = how == "view"
    ddp = how not in ("hsdp", "hooks")
    model = DistributedDataParallel(module, gradient_as_bucket_view=view) if ddp else module
    others = DistributedDataParallel(second) if how in ("second", "later") else second
    mine = kind(model.parameters(), lr=0.01)
    its = torch.optim.Adam(others.parameters(), lr=0.01)
    if how in ("other", "later"):
        mine = torch.optim.SGD(model.parameters(), lr=0.01)
    with warned(sidcomp.SidcompWarning) as texts, sidcomp.strict(how == "strict"):
        raised = []
        for step in range(10):
            backward(model, rank, step)
            before = flat(model)
            try:
                mine.step()
            except sidcomp.StrictError as e:
                raised.append(str(e))
                assert torch.equal(flat(model), before)
            mine.zero_grad()
            if how in ("other", "second", "later"):
                if how != "later" or step > 4:  # its optimizer has stepped before its gradients come
                    backward(others, rank, step)
                its.step()
                its.zero_grad()
    assert any(p.state is not None and p.steps > 2 for p in group().programs)
    looks = len(_global_optimizer_pre_hooks)
    assert looks == (1 if how in ("SGD", "other") else 0)
    return raised + texts


@pytest.mark.parametrize("how", ["plain", "view", "hooks", "hsdp", "second", "later", "strict"])
def test_adam_beside_a_codec_that_nobody_named_is_named_once(how: str) -> None:
    first, other = run(trained, 2, how, backend=compressing)
    assert len(first) == 1 and len(other) == (1 if how == "strict" else 0)
    kind = "Adam" if how == "later" else "AdamW"
    assert f"this model is trained with {kind}, and process group" in first[0]
    assert "uses topk density=0.084" in first[0] and "6.3 % with AdamW" in first[0]
    assert "name a codec, SIDCOMP=int4 in the environment, or in configure() or process_group()" in first[0]


@pytest.mark.parametrize(
    "how, named",
    [
        ("SGD", {}),
        ("other", {}),
        ("named", {"codec": "int4"}),
        ("named", {"density": 0.05}),
        ("named", {"accuracy": "any"}),
    ],
)
def test_nothing_is_said_of_an_optimizer_that_the_codec_suits(how: str, named: dict[str, Any]) -> None:
    for said in run(trained, 2, how, backend=partial(compressing, **named)):
        assert not said


# ---- programs of torch's own


def other_programs(rank: int, world: int, room: str) -> Any:
    """ZeroRedundancyOptimizer, torch.distributed.checkpoint, `replicate`, plain FSDP2, averages of models."""
    out = []
    ddp = DistributedDataParallel(network())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(6):
        zero.zero_grad()
        backward(ddp, rank, step)
        zero.step()
    out.append(flat(ddp))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    model = fully_shard(network(1), mesh=mesh)
    train(model, rank, 3)
    checkpoint.save(model.state_dict(), checkpoint_id=f"{room}/{dist.get_backend()}")
    again = fully_shard(network(2), mesh=mesh)
    state = again.state_dict()
    checkpoint.load(state, checkpoint_id=f"{room}/{dist.get_backend()}")
    again.load_state_dict(state)
    out += [flat(model), flat(again)]
    copies = init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",))
    model = replicate(network(3), mesh=copies)
    train(model, rank, 6)
    out.append(flat(model))
    average = network(rank)
    average_parameters(average.parameters(), process_group=dist.group.WORLD)
    out.append(flat(average))
    return out, [
        len(p.calls) for g in dist.distributed_c10d._world.pg_map for p in getattr(g, "programs", [])
    ]


def test_programs_of_torchs_own(tmp_path: Any) -> None:
    plain = run(other_programs, 2, str(tmp_path))
    ours = run(other_programs, 2, str(tmp_path), backend=partial(compressing, "none"))
    for (theirs, _), (mine, calls) in zip(plain, ours, strict=True):
        assert [torch.equal(a, b) for a, b in zip(theirs, mine, strict=True)] == [True] * len(theirs)
        assert torch.equal(mine[1], mine[2])
        assert len(calls) >= 2  # of DDP, and of replicate
