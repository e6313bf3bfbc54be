"""The backend "sidcomp" under FSDP2: reduce-scatters and all-gathers are compressed where asked."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from functools import partial
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import run
from sidcomp.doors.backend.configuration import current
from sidcomp.doors.backend.works import Decoding
from test_fsdp import alike, backward, flat, sharded
from test_process_group import Summed, at_end, both_places, compressing, group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS = 8


def train(model: nn.Module, rank: int, steps: int = STEPS) -> list[float]:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        sgd.zero_grad()
        losses.append(backward(model, rank, step))
        sgd.step()
    return losses


def scatters(to: Any = None) -> list[Any]:
    return [x for p in getattr(to or group(), "programs", []) for x in p.scatters.values()]


def gathers(to: Any = None) -> list[Any]:
    return list(getattr(to or group(), "gathers", {}).values())


def ratios(made: list[Any]) -> list[float]:
    return [x.dense_bytes / x.sent_bytes for x in made]


def unmodified(rank: int, world: int, kind: str) -> Any:
    """What an unmodified FSDP2 program does over this backend."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    said = io.StringIO()
    with redirect_stderr(said):
        model = sharded(init_device_mesh("cpu", (world,)), **({"mp_policy": bf16} if kind == "bf16" else {}))
        if kind == "other calls":
            model.set_separate_reduce_scatter_group(True)
            model._set_unshard_async_op(True)
        losses = train(model, rank)
    for p in model.parameters():  # exact, whatever was gathered for the passes
        shards = [torch.empty_like(x) for x in p.full_tensor().chunk(world)]
        if p.to_local().shape == shards[0].shape and len(p) % world == 0:
            dist.all_gather(shards, p.to_local().detach())
            assert torch.equal(torch.cat(shards), p.full_tensor())
    return flat(model), losses, ratios(scatters()), ratios(gathers()), said.getvalue()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_codec_none_has_the_bits_of_plain_fsdp2(world: int) -> None:
    plain = run(unmodified, world, "")
    ours = run(
        unmodified, world, "", backend=partial(compressing, "none", reduce_scatter="none", all_gather="none")
    )
    for (theirs, _, _, _, _), (mine, _, made, gathered, _) in zip(plain, ours, strict=True):
        assert torch.equal(theirs, mine)
        assert not made  # there is nothing to compress
        assert len(gathered) == (2 if world > 1 else 0)  # the root's is smaller than min_bytes
    if world == 2:  # all of it is sent, in another form; float32 sums of two do not depend on the order
        all_of_it = "topk:density=1.0,memory=residual"
        whole = run(unmodified, 2, "", backend=partial(compressing, "none", reduce_scatter=all_of_it))
        for (theirs, *_), (mine, _, made, _, _) in zip(plain, whole, strict=True):
            assert torch.equal(theirs, mine) and len(made) == 2


def test_int8_trains_and_says_so() -> None:
    asked = partial(compressing, "int8", reduce_scatter="int8", all_gather="int8:exclude=1-D")
    plain = run(unmodified, 2, "")
    ours = run(unmodified, 2, "", backend=asked)
    for rank, ((theirs, their_losses, *_), (mine, losses, made, gathered, said)) in enumerate(
        zip(plain, ours, strict=True)
    ):
        assert not torch.equal(theirs, mine)
        assert losses[-1] == pytest.approx(their_losses[-1], rel=0.1)
        assert len(made) == 2 and max(made) > 2.5 and len(gathered) == 2 and max(gathered) > 1.5
        assert ("compresses 2 reduce-scatters of each backward pass" in said) == (rank == 0)
        assert ("rounds the parameters that FSDP2 gathers" in said) == (rank == 0)
    both = run(unmodified, 2, "other calls", backend=asked)
    for (mine, *_), (same, _, made, gathered, _) in zip(ours, both, strict=True):
        assert torch.equal(mine, same)  # another group, and asynchronous gathers
        assert not made and len(gathered) == 2  # `made` are those of the default group


@pytest.mark.slow
def test_bfloat16() -> None:
    asked = partial(compressing, "int8", reduce_scatter="int8", all_gather="fp8")
    plain, ours = run(unmodified, 2, "bf16"), run(unmodified, 2, "bf16", backend=asked)
    for (_, their_losses, *_), (_, losses, made, gathered, _) in zip(plain, ours, strict=True):
        assert losses[-1] == pytest.approx(their_losses[-1], rel=0.1)
        assert max(made) > 1.5 and max(gathered) > 1.3


# ---- the reduce-scatter


