"""sidcomp.fsdp.compress: FSDP2, HSDP and `replicate`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from heard import warned
from local_training import alike, backward, flat, network, train
from sidcomp.doors.ddp import register
from sidcomp.frameworks.distributed_checkpoint import Entries
from torch import nn
from torch.distributed import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as checkpoint_of

STEPS = 8


def sharded(mesh: Any, width: int = 40, **options: Any) -> nn.Module:
    """A model of three parameter groups: two of a layer each, and the root's."""
    model = network(width=width)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def hybrid(rank: int, world: int, codec: str | None, arguments: dict[str, Any], how: dict[str, Any]) -> Any:
    """Trains HSDP on (world / 2) x 2 ranks; codec None: as torch does it."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"mp_policy": how["mp_policy"]} if "mp_policy" in how else {}
    if how.get("offload"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = sharded(mesh, **options)
    state = sidcomp.State(codec, **arguments) if codec else None
    if state is not None:
        sidcomp.fsdp.compress(model, state)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    micro = how.get("micro", 1)
    for step in range(how.get("steps", STEPS)):
        sgd.zero_grad()
        for i in range(micro):
            last = i == micro - 1
            if how.get("accumulate") == "no sync":
                model.set_requires_gradient_sync(last)
            elif how.get("accumulate") == "reduce-scatter only":
                model.set_requires_all_reduce(last)
            model.set_is_last_backward(last)
            losses.append(backward(model, rank, micro * step + i, 1 / micro))
        sgd.step()
    stats = state.stats() if state is not None else {}
    assert alike(model, mesh.get_group("replicate"))
    if state is not None:
        state.close()
    return flat(model), losses, stats


SLOW = pytest.mark.slow


@pytest.mark.parametrize("world", [pytest.param(2, marks=SLOW), 4, pytest.param(8, marks=SLOW)])
def test_codec_none_has_the_bits_of_plain_hsdp(world: int) -> None:
    plain = run(hybrid, world, None, {}, {})
    for groups in ("bucket", "model"):
        # The parameters and gradients of CPU ranks are where the offload puts them already.
        ours = run(hybrid, world, "none", {"groups": groups}, {"offload": groups == "model"})
        for (theirs, _, _), (mine, _, stats) in zip(plain, ours, strict=True):
            # With four replicas or more, Gloo's order of summation depends on the length of the vector.
            if groups == "bucket" or world < 8:
                assert torch.equal(theirs, mine)
            torch.testing.assert_close(theirs, mine)
            assert stats["steps"] == STEPS and len(stats["groups"]) == (3 if groups == "bucket" else 1)


@pytest.mark.parametrize(
    "accumulate, bf16",
    [
        ("every pass", True),
        ("no sync", False),
        ("reduce-scatter only", True),
        pytest.param("every pass", False, marks=SLOW),
        pytest.param("no sync", True, marks=SLOW),
        pytest.param("reduce-scatter only", False, marks=SLOW),
    ],
)
def test_accumulation_and_mixed_precision_have_the_bits_of_plain_hsdp(accumulate: str, bf16: bool) -> None:
    how: dict[str, Any] = {"micro": 3, "accumulate": accumulate, "steps": 4}
    if bf16:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plain = run(hybrid, 4, None, {}, how)
    ours = run(hybrid, 4, "none", {"groups": "model"}, how)
    for (theirs, _, _), (mine, _, _) in zip(plain, ours, strict=True):
        assert torch.equal(theirs, mine)


def columns(p: torch.Tensor) -> Shard:
    return Shard(min(1, p.dim() - 1))


@on_ranks(4)
def test_shards_of_columns_have_the_bits_of_plain_hsdp(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    trained = []
    for codec in (None, "none"):
        model = sharded(mesh, shard_placement_fn=columns)
        with sidcomp.State("none") as state:
            if codec:
                sidcomp.fsdp.compress(model, state)
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(3))
        trained.append(flat(model))
    assert torch.equal(*trained)


def replicated(rank: int, world: int, codec: str | None) -> Any:
    """torch's `replicate`, which is FSDP2's data parallelism without shards."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",))
    model = network()
    for layer in (model[0], model[2]):
        replicate(layer, mesh=mesh)
    replicate(model, mesh=mesh)
    state = sidcomp.State(codec, groups="model") if codec else None
    if state is not None:
        sidcomp.fsdp.compress(model, state)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(STEPS))
    assert alike(model)
    return flat(model), state.stats()["steps"] if state is not None else 0


@pytest.mark.parametrize("world", [2, 3])
def test_replicate(world: int) -> None:
    plain = run(replicated, world, None)
    ours = run(replicated, world, "none")
    for (theirs, _), (mine, steps) in zip(plain, ours, strict=True):
        assert steps == STEPS
        if world == 2:
            assert torch.equal(theirs, mine)
        torch.testing.assert_close(theirs, mine)