def scattered(tensors: list[torch.Tensor], *ops: Any) -> list[torch.Tensor]:
    """Returns the shards of this rank of what a sharding wrapper reduce-scatters in a backward pass."""
    out: list[torch.Tensor] = []

    def scatter() -> None:
        works = []
        for x, op in zip(tensors, ops, strict=True):
            out.append(torch.empty(len(x) // dist.get_world_size(), dtype=x.dtype))
            works.append(dist.reduce_scatter_tensor(out[-1], x, op=op, async_op=True))
        for i, work in enumerate(works):
            if i == 0 and isinstance(work, Decoding):  # Gloo's own has no future
                assert torch.equal(work.get_future().wait()[0], out[0])
            work.wait()
            if isinstance(work, Decoding):
                assert work.is_completed() and work.is_success() and work.exception() is None

    at_end(scatter)
    return out


SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def drawn(rank: int, step: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def bounded(rank: int, world: int) -> Any:
    """The error of each step's shards over the bound: half a step of int8 for each rank's contribution."""
    n, kinds = 1200 * world, (torch.float32, torch.bfloat16)
    worst, exact = 0.0, []
    mine = [torch.empty(n, dtype=dtype) for dtype in kinds]
    for step in range(5):
        for x, dtype in zip(mine, kinds, strict=True):
            x.copy_(drawn(rank, step, n, dtype))
        out = scattered(mine, SUM, AVG)
        for i, (got, dtype) in enumerate(zip(out, kinds, strict=True)):
            each = [drawn(r, step, n, dtype).double() for r in range(world)]
            right = torch.stack(each).sum(0).chunk(world)[rank] / (world if i else 1)
            steps = sum(float(x.abs().max()) for x in each) / 127 / 2 / (world if i else 1)
            last = sum(float(x.abs().max()) for x in each) * 2.0 ** (-8 if i else -22)  # rounding of the sum
            error = float((got.double() - right).abs().max())
            if dtype is torch.float32:
                exact.append(error <= last)
            worst = max(worst, error / (steps * 1.01 + last))
    return worst, exact


def test_the_error_of_int8_is_bounded() -> None:
    for worst, exact in run(bounded, 3, backend=partial(compressing, "int8", reduce_scatter="int8")):
        assert worst <= 1
        assert exact == [True] * 2 + [False] * 3  # two passes to learn


def of_activations(rank: int, world: int) -> Any:
    """Sequence parallelism: the backward pass of a gather of activations reduce-scatters their gradients."""
    said, off = io.StringIO(), []

    def scatter(grad: torch.Tensor) -> torch.Tensor:
        whole, part = grad.flatten(), torch.empty(grad.numel() // world)
        dist.reduce_scatter_tensor(part, whole.clone())
        dist.all_reduce(whole, group=exact)
        off.append(not torch.equal(part, whole.chunk(world)[rank]))
        return grad

    exact = dist.new_group(backend="gloo")
    with redirect_stderr(said):
        for step in range(6):
            x = drawn(rank, step, 2400, torch.float32).requires_grad_()
            Summed.apply(x * 2, scatter).square().sum().backward()
    return off, scatters(), said.getvalue()


def test_reduce_scatters_of_activations_stay_exact_and_it_says_so() -> None:
    asked = partial(compressing, "int8", reduce_scatter="int8")
    for rank, (off, made, said) in enumerate(run(of_activations, 2, backend=asked)):
        assert off == [False] * 6 and not made
        assert said.count("leaves a backward pass's all-reduces and reduce-scatters exact") == (rank == 0)


def conserved(rank: int, world: int) -> Any:
    """What was received and what all ranks keep is what came in."""
    n, steps = 1200, 7
    came = [torch.zeros(n * world), torch.zeros(n * world)]
    received = [torch.zeros(n), torch.zeros(n)]
    mine = [torch.empty(n * world) for _ in range(2)]
    for step in range(steps):
        for i, x in enumerate(mine):
            x.copy_(drawn(rank, step, n * world, torch.float32) * (i + 1))
        for i, (got, x) in enumerate(zip(scattered(mine, SUM, AVG), mine, strict=True)):
            came[i] += x
            received[i] += got * (world if i else 1)
    program = group().programs[0]
    off = []
    for one, x, shard in zip(program.scatters.values(), came, received, strict=True):
        assert one.step == steps - 2
        kept = one.state_dict()["residuals"].sum(1).flatten()
        assert kept.any()
        dist.all_reduce(kept)
        dist.all_reduce(x)
        right = x.chunk(world)[rank]
        off.append(float((shard + kept.chunk(world)[rank] - right).abs().max() / right.abs().max()))
    return off


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_error_feedback_conserves(world: int) -> None:
    asked = partial(compressing, "int8", reduce_scatter="topk:density=0.1+memory=residual")
    assert max(max(off) for off in run(conserved, world, backend=asked)) < 1e-5


def in_turns(rank: int, world: int) -> Any:
    """Two models of equal sizes; a pass that has other calls."""
    said = io.StringIO()
    mesh = init_device_mesh("cpu", (world,))
    one, two = sharded(mesh), sharded(mesh)
    with redirect_stderr(said):
        for step in range(4):
            backward(one, rank, step)
            backward(two, rank, step)
        one[2](torch.ones(4, 40)).sum().backward()
    return [len(p.scatters) for p in group().programs], [x.step for x in scatters()], said.getvalue()


def test_models_that_take_turns_have_residuals_of_their_own() -> None:
    asked = partial(compressing, "int8", reduce_scatter="topk:density=0.1,memory=residual")
    for rank, (programs, steps, said) in enumerate(run(in_turns, 2, backend=asked)):
        assert programs[:2] == [2, 2] and steps == [3, 2, 2, 2]
        assert ("uncompressed: it had 1 calls, and earlier passes had 2" in said) == (rank == 0)
        assert "cannot tell which" not in said


def test_everything_else_passes_untouched() -> None:
    plain = run(both_places, 2)
    ours = run(both_places, 2, backend=partial(compressing, "topk", reduce_scatter="int8", all_gather="int8"))
    for theirs, mine in zip(plain, ours, strict=True):
        for a, b in zip(theirs, mine, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and len(a) == len(b)


# ---- the all-gather


class Seen(nn.Linear):
    """Notes its weight in the forward and in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__.setdefault("seen", []).append(self.weight.detach().clone())
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.__dict__["seen"].append(self.weight.detach().clone()))
        return y * 1.0


def whole(layer: Seen) -> torch.Tensor:
    return layer.weight.full_tensor().detach().clone()


def gathered(rank: int, world: int, options: dict[str, Any]) -> None:
    """What the passes compute with, and what other gathers get."""
    said = io.StringIO()
    with redirect_stderr(said):
        _gathered(world, options)
    assert ("gathers some parameters as they are" in said.getvalue()) == (rank == 0)


def _gathered(world: int, options: dict[str, Any]) -> None:
    layers = [Seen(60, 60) for _ in range(3)]
    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.weight.copy_(torch.randn(60, 60, generator=torch.Generator().manual_seed(i)))
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (world,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        before = [whole(layer) for layer in layers]
        model(torch.ones(4, 60)).square().sum().backward()
        for layer, right in zip(layers, before, strict=True):
            forward, back = layer.__dict__.pop("seen")
            assert torch.equal(forward, back)
            assert not torch.equal(forward, right)
            assert (forward - right).abs().max() <= right.abs().max() / 127 * 1.01
            everyone = [torch.empty_like(forward) for _ in range(world)]
            dist.all_gather(everyone, forward)
            assert all(torch.equal(x, forward) for x in everyone)
            assert torch.equal(whole(layer), right)
        sgd.step()
        sgd.zero_grad()
    # A checkpoint that gathers by unshard(), after which the next passes gather anew.
    right = whole(layers[1])
    layers[1].unshard()
    assert torch.equal(layers[1].weight, right)
    layers[1].reshard()
    model(torch.ones(4, 60)).sum().backward()
    assert not torch.equal(layers[1].__dict__["seen"][0], right)
    assert torch.equal(*layers[1].__dict__.pop("seen"))
    # The same between a forward and its backward pass.
    loss = model(torch.ones(4, 60)).sum()
    model[0].unshard()
    model[0].reshard()
    loss.backward()
    for layer in layers:
        assert torch.equal(*layer.__dict__.pop("seen")[-2:])
    # A forward pass over what the program has gathered: its backward pass gathers the same bits.
    right = whole(layers[1])
    handle = layers[1].unshard(async_op=True)
    loss = model(torch.ones(4, 60)).sum()
    handle.wait()
    loss.backward()
    assert torch.equal(layers[1].__dict__["seen"][0], right) and torch.equal(*layers[1].__dict__.pop("seen"))
    model(torch.ones(4, 60)).sum().backward()
    assert torch.equal(*layers[1].__dict__.pop("seen"))
    # A forward pass that fails leaves nothing behind that makes a checkpoint inexact.
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 61))
    model[0].reshard()
    right = whole(layers[0])
    model[0].unshard()
    assert torch.equal(layers[0].weight, right)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_gathered(world: int) -> None:
    asked = partial(compressing, "int8", all_gather="int8:rounding=stochastic")
    run(gathered, world, {}, backend=asked)


def other_shards(rank: int, world: int) -> list[float]:
    """With shards of another mesh after the forward pass, the backward pass gathers what was rounded."""
    model = nn.Sequential(Seen(60, 60))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=2)
    model(torch.ones(4, 60)).sum().backward()
    assert torch.equal(*model[0].__dict__["seen"])
    return ratios(gathers())


@pytest.mark.slow
def test_other_shards_after_the_forward_pass() -> None:
    for found in run(other_shards, 4, backend=partial(compressing, "int8", all_gather="int8")):
        assert len(found) == 1 and found[0] > 3


# ---- groups, and what is refused


def named(rank: int, world: int, dimension: str) -> Any:
    """HSDP, whose shards are over a mesh dimension of this name."""
    said = io.StringIO()
    with redirect_stderr(said):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", dimension))
        model = sharded(mesh)
        losses = train(model, rank)
    assert alike(model, mesh.get_group("replicate"))
    shards, replicas = mesh.get_group(dimension), mesh.get_group("replicate")
    states = [p.state for p in replicas.programs if p.state is not None]
    others = [p.state for p in shards.programs if p.state is not None]
    assert not scatters(replicas) and not gathers(replicas) and not others
    return len(scatters(shards)), len(gathers(shards)), len(states), losses[-1] < losses[0], said.getvalue()


@pytest.mark.parametrize(
    "dimension, groups, expected",
    [
        ("shard", None, (2, 2, 1)),
        pytest.param("mine", None, (0, 0, 1), marks=pytest.mark.slow),
        pytest.param("mine", ["mine"], (2, 2, 0), marks=pytest.mark.slow),
    ],
)
def test_shard_groups_compress_by_name(dimension: str, groups: Any, expected: Any) -> None:
    asked = partial(compressing, "int8", groups=groups, reduce_scatter="int8", all_gather="int8")
    for *found, learns, said in run(named, 4, dimension, backend=asked):
        assert tuple(found) == expected and learns
        if "mine" in said and groups is None:
            assert "passes its reduce-scatters and all-gathers uncompressed, because 'mesh_mine'" in said


def around(rank: int, world: int) -> Any:
    """A group of one's own, without names; the other group does not compress, because nobody asked."""
    assert not getattr(group(), "configuration", None) or group().configuration.reduce_scatter is None
    ours = sidcomp.backend.process_group(
        dist.new_group(list(range(world))), "int8", min_bytes=1000, reduce_scatter="int8", all_gather="int8"
    )
    train(sharded(DeviceMesh.from_group(ours, "cpu")), rank)
    return len(scatters(ours)), len(gathers(ours)), len(scatters()), len(gathers())


def test_a_group_around_ones_own() -> None:
    assert run(around, 2) == [(2, 2, 0, 0)] * 2


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"reduce_scatter": "int9"}, "reduce_scatter='int9': unknown codec 'int9'"),
        ({"reduce_scatter": "int8:bits=3"}, "reduce_scatter=.*unknown parameter 'bits'"),
        ({"reduce_scatter": "int8:memory"}, "reduce_scatter=.*'memory' is not key=value"),
        ({"reduce_scatter": ":density=0.1"}, "reduce_scatter=.*name a codec"),
        ({"reduce_scatter": 8}, "reduce_scatter=8: give a text"),
        ({"reduce_scatter": "topk:density=0.1"}, "reduce_scatter=.*add memory=residual"),
        ({"reduce_scatter": "powersgd"}, "reduce_scatter=.*takes several all-reduces"),
        ({"reduce_scatter": "marsit:memory=compensation"}, "reduce_scatter=.*what all ranks received"),
        ({"all_gather": "topk"}, "all_gather='topk': codec 'topk' does not send a rounded value"),
        ({"all_gather": "int8:memory=residual"}, "all_gather=.*parameters have no memory"),
        ({"all_gather": "int8:exclude=head.*"}, r"all_gather=.*exclude='head\.\*'.*not names"),
        ({"codec": "off", "all_gather": "int8"}, "codec 'off' compresses nothing"),
    ],
)
def test_a_wrong_configuration_is_found_at_once(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises((sidcomp.ArgumentError, sidcomp.ParameterError, sidcomp.UnsupportedError), match=said):
        sidcomp.backend.configure(**{"codec": "int8", **wrong})


def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "topk:density=0.05,reduce_scatter=topk:density=0.1+memory=residual,all_gather=fp8"
    monkeypatch.setenv("SIDCOMP", text)
    found = current()
    assert found.reduce_scatter == ("topk", "residual", {"density": 0.1}, 0, ())
    assert found.all_gather is not None and found.all_gather.codec == "fp8"
    assert found.codec == "topk" and found.arguments == {"density": 0.05} and found.groups is None