def paired(rank: int, world: int, pairs: list[list[int]]) -> str:
    """What a rank is told whose replicas= is its list of these, on 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    groups = [dist.new_group(ranks) for ranks in pairs]
    mine = next(i for i, ranks in enumerate(pairs) if rank in ranks)
    model = sharded(mesh["shards"])
    with pytest.raises(sidcomp.SetupError) as caught, sidcomp.State("none") as state:
        sidcomp.fsdp.compress(model, state, replicas=groups[mine])
    return str(caught.value)


def test_ranks_that_hold_different_shards_are_no_replicas() -> None:
    """The replicas are rank 0 with rank 2, and rank 1 with rank 3. All ranks raise, and none waits."""
    for pairs in ([[0, 3], [1, 2]], [[0, 1, 2], [3]]):
        said = run(paired, 4, pairs)
        assert all("give ranks that hold the same shard" in text for text in said)
        for ranks in pairs:
            other = next((r for r in ranks if r % 2 != ranks[0] % 2), None)
            for text in (said[r] for r in ranks if other is not None):
                assert f"rank {ranks[0]} holds shard {ranks[0] % 2} of 2, and rank {other} shard" in text


def unfollowed(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    with warned() as caught, sidcomp.State() as state:
        sidcomp.fsdp.compress(model, state)
        for step in range(3):
            backward(model, rank, step)
            adam.step()
    return [text for text in caught if "call state.follow(optimizer)" in text]


def test_adam_that_nobody_follows_is_named_by_one_rank_of_all_shards() -> None:
    first, *others = run(unfollowed, 4)
    assert len(first) == 1 and "this model is trained with AdamW" in first[0] and not any(others)


@pytest.mark.parametrize(
    "codec, arguments",
    [
        ("auto", {"warmup": 2}),
        ("auto", {"accuracy": "exact", "warmup": 2}),
        ("topk", {"groups": "pg", "density": 0.05}),
    ],
)
@on_ranks(4)
def test_it_plans_across_modules(rank: int, world: int, codec: str, arguments: dict[str, Any]) -> None:
    said = io.StringIO()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with redirect_stderr(said), sidcomp.State(codec, **arguments) as state:
        sidcomp.fsdp.compress(model, state)
        for step in range(400):
            sgd.zero_grad()
            backward(model, rank, step)
            sgd.step()
            # The ranks of the other shard plan for themselves, and all must take as many steps.
            settled = torch.tensor([float(state.plan_report()["stage"] == "settled")])
            if step % 10 == 9:
                dist.all_reduce(settled, op=dist.ReduceOp.MIN)
                if settled.item():
                    break
        report = state.plan_report()
    assert alike(model, mesh.get_group("replicate")) and report["stage"] == "settled" and state.error is None
    elements = sum(g["elements"] for g in report["groups"])
    assert elements == (12 * 40 + 40 + 40 * 40 + 40 + 40 * 4 + 4) // 2
    # The ranks of each shard plan for themselves, and one rank of all speaks.
    lines = [line for line in said.getvalue().splitlines() if "sidcomp: " in line]
    assert any("has decided" in line for line in lines) if rank == 0 else not lines


def swapped(rank: int, world: int, room: str) -> None:
    """States of shards: by torch.distributed.checkpoint each rank gets its own, and none takes another's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, state = sharded(mesh), sidcomp.State("topk", density=0.1)
    sidcomp.fsdp.compress(model, state)
    for step in range(3):
        backward(model, rank, step)
    entries = Entries(state)
    checkpoint.save({"sidcomp": entries}, checkpoint_id=room)
    before = state.state_dict()["residuals"]
    for step in range(2):
        backward(model, rank, step)
    checkpoint.load({"sidcomp": entries}, checkpoint_id=room)
    after = state.state_dict()["residuals"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, state.state_dict())
    said = f"state of shard {1 - rank % 2} of 2.*has shard {rank % 2} of 2"
    with pytest.raises(sidcomp.CheckpointError, match=said):
        state.load_state_dict(everyone[rank ^ 1])


def test_no_rank_takes_the_state_of_another_shard(tmp_path: Any) -> None:
    run(swapped, 4, str(tmp_path))


@on_ranks(4)
def test_a_state_from_before_the_first_step_is_of_no_shard_yet(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    with sidcomp.State("topk", density=0.1) as state:
        sidcomp.fsdp.compress(model, state)
        state.load_state_dict(state.state_dict())
        backward(model, rank, 0)
        assert state.stats()["steps"] == 1


def on_mesh(rank: int, world: int, shards: int, steps: int, read: str, write: str) -> Any:
    """Loads the states of another mesh, takes some steps, and saves."""
    mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard"))
    model, state = sharded(mesh), sidcomp.State("topk", density=0.1)
    sidcomp.fsdp.compress(model, state)
    if read:
        states = [torch.load(p, weights_only=True) for p in sorted(Path(read).glob("*.pt"))]
        with pytest.raises(
            sidcomp.CheckpointError, match="is missing" if len(states) > 2 else "is empty|rank"
        ):
            state.load_state_dict(sidcomp.fsdp.reshard(states[1:], model) if len(states) > 2 else [])
        state.load_state_dict(sidcomp.fsdp.reshard(states, model))
    for step in range(steps):
        backward(model, rank, step)
    torch.save(state.state_dict(), f"{write}/{rank}.pt")
    saved = state.state_dict()
    return saved["residuals"], saved["step"]


def test_another_mesh(tmp_path: Any) -> None:
    """2 x 2, then 2 x 1, where residuals are joined, then 2 x 2 again: every element is where it was."""
    rooms = [tmp_path / name for name in "abc"]
    for room in rooms:
        room.mkdir()
    first = run(on_mesh, 4, 2, 3, "", str(rooms[0]))
    joined = run(on_mesh, 2, 1, 0, str(rooms[0]), str(rooms[1]))
    again = run(on_mesh, 4, 2, 0, str(rooms[1]), str(rooms[2]))
    for (a, _), (b, _) in zip(first, again, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    shapes = {n: p.shape for n, p in network().named_parameters()}
    for replica, (whole, _) in enumerate(joined):
        for name, shape in shapes.items():
            parts = [first[2 * replica + i][0][name].view(-(-shape[0] // 2), -1) for i in (0, 1)]
            assert torch.equal(whole[name].view(shape[0], -1), torch.cat(parts)[: shape[0]])
            assert bool(whole[name].any())
    assert [steps for _, steps in run(on_mesh, 4, 2, 2, str(rooms[1]), str(rooms[2]))] == [5] * 4


@on_ranks(4)
def test_another_mesh_and_another_dimension(rank: int, world: int) -> None:
    """The columns of matrices are sharded; another model has them whole, or in other shards, or shards of
    rows. Every element is where it was."""
    model = sharded(replicas_of(world), shard_placement_fn=columns)
    with sidcomp.State("topk", density=0.1) as state:
        sidcomp.fsdp.compress(model, state)
        for step in range(3):
            backward(model, rank, step)
        states: list[Any] = [None] * world
        dist.all_gather_object(states, state.state_dict())
    wholes = [
        {
            name: torch.cat([s["residuals"][name].view(*p.shape[:-1], -1) for s in own], -1)
            for name, p in network().named_parameters()
        }
        for own in (states[:2], states[2:])
    ]
    for shards, how in ((1, None), (2, columns), (2, None), (4, columns)):
        mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh, shard_placement_fn=how)
        for whole, cut in zip(wholes, sidcomp.fsdp.reshard(states, model), strict=True):
            for name, p in network().named_parameters():
                dim = p.dim() - 1 if how else 0
                x = whole[name].narrow(-1, 0, p.shape[-1])
                rest = list(p.shape)
                rest[dim] = -p.shape[dim] % shards
                mine = torch.cat([x, x.new_zeros(rest)], dim).chunk(shards, dim)[rank % shards]
                assert torch.equal(cut["residuals"][name], mine.reshape(1, -1)), (name, shards)
                assert bool(x.any())
    model = sharded(replicas_of(world), shard_placement_fn=columns)
    with sidcomp.State("topk", density=0.1) as state:
        sidcomp.fsdp.compress(model, state)
        state.load_state_dict(sidcomp.fsdp.reshard(states, model))
        backward(model, rank, 3)
        assert state.state_dict()["step"] == 4


@on_ranks(4)
def test_states_of_several_steps_or_runs_are_not_joined(rank: int, world: int) -> None:
    model = sharded(replicas_of(world))
    with sidcomp.State("topk", density=0.1) as state:
        sidcomp.fsdp.compress(model, state)
        backward(model, rank, 0)
        states: list[Any] = [None] * world
        dist.all_gather_object(states, state.state_dict())
    for key, value in {"step": 2, "world": 4, "memory": "none", "codec": "int8"}.items():
        said = f"^{key} is {states[0][key]!r} in states.0. and {value!r} in states.3.: pass what the ranks"
        with pytest.raises(sidcomp.CheckpointError, match=said):
            sidcomp.fsdp.reshard([*states[:3], {**states[3], key: value}], model)
    assert len(sidcomp.fsdp.reshard(states, model)) == 2


# ---- passes that do not all bring the same gradients


class Chain(nn.ModuleList):
    """Layers of which a pass uses some."""

    def forward(self, x: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
        for i in which:
            x = x + self[i](x).tanh()
        return x


class Branching(nn.Module):
    """Branches that are parameter groups of their own, and a pair of layers that is one parameter group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(12, 20)
        self.branches = Chain([nn.Linear(20, 20) for _ in range(3)])
        self.pair = Chain([nn.Linear(20, 20) for _ in range(2)])
        self.head = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor, which: Sequence[int], of_pair: Sequence[int]) -> torch.Tensor:
        return self.head(self.pair(self.branches(self.trunk(x).tanh(), which), of_pair))


# Of a pass: the branches, the layers of the pair, and the parameters that change whether they train.
Pass = tuple[list[int], list[int], list[str]]
PASSES: list[Pass] = [
    ([0, 1, 2], [0, 1], []),
    ([1], [0], []),
    ([0, 2], [0, 1], []),
    ([2], [], ["pair.1.weight"]),
    ([], [1], []),
    ([0, 1, 2], [0, 1], ["trunk.bias", "branches.2.weight", "branches.2.bias"]),
    ([0, 1, 2], [0, 1], []),
    ([2, 1], [1], ["trunk.bias", "branches.2.weight", "branches.2.bias"]),
    ([0, 1, 2], [0, 1], []),
    ([0, 1, 2], [0, 1], []),
]
LISTS = [
    ["head.weight", "branches.1.weight", "branches.1.bias", "trunk.bias"],
    ["head.bias", "pair.0.bias", "trunk.weight"],
]


def branching(mesh: Any, **options: Any) -> Any:
    model: Any = Branching()
    model.pair[1].weight.requires_grad_(False)
    for part in (model.trunk, *model.branches, model.pair):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def toggle(model: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        p = model.get_parameter(name)
        p.requires_grad_(not p.requires_grad)


def pass_of(model: nn.Module, rank: int, step: int, one: Pass, scale: float = 1.0) -> float:
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 12, generator=draw)
    y = torch.stack([x[:, :4].sum(1), x[:, 4:8].prod(1), x[:, 8:].amax(1)], 1)
    loss = (model(x, *one[:2]) - y).square().mean() * scale
    loss.backward()
    return loss.item()


def replicas_of(world: int) -> Any:
    """Two replicas."""
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


def train_branches(rank: int, world: int, codec: str | None, arguments: dict[str, Any], how: str = "") -> Any:
    mesh = replicas_of(world)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = branching(mesh, **({"mp_policy": mixed} if how == "mixed" else {}))
    said = io.StringIO()
    with redirect_stderr(said):
        state = sidcomp.State(codec, **arguments) if codec else None
        if state is not None:
            sidcomp.fsdp.compress(model, state)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        micro = 2 if how == "accumulate" else 1
        for step, one in enumerate(PASSES):
            toggle(model, one[2])
            sgd.zero_grad()
            for i in range(micro):
                model.set_requires_all_reduce(i == micro - 1)
                pass_of(model, rank, micro * step + i, one)
            sgd.step()
        assert alike(model, mesh.get_group("replicate"))
        if state is not None:
            state.close()
    return flat(model), said.getvalue()


@pytest.mark.parametrize("how", ["", "accumulate", "mixed"])
def test_modules_may_be_skipped_frozen_and_released(how: str) -> None:
    """With codec "none" the bits are those of plain HSDP, whatever the groups."""
    world = 2 if how else 4
    plain = run(train_branches, world, None, {}, how)
    kinds: list[Any] = ["bucket", "model", LISTS]
    for groups in kinds if not how else ["model"]:
        arguments = {"groups": groups}
        if isinstance(groups, list):
            arguments["exclude"] = ["branches.0.*", "branches.2.*", "pair.0.weight", "pair.1.bias"]
        ours = run(train_branches, world, "none", arguments, how)
        for (theirs, _), (mine, _) in zip(plain, ours, strict=True):
            assert torch.equal(theirs, mine), groups


def test_auto_gives_up_planning_where_passes_differ() -> None:
    plain, ours = run(train_branches, 2, None, {}), run(train_branches, 2, "auto", {})
    for rank, ((theirs, _), (mine, said)) in enumerate(zip(plain, ours, strict=True)):
        assert torch.equal(theirs, mine)
        assert said.count("plans no longer") == (rank == 0)


@pytest.mark.parametrize(
    "world, codec, arguments, follow",
    [
        (4, "topk", {"density": 0.1}, True),
        (2, "topk", {"density": 0.1, "groups": "model"}, False),
        (2, "int8", {"groups": "2KB", "exclude": "1-D"}, True),
        pytest.param(2, "topk", {"density": 0.1, "groups": "2KB", "nonfinite": "rollback"}, True, marks=SLOW),
        pytest.param(2, "powersgd", {"groups": "bucket"}, False, marks=SLOW),
    ],
)
@on_ranks()
def test_the_residual_of_a_module_that_is_skipped_waits(
    rank: int, world: int, codec: str, arguments: dict[str, Any], follow: bool
) -> None:
    """No parameter moves, so each pass has known gradients. What was sent, each times its rate, and what is
    left, times the last one, are together what plain HSDP has sent."""
    mesh = replicas_of(world)
    plain, model = branching(mesh), branching(mesh)
    sums: list[dict[str, torch.Tensor]] = [{}, {}]
    with sidcomp.State(codec, **arguments) as state:
        sidcomp.fsdp.compress(model, state)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        if follow:
            state.follow(sgd)
        rate = 1.0
        for step, one in enumerate([*PASSES, PASSES[1]]):
            rate = sgd.param_groups[0]["lr"] = 1.0 / (1 + step) if follow else 1.0
            came = []
            for of, each in zip(sums, (plain, model), strict=True):
                toggle(each, one[2])
                each.zero_grad()
                pass_of(each, rank, step, one)
                grads = {n: p.grad.to_local() for n, p in each.named_parameters() if p.grad is not None}
                came.append(set(grads))
                for name, grad in grads.items():
                    of[name] = of.get(name, torch.zeros_like(grad)) + rate * grad
            assert came[0] == came[1]
        for name, residual in state.state_dict()["residuals"].items():
            own = sums[1][name].numel()
            left = residual[0][:own].reshape(sums[1][name].shape).clone()
            dist.all_reduce(left, group=mesh.get_group("replicate"))
            sums[1][name] += rate * left / 2
    assert sums[0].keys() == sums[1].keys()
    for name, true in sums[0].items():
        torch.testing.assert_close(sums[1][name], true, rtol=1e-4, atol=1e-5, msg=name)
        assert alike(sums[1][name], mesh.get_group("replicate"))


def compiled(mesh: Any, how: str) -> nn.Module:
    """As `sharded`; each layer is compiled before fully_shard, or the whole model after it."""
    if how == "whole":
        return torch.compile(sharded(mesh), backend="eager")  # type: ignore[return-value]
    model = network(width=40)
    for i in (0, 2, 4) if how == "layers" else ():
        model[i] = torch.compile(model[i], backend="eager")
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def resumed_compiled(rank: int, world: int) -> None:
    """The names are those of the plain model, in rules and in checkpoints, which each of the models loads."""
    mesh = replicas_of(world)
    with torch.compiler.set_stance("force_eager"):
        for how, then in (("layers", "layers"), ("whole", "whole"), ("plain", "layers")):
            saved: dict[str, Any] = {}
            for step, each in enumerate((how, then)):
                model = compiled(mesh, each)
                with sidcomp.State("topk", density=0.1, exclude=["0.weight", "output"]) as state:
                    sidcomp.fsdp.compress(model, state)
                    if saved:
                        state.load_state_dict(saved)
                    backward(model, rank, step)
                    saved = state.state_dict()
                assert set(saved["residuals"]) == {"0.bias", "2.weight", "2.bias"}
            assert saved["step"] == 2


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    run(resumed_compiled, 2)


def resumed_branches(rank: int, world: int, first: int) -> Any:
    """With first > 0 it stops there, saves, and continues in new objects."""
    mesh = replicas_of(world)

    def fresh(frozen: Sequence[str]) -> tuple[nn.Module, sidcomp.State, Any]:
        model = branching(mesh)
        toggle(model, frozen)
        state = sidcomp.State("topk", density=0.1, groups="model")
        sidcomp.fsdp.compress(model, state)
        return model, state, torch.optim.SGD(model.parameters(), lr=0.1)

    model, state, sgd = fresh([])
    for step, one in enumerate([*PASSES[:5], *PASSES[1:5]]):
        if step == first > 0:
            saved = {n: x.clone() for n, x in model.state_dict().items()}, state.state_dict()
            state.close()
            model, state, sgd = fresh(["pair.1.weight"])
            model.load_state_dict(saved[0])
            state.load_state_dict(saved[1])
        toggle(model, one[2] if step < 5 else [])
        sgd.zero_grad()
        pass_of(model, rank, step, one)
        sgd.step()
    return flat(model), state.state_dict()["residuals"]


def test_a_run_that_skips_modules_resumes_with_the_same_bits() -> None:
    for (a, mine), (b, theirs) in zip(run(resumed_branches, 4, 0), run(resumed_branches, 4, 6), strict=True):
        assert torch.equal(a, b) and mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("codec", ["none", "topk"])
@on_ranks(4)
def test_ranks_that_skip_different_modules_are_told_what_to_do(rank: int, world: int, codec: str) -> None:
    """Replicas that use other branches: an error on all ranks in that pass, and then its advice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    texts, which = [], [rank // 2]
    model = branching(mesh)
    state = sidcomp.State(codec)
    sidcomp.fsdp.compress(model, state)
    for step, branches in enumerate(([0, 1, 2], [0, 1, 2], which, [0, 1, 2])):
        try:
            pass_of(model, rank, step, (branches, [0], []))
        except sidcomp.RankError as e:
            texts.append((step, str(e)))
    state.close()
    models: list[Any] = []
    for compressing in (False, True):
        model = Branching()
        for part in (model.trunk, model.branches, model.pair):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.set_reduce_scatter_unused_params(True)
        state = sidcomp.State("none")
        if compressing:
            sidcomp.fsdp.compress(model, state)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            sgd.zero_grad()
            pass_of(model, rank, step, (which, [0], []))
            sgd.step()
        assert alike(model, mesh.get_group("replicate"))
        models.append(flat(model))
    ((step, text),) = texts
    assert step == 2 and torch.equal(*models)
    assert "only rank 0 has gradients of branches.0.bias, branches.0.weight" in text
    assert "only rank 1 has gradients of branches.1.bias, branches.1.weight" in text


@on_ranks(2)
def test_the_order_in_which_gradients_come_may_differ(rank: int, world: int) -> None:
    """FSDP gives a branch that a rank skips a zero gradient, at the end of the pass: each rank has its
    branches in another order. The mean gradient is that of the plain model on both ranks' data."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    model = branching(mesh)
    model.set_reduce_scatter_unused_params(True)
    with sidcomp.State("none") as state:
        sidcomp.fsdp.compress(model, state)
        pass_of(model, rank, 0, PASSES[0])
        model.zero_grad()
        pass_of(model, rank, 1, ([rank], [0], []))
        plain = Branching()
        for other in range(world):
            pass_of(plain, other, 1, ([other], [0], []), 1 / world)
        for (name, mine), true in zip(model.named_parameters(), plain.parameters(), strict=True):
            if name != "pair.1.weight":
                expected = torch.zeros_like(true) if true.grad is None else true.grad
                torch.testing.assert_close(mine.grad.to_local(), expected, msg=name)


def collected(rank: int, world: int, heeds: bool) -> str:
    """Two passes that are averaged together, of which the second uses more of a parameter group."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = branching(mesh)
    model.set_reduce_scatter_unused_params(heeds)
    sidcomp.fsdp.compress(model, sidcomp.State("none"))
    pass_of(model, rank, 0, PASSES[0])
    model.set_requires_all_reduce(False)
    pass_of(model, rank, 1, ([0], [0], []))
    model.set_requires_all_reduce(True)
    try:
        pass_of(model, rank, 2, ([0], [0, 1], []))
    except sidcomp.SidcompError as e:
        return str(e)
    return "it trains"


def test_passes_that_are_averaged_together_bring_the_same_parameters() -> None:
    for text in run(collected, 2, False):
        assert "averaged together brought gradients of different parameters of pair.0.weight" in text
    assert run(collected, 2, True) == ["it trains"] * 2


class Recomputing(Chain):
    def forward(self, x: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
        for i in which:
            x = x + (checkpoint_of(self[i], x, use_reentrant=True) if i == 1 else self[i](x)).tanh()
        return x


def recomputed(rank: int, world: int, codec: str | None) -> torch.Tensor:
    """Reentrant checkpoints: some parameter groups come in backward passes within the backward pass."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = branching(mesh)
    model.branches.__class__ = Recomputing
    with sidcomp.State(codec or "none") as state:
        if codec:
            sidcomp.fsdp.compress(model, state)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            sgd.zero_grad()
            pass_of(model, rank, step, PASSES[0])
            sgd.step()
    return flat(model)


def test_backward_passes_within_the_backward_pass() -> None:
    for theirs, mine in zip(run(recomputed, 2, None), run(recomputed, 2, "none"), strict=True):
        assert torch.equal(theirs, mine)


class Ends(torch.autograd.Function):
    """Ends a backward pass with an error of the program, if `now` says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, now: list[bool]) -> torch.Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.now[0]:
            raise ValueError("an error of the program")
        return grads[0], None


def broken_passes(rank: int, world: int, everywhere: bool) -> list[str]:
    """An error of the program ends passes in their middle, on all ranks or on rank 0 alone."""
    shards = 2 if everywhere else 1
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    model, ends, texts = branching(mesh), [False], []
    model.branches.register_forward_hook(lambda *given: Ends.apply(given[2], ends))
    with sidcomp.State("topk", density=0.1) as state:
        sidcomp.fsdp.compress(model, state)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            ends[0] = (step in (0, 3) and everywhere) or (step == 3 and rank == 0)
            sgd.zero_grad()
            try:
                pass_of(model, rank, step, PASSES[0])
                sgd.step()
            except (ValueError, sidcomp.SidcompError) as e:
                texts.append(f"{step}: {e}")
                model.reset_iter_state()
        assert alike(model, mesh.get_group("replicate"))
    return texts


def test_passes_after_one_that_did_not_finish() -> None:
    for texts in run(broken_passes, 4, True):
        assert texts == ["0: an error of the program", "3: an error of the program"]
    (mine,), (theirs,) = run(broken_passes, 2, False)
    assert mine == "3: an error of the program"
    assert theirs.startswith("3: rank 0 could not go on") and "did not finish" in theirs


def skipping(rank: int, world: int, everywhere: bool, zero: str) -> bool:
    """Accumulates three passes, of which the second fails in its middle, on all ranks or on rank 0 alone.
    Returns whether the gradients are those of the first and the third; zero: how the program drops the first
    with the second."""
    mesh = replicas_of(world)
    model, alone, ends = branching(mesh), branching(mesh), [False]
    model.branches.register_forward_hook(lambda *given: Ends.apply(given[2], ends))
    with sidcomp.State("none") as state, sidcomp.State("none") as other:
        sidcomp.fsdp.compress(model, state)
        sidcomp.fsdp.compress(alone, other)
        for one in (model, alone):
            pass_of(one, rank, 0, PASSES[0])
            one.zero_grad()
        for step in (1, 2, 3):
            ends[0] = step == 2 and (everywhere or rank == 0)
            try:
                pass_of(model, rank, step, PASSES[0])
            except (ValueError, sidcomp.SidcompError):
                model.reset_iter_state()
                if zero:
                    model.zero_grad(set_to_none=zero == "none")
            if step == 3 or (step == 1 and not zero):
                pass_of(alone, rank, step, PASSES[0])
        return all(
            torch.allclose(p.grad.to_local(), q.grad.to_local(), atol=1e-6)
            for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True)
            # Of the root's parameters FSDP keeps the whole gradient, and adds it to the next one.
            if p.requires_grad and not name.startswith("head")
        )


def test_a_pass_that_fails_leaves_the_gradients_of_those_before() -> None:
    for zero in ("", "none", "zeros"):
        assert all(run(skipping, 4, True, zero)), zero
    assert all(run(skipping, 2, False, ""))


def collected_and_dropped(rank: int, world: int, codec: str | None) -> torch.Tensor:
    """The program drops a step after the first of its two passes, and takes another one."""
    mesh = replicas_of(world)
    model: Any = sharded(mesh)
    with sidcomp.State(codec or "none") as state:
        if codec:
            sidcomp.fsdp.compress(model, state)
        backward(model, rank, 0)
        model.zero_grad()
        model.set_requires_all_reduce(False)
        backward(model, rank, 1)
        model.zero_grad()
        model.reset_iter_state()
        for step in (2, 3):
            model.set_requires_all_reduce(step == 3)
            backward(model, rank, step)
        return torch.cat([p.grad.to_local().flatten() for p in model.parameters()])


def test_reset_iter_state_drops_what_passes_have_collected() -> None:
    plain = run(collected_and_dropped, 2, None)
    for theirs, mine in zip(plain, run(collected_and_dropped, 2, "none"), strict=True):
        torch.testing.assert_close(mine, theirs)


# ---- one shard, and all others


def fail_once(form: Any) -> None:
    works = form.advance

    def fails(*_: Any) -> bool:
        form.advance = works
        raise ValueError("planted error, number 4711")

    form.advance = fails


@pytest.mark.parametrize("codec", ["topk", "int8"])
@on_ranks(4)
def test_what_fails_on_one_shard_fails_on_all_in_the_same_pass(rank: int, world: int, codec: str) -> None:
    """In pass 2 rank 0 cannot encode a group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, texts = sharded(mesh), []
    with sidcomp.State(codec, nonfinite="rollback") as state:
        sidcomp.fsdp.compress(model, state)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            before = state.state_dict()["residuals"] if step else {}
            if step == 2 and rank == 0:
                fail_once(state.engine.groups[1].form)
            sgd.zero_grad()
            try:
                backward(model, rank, step)
                sgd.step()
            except (RuntimeError, sidcomp.SidcompError) as e:
                texts.append((step, str(e)))
                after = state.state_dict()["residuals"]
                assert all(torch.equal(before[name], after[name]) for name in before)
        assert alike(model, mesh.get_group("replicate"))
    ((step, said),) = texts
    elsewhere = "another shard of this node has failed"
    assert step == 2
    assert ("planted error, number 4711", elsewhere, "payload of rank 0", elsewhere)[rank] in said, said


def discarded(rank: int, world: int, nonfinite: str | None) -> tuple[int, bool, bool]:
    """In pass 3 the gradient of shard 0 alone is not finite. Returns the number of steps that count, and
    whether the residual is as before that pass, or empty."""
    mesh = replicas_of(world)
    model: Any = sharded(mesh)
    with sidcomp.State("topk", density=0.1, groups="model", nonfinite=nonfinite) as state:
        sidcomp.fsdp.compress(model, state)
        for step in range(3):
            model.zero_grad()
            backward(model, rank, step)
        before = state.state_dict()["residuals"]

        def with_inf(grad: torch.Tensor) -> torch.Tensor:
            return torch.cat([grad[:, :1] * float("inf"), grad[:, 1:]], 1)

        hook = model[0].register_forward_hook(lambda _, given, out: (out.register_hook(with_inf), None)[1])
        model.zero_grad()
        backward(model, rank, 3)
        hook.remove()
        mine = [p.grad.to_local().isfinite().all() for p in model.parameters()]
        assert all(mine) == (rank % 2 == 1)
        saved = state.state_dict()
        after = saved["residuals"]
        stays = all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
        return saved["step"], stays, not any(x.any() for x in after.values())


def test_a_step_that_is_not_finite_in_one_shard_counts_in_none() -> None:
    for rank, (step, stays, empty) in enumerate(run(discarded, 4, None)):
        assert step == 4 and (stays, empty) == ((True, False) if rank % 2 == 0 else (False, True))
    assert run(discarded, 4, "rollback") == [(3, True, False)] * 4


# ---- another State


def replaced(rank: int, world: int, codec: str, how: str) -> Any:
    """After three passes another State takes the place of the first; how "": it stays."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    by_hand = how == "replicas"
    model, said = sharded(mesh["shard"] if by_hand else mesh), io.StringIO()
    replicas = mesh.get_group("replicate") if by_hand else None
    state = sidcomp.State(codec)
    sidcomp.fsdp.compress(model, state, replicas=replicas)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if step == 3 and how:
            former, state, saved = state, sidcomp.State(codec), state.state_dict()
            if how == "closed":
                former.close()
                with pytest.raises(sidcomp.SetupError, match=r"this State is closed.*fsdp\.compress"):
                    backward(model, rank, step)
                sgd.zero_grad()
            else:
                if how == "frozen":
                    model[0].requires_grad_(False)
                with pytest.raises(sidcomp.SetupError, match=r"also serves 4\.weight, 4\.bias"):
                    sidcomp.fsdp.compress(model[2], sidcomp.State(codec), replicas=replicas)
            with redirect_stderr(said):
                sidcomp.fsdp.compress(model, state, replicas=replicas)
            with pytest.raises(sidcomp.SetupError, match="closed"):
                former.log()
            if how in ("loaded", "frozen"):
                state.load_state_dict(saved, strict=how == "loaded")
                held = saved["residuals"]
        sgd.zero_grad()
        backward(model, rank, step)
        sgd.step()
        if step == 3 and how == "frozen":
            assert set(held) - set(state.state_dict()["residuals"]) == {"0.weight", "0.bias"}
    assert state.state_dict()["step"] == (3 if how in ("closed", "replicas") else 6)
    assert alike(model, mesh.get_group("replicate"))
    state.close()
    return flat(model), said.getvalue()


def test_another_state_takes_the_place_of_the_first() -> None:
    plain = run(hybrid, 4, None, {}, {"steps": 6})
    for how in ("closed", "replicas"):
        for (theirs, _, _), (mine, said) in zip(plain, run(replaced, 4, "none", how), strict=True):
            assert torch.equal(theirs, mine) and "residual" not in said


def test_a_state_that_is_replaced_says_what_becomes_of_its_residual() -> None:
    stays, loaded = run(replaced, 4, "topk", ""), run(replaced, 4, "topk", "loaded")
    for rank, ((a, _), (b, said)) in enumerate(zip(stays, loaded, strict=True)):
        assert torch.equal(a, b)
        assert ("the residual that it had not sent is dropped" in said) == (rank == 0)
    run(replaced, 4, "topk", "frozen")


# ---- the reduce-scatter


def scattered(rank: int, world: int, codec: str, arguments: dict[str, Any], room: str) -> Any:
    """Plain FSDP2 on one mesh dimension, its reduce-scatter compressed; codec "": as torch does it."""
    model = sharded(init_device_mesh("cpu", (world,)))
    made = sidcomp.fsdp.compress_reduce_scatter(model, codec, **arguments) if codec else []
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(20):
        if step == 12 and room:  # as if the run were resumed
            saved = [x.state_dict() for x in made]
            model_state = {k: v.clone() for k, v in model.state_dict().items()}
            model = sharded(init_device_mesh("cpu", (world,)))
            model.load_state_dict(model_state)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            made = sidcomp.fsdp.compress_reduce_scatter(model, codec, **arguments)
            for x, kept in zip(made, saved, strict=True):
                x.load_state_dict(kept)
        sgd.zero_grad()
        losses.append(backward(model, rank, step))
        sgd.step()
    return flat(model), sum(losses[-5:]), [x.dense_bytes / x.sent_bytes for x in made]


def test_the_reduce_scatter() -> None:
    plain = run(scattered, 2, "", {}, "")
    none = run(scattered, 2, "none", {}, "")
    for (theirs, _, _), (mine, _, _) in zip(plain, none, strict=True):
        assert torch.equal(theirs, mine)
    for codec, arguments, ratio in (
        ("bf16", {}, 1.8),
        ("int8", {}, 2.5),
        ("topk", {"memory": "residual", "density": 0.1}, 3),
    ):
        for (_, loss, _), (_, mine, ratios) in zip(
            plain, run(scattered, 2, codec, arguments, ""), strict=True
        ):
            assert mine == pytest.approx(loss, rel=0.1) and len(ratios) == 3
            assert max(ratios) > ratio


def test_the_reduce_scatter_resumes_with_the_same_bits() -> None:
    arguments = {"memory": "residual", "density": 0.1}
    whole, again = (run(scattered, 3, "topk", arguments, room) for room in ("", "here"))
    assert all(torch.equal(a, b) for (a, _, _), (b, _, _) in zip(whole, again, strict=True))


TOPK: dict[str, Any] = {"codec": "topk", "memory": "residual", "density": 0.1}


@on_ranks(2)
def test_a_reduce_scatter_loads_what_it_has_saved_itself(rank: int, world: int) -> None:
    def fresh(**how: Any) -> Any:
        model = sharded(init_device_mesh("cpu", (world,)))
        return model, sidcomp.fsdp.compress_reduce_scatter(model, **(how or TOPK))

    model, made = fresh()
    unborn = made[1].state_dict()
    backward(model, rank, 0)
    saved = made[1].state_dict()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, saved)
    for mine, wrong, at, key in (
        (made, everyone[1 - rank], 1, "rank"),
        (made, {**saved, "world": 4}, 1, "world"),
        (made, saved, 0, "number"),
        (fresh(codec="int8", memory="residual")[1], saved, 1, "codec"),
        (fresh(codec="topk", memory="none", density=0.1)[1], saved, 1, "memory"),
        (fresh()[1], {k: v for k, v in saved.items() if k != "rank"}, 1, "rank"),
        (fresh()[1], {**unborn, "rank": 1 - rank}, 1, "rank"),
    ):
        before = mine[at].state_dict()
        with pytest.raises(sidcomp.CheckpointError, match=f'^"{key}" of the state of a reduce-scatter is'):
            mine[at].load_state_dict(wrong)
        assert all(torch.equal(*map(torch.as_tensor, x)) for x in _numbers(before, mine[at].state_dict()))
    for (other, its), one in ((fresh(), saved), (fresh(), unborn)):
        its[1].load_state_dict(one)
        backward(other, rank, 1)
        assert its[1].step == one["step"] + 1


@on_ranks(2)
def test_a_state_that_fits_on_one_rank_alone_fails_on_all(rank: int, world: int) -> None:
    """Only the first backward pass tells whether the sizes fit; no rank may wait then."""
    mesh = init_device_mesh("cpu", (world,))
    model, other = sharded(mesh), sharded(mesh)
    made, its = (sidcomp.fsdp.compress_reduce_scatter(x, **TOPK) for x in (model, other))
    backward(model, rank, 0)
    saved = made[1].state_dict()
    if rank == 1:
        saved["residuals"] = saved["residuals"][:, :, :3]
    its[1].load_state_dict(saved)
    said = "payload of rank 1" if rank == 0 else "residuals are a tensor of shape"
    with pytest.raises(sidcomp.SidcompError, match=said):
        backward(other, rank, 1)
    other.zero_grad()
    backward(other, rank, 2)
    assert not any(p.grad.to_local().isnan().any() for p in other.parameters())


def _numbers(*states: dict[str, Any]) -> list[Any]:
    return [[s[key] for s in states] for key in ("step", "residuals")]


@on_ranks(2)
def test_the_reduce_scatter_follows_what_is_frozen_and_released(rank: int, world: int) -> None:
    """A layer is released that was frozen when it was compressed, then a part of another is frozen."""
    trained = []
    for how in (None, {"codec": "none"}, TOPK):
        model: Any = sharded(init_device_mesh("cpu", (world,)))
        model[0].requires_grad_(False)
        made = sidcomp.fsdp.compress_reduce_scatter(model, **how) if how else []
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, sgd, rank, range(2))
        model[0].requires_grad_(True)
        sent = [one.sent_bytes for one in made]
        train(model, sgd, rank, range(2, 4))
        assert len(made) == (3 if how else 0)
        assert all(one.sent_bytes > before for one, before in zip(made, sent, strict=True))
        model[2].weight.requires_grad_(False)
        if how is TOPK:  # gradients of zero, so nothing comes to a residual: it stays until it is sent
            was = made[2].state_dict()["residuals"][:, :, -20:]
            model.zero_grad()
            backward(model, rank, 4, 0.0)
            now = made[2].state_dict()["residuals"]
            assert now.shape == was.shape and bool(((now == was) | (now == 0)).all())
            assert 2 * int((now != 0).sum()) > int((was != 0).sum()) > 0
        train(model, sgd, rank, range(4, 6))
        model[2].requires_grad_(True)
        train(model, sgd, rank, range(6, 8))
        trained.append(flat(model))
    assert torch.equal(trained[0], trained[1])


@on_ranks(2)
def test_a_reduce_scatter_says_what_helps(rank: int, world: int) -> None:
    """Parameters that no pass has used before: what the error advises helps."""
    for how in (TOPK, {"codec": "int8"}):
        for heeds in (False, True):
            model = Branching()
            for part in (model.trunk, model.branches, model.pair):
                fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
            sidcomp.fsdp.compress_reduce_scatter(model, **how)
            model.set_reduce_scatter_unused_params(heeds)
            pass_of(model, rank, 0, ([0], [0], []))
            if heeds:
                pass_of(model, rank, 1, ([0, 1], [0], []))
                continue
            with pytest.raises(sidcomp.SetupError, match=r"set_reduce_scatter_unused_params\(True\) before"):
                pass_of(model, rank, 1, ([0, 1], [0], []))


def both(rank: int, world: int, codec: str) -> Any:
    """HSDP on 2 x 2 ranks with both of its collectives compressed; codec "": as torch does it."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    state, scatters, said = None, [], io.StringIO()
    with redirect_stderr(said):
        if codec:
            state = sidcomp.State(codec)
            sidcomp.fsdp.compress(model, state)
            scatters = sidcomp.fsdp.compress_reduce_scatter(model, codec)
        losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(20))
    assert alike(model, mesh.get_group("replicate"))
    ratio = state.stats()["ratio"] if state is not None else 0.0
    if state is not None:
        state.close()
    ratios = [x.dense_bytes / x.sent_bytes for x in scatters]
    return flat(model), sum(losses[-5:]), ratio, ratios, said.getvalue()


def test_reduce_scatter_and_average_together() -> None:
    plain = run(both, 4, "")
    for (theirs, *_), (mine, *_) in zip(plain, run(both, 4, "none"), strict=True):
        assert torch.equal(theirs, mine)
    for rank, ((_, loss, *_), (_, mine, ratio, scatters, said)) in enumerate(
        zip(plain, run(both, 4, "int8"), strict=True)
    ):
        assert mine == pytest.approx(loss, rel=0.1)
        assert ratio > 2.9 and len(scatters) == 3 and min(scatters) > 1.6
        assert ("plain HSDP's all-reduce" in said) == (rank == 0)


# ---- what is refused


FP16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)
BF16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


def attempt(rank: int, world: int, case: str, heeds: bool) -> str:
    """What the error says; heeds: the program does what it advises."""
    mesh = replicas_of(world)
    model: Any = network()
    state = sidcomp.State("auto") if case.endswith("auto") else sidcomp.State("topk", density=0.1)
    if case == "ddp":
        model = DistributedDataParallel(model)
    elif case == "one dimension":
        model = sharded(mesh["shard"])
    elif case == "fp16":
        model = sharded(mesh, mp_policy=BF16 if heeds else FP16)
    elif case != "plain" or heeds:
        model = sharded(mesh)
    layers = (model[0], model[2], model) if case != "ddp" else ()
    if case == "divide" and not heeds:
        for layer in layers:
            layer.set_gradient_divide_factor(4.0)
    if case == "own hook" and not heeds:
        model.set_all_reduce_hook(lambda buffer: None)
    try:
        given = heeds if case == "one dimension" else case == "replicas twice" and not heeds
        replicas = mesh.get_group("replicate") if given else None
        if case == "ddp" and heeds:
            register(model, state)
        else:
            sidcomp.fsdp.compress(model, state, replicas=replicas)
        if case == "one state, two models":
            other = sharded(mesh)
            sidcomp.fsdp.compress(other, sidcomp.State("topk") if heeds else state)
        if case.startswith("optimizer in backward") and not heeds:
            model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
        if case == "sums":
            for layer in layers:
                layer.set_force_sum_reduction_for_comms(not heeds)
        if case == "later divide" and not heeds:
            model.set_gradient_divide_factor(2.0)
        backward(model, rank, 0)
        if case == "closed":
            state.close()
            if heeds:
                sidcomp.fsdp.compress(model, sidcomp.State("topk"))
            backward(model, rank, 1)
    except (RuntimeError, sidcomp.SidcompError, ValueError) as e:
        return str(e)
    return "it trains"


@pytest.mark.parametrize(
    "case, said",
    [
        ("plain", "call fully_shard or replicate on the model first"),
        ("ddp", "use sidcomp.compress"),
        ("one dimension", "pass replicas="),
        ("replicas twice", "leave replicas= out"),
        ("divide", "set_gradient_divide_factor is not supported"),
        ("later divide", "set_gradient_divide_factor is not supported"),
        ("sums", "set_force_sum_reduction_for_comms(True) is not supported"),
        ("own hook", "has an all-reduce hook"),
        ("fp16", "bfloat16 or float32"),
        ("one state, two models", "a State of its own"),
        ("optimizer in backward", "step after it"),
        ("optimizer in backward of auto", "step after it"),
        ("closed", "closed"),
    ],
)
@on_ranks(2)
def test_what_is_not_supported_says_what_to_do_and_that_works(
    rank: int, world: int, case: str, said: str
) -> None:
    assert said in attempt(rank, world, case, False)
    assert attempt(rank, world, case, True) == "it trains"


def made_before(rank: int, world: int) -> str:
    """What compress says of an optimizer that was made before fully_shard, which replaces the parameters."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model = fully_shard(model, mesh=replicas_of(world))
    with pytest.raises(sidcomp.ArgumentError) as caught:
        sidcomp.compress(model, sgd, "topk", density=0.1)
    return str(caught.value)


def test_compress_refuses_an_optimizer_that_was_made_before_fully_shard() -> None:
    for text in run(made_before, 2):
        assert "SGD has none of the model's parameters" in text and "make it after fully_shard" in text


def without_its_state(rank: int, world: int, room: str) -> list[str]:
    """What a program is told that saves its model and its optimizer by torch.distributed.checkpoint, which
    takes a step of the new optimizer before it loads: in the first run, and in the one that resumes."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    told = []
    for resumes in (False, True):
        model = sharded(mesh)
        adam = torch.optim.AdamW(model.parameters(), 0.01)
        said = io.StringIO()
        with sidcomp.State("topk", density=0.1) as state, redirect_stderr(said):
            sidcomp.fsdp.compress(model, state)
            if resumes:
                saved = {"optimizer": get_optimizer_state_dict(model, adam)}
                checkpoint.load(saved, checkpoint_id=room)
                set_optimizer_state_dict(model, adam, saved["optimizer"])
            for step in range(4):
                adam.zero_grad()
                backward(model, rank, step)
                adam.step()
        told.append(said.getvalue())
        if not resumes:
            checkpoint.save({"optimizer": get_optimizer_state_dict(model, adam)}, checkpoint_id=room)
    return told


def test_a_program_that_resumes_without_its_state_is_told_so(tmp_path: Path) -> None:
    (first, second), others = run(without_its_state, 2, str(tmp_path))
    assert "steps behind it" not in first and not any(others)
    assert second.count("AdamW has steps behind it, from a checkpoint") == 1


# ---- with the rest of sidcomp


@on_ranks(4)
def test_it_works_with_the_rest_of_sidcomp(rank: int, world: int) -> None:
    """A rate that changes, layers by name, clipping by norm, a step that is not finite, zeroed gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    state = sidcomp.State("topk", density=0.1, exclude=["4.*"], policy=[("0.weight", {"density": 0.5})])
    sidcomp.fsdp.compress(model, state)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    state.follow(sgd)
    losses = []
    for step in range(20):
        sgd.param_groups[0]["lr"] = 0.2 / (1 + step) ** 0.5
        sgd.zero_grad(set_to_none=False)
        losses.append(backward(model, rank, step, float("inf") if step == 4 else 1.0))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != 4:
            sgd.step()
    kinds = {g["names"][0]: (g["codec"], g["density"]) for g in state.stats()["groups"]}
    assert state.stats()["steps"] == 20
    assert sorted(state.state_dict()["residuals"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert alike(model, mesh.get_group("replicate")) and losses[-1] < losses[0]
    state.close()
    assert kinds["4.weight"][0] == "none" and kinds["2.weight"][0] == "topk"
    assert kinds["0.weight"][1] == pytest.approx(0.5, abs=0.01)
