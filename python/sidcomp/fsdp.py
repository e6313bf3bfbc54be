"""FSDP2, HSDP and `replicate`: compresses the average that the replicas of a model take of their gradients.

    fully_shard(model, mesh=mesh)  # a mesh of two dimensions: replicas x shards
    sidcomp.fsdp.compress(model, sidcomp.State("auto"))

HSDP shards a model over some ranks, usually those of one node, and replicates it over the others, usually
across the network. In the backward pass, as soon as the gradients of a parameter group are ready, the ranks
that share a replica reduce-scatter them; then the replicas average their shards. PyTorch does so parameter
group by parameter group, and the backward pass waits for each. Here the engine averages them: compressed, in
groups that it may choose itself, while the backward pass continues.
"""

import re
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sidcomp.config.grouping import shorten
from sidcomp.config.policy import Exclude, Policy, parse_exclude
from sidcomp.config.schedule import Setting
from sidcomp.doors.fsdp.all_gather import AllGather
from sidcomp.doors.fsdp.hsdp import Door
from sidcomp.doors.fsdp.reduce_scatter import Passes, ReduceScatter
from sidcomp.doors.fsdp.units import Unit, check_torch, units_of
from sidcomp.doors.names import named_parameters, roles
from sidcomp.errors import ArgumentError, CheckpointError, SetupError, UnsupportedError
from sidcomp.state import State

__all__ = ["compress", "compress_all_gather", "compress_reduce_scatter", "reshard"]


def compress(module: torch.nn.Module, state: State, *, replicas: dist.ProcessGroup | None = None) -> None:
    """Compresses the average over replicas of a model to which `fully_shard` or `replicate` has been applied.

        fully_shard(model, mesh=mesh)  # a mesh of two dimensions: replicas x shards
        sidcomp.fsdp.compress(model, sidcomp.State("auto"))

    module      the root module, after fully_shard on a mesh of two dimensions (HSDP), after `replicate`, or
                after fully_shard on a mesh of one dimension with `replicas`
    state       a State that serves no other model. A group has whole shards of parameters; groups="bucket"
                makes one group of each of FSDP's parameter groups, which are the parameters of one
                `fully_shard` call. With "auto" it measures, plans across modules, and verifies
    replicas    [None] a process group of the ranks that hold the same shard, for a model on a mesh of one
                dimension. Their parameters must be equal; this call does not copy them

    Every rank calls it at the same point, before the first backward pass: the ranks wait for each other. In
    the first backward pass nothing overlaps, because the order of the parameter groups is not known yet. A
    pass may skip modules, and parameters may be frozen and released at any time, alike on all ranks. With
    another State, a second call replaces the first one's State, which it closes: what that had not sent is
    then in its last state_dict() only.

    Gradients are complete when backward() returns. They may be accumulated: by several backward passes,
    `set_requires_gradient_sync`, `set_requires_all_reduce` and `set_is_last_backward`. Mixed precision works
    with float32 or bfloat16 as reduce_dtype. CPU offload has not run on a GPU. Needs PyTorch 2.13.

    The residual takes 4 bytes for each element of the rank's shard. Each rank saves its own state_dict.

    Raises SetupError or UnsupportedError, which say what to change.
    """
    units, group = _checked(module, state, replicas)
    former = {id(unit.owner): unit.owner for unit in units if unit.owner is not None}.values()
    for owner in former:
        owner.check_successor(units)
    door = Door(module, units, group, state)
    state.attach(door, roles(module))
    state.engine.connect(door.model, units[0].device, "sidcomp.fsdp.compress()")
    for owner in former:
        owner.retire()
    for index, unit in enumerate(units):
        unit.take_over(door, partial(door.arrive, index))


def _checked(
    module: torch.nn.Module, state: State, replicas: dist.ProcessGroup | None
) -> tuple[list[Unit], dist.ProcessGroup]:
    """The units of a model that can be compressed, and the ranks that hold the same shard."""
    check_torch()
    if isinstance(module, DistributedDataParallel):
        raise SetupError("fsdp.compress is for fully_shard and replicate: use sidcomp.compress")
    if type(module).__name__ == "FullyShardedDataParallel":
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) has no place for compression with a residual: use fully_shard "
            "(FSDP2)"
        )
    if not isinstance(state, State):
        raise ArgumentError(f'state={state!r}: give a sidcomp.State, such as sidcomp.State("topk")')
    units = units_of(module)
    if not any(unit.trainable for unit in units):
        raise SetupError("fsdp.compress: no parameter of the model requires a gradient")
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise ArgumentError(
            f"replicas={replicas!r}: give a process group of which this rank is a member, or leave it out"
        )
    group = replicas or units[0].replicas()
    if group is None:
        raise UnsupportedError(
            "the model is sharded over one mesh dimension, so no two ranks hold the same shard: give "
            "fully_shard a mesh of two dimensions (replicas x shards), or pass replicas="
        )
    for unit in units:
        unit.check(group, given=replicas is not None)
    if state.door is not None and state.door.open:
        raise SetupError("this State serves a model already: give every model a State of its own")
    return units, group


def compress_reduce_scatter(
    module: torch.nn.Module,
    codec: str = "int8",
    *,
    memory: str | None = "none",
    seed: int = 0,
    **parameters: Setting,
) -> list[ReduceScatter]:
    """Compresses the reduce-scatter of the gradients between the ranks that share a replica, for a model to
    which `fully_shard` has been applied, on a mesh of one dimension or of two. On CPUs only so far.

    module      the root module
    codec, memory, parameters
                as in `State`. The default, "int8", sends one byte for each element, with a scale for each
                block, and keeps no residual. memory="residual" takes 4 bytes for each element of the *whole*
                model on every rank, which is the memory that sharding saves
    seed        [0] for codecs that draw random numbers

    Returns an object for each of FSDP's parameter groups, in the order of the modules, with `state_dict` and
    `load_state_dict` for this rank's residuals, and `sent_bytes` and `dense_bytes`: what this rank has sent,
    and what it would have sent uncompressed. The payloads of all shards travel in one all-to-all, and the
    owner of a shard sums them in float32. What fails on one rank makes backward() raise on all
    ranks that share the replica, and clears the residuals. Parameters may be frozen and released at any time,
    alike on all ranks; a frozen one loses its residual. Raises SetupError or UnsupportedError, which say what
    to change.
    """
    check_torch()
    units = [u for u in units_of(module) if u.place()[1] > 1]
    if not units:
        raise SetupError("the model is not sharded, so it has no reduce-scatter: use fsdp.compress")
    if not any(u.trainable for u in units):
        raise SetupError("fsdp.compress_reduce_scatter: no parameter of the model requires a gradient")
    passes = Passes()
    # Also of those that are frozen: they may be released.
    made = [ReduceScatter(codec, memory, parameters, seed, i, passes, u) for i, u in enumerate(units)]
    for unit, one in zip(units, made, strict=True):
        unit.group._reduce_scatter_comm = one
    return made


def reshard(states: Sequence[dict[str, Any]], module: torch.nn.Module) -> list[dict[str, Any]]:
    """Takes the states that all ranks saved on another mesh, and cuts out what this rank's shard needs:

        sidcomp.fsdp.compress(model, state)
        state.load_state_dict(sidcomp.fsdp.reshard(states, model))

    states: the results of `State.state_dict` of all ranks that saved, in any order. module: as in `compress`,
    sharded over the new mesh. Returns a list with a state for each old replica. Residuals are joined and cut
    as the parameters are, so each element keeps its own; `load_state_dict` distributes them if there is now
    another number of replicas. The codecs' statistics and the plans of "auto" begin anew.

    Raises CheckpointError if the state of a shard is missing, or if they are of another model, of several
    runs, or of several steps.
    """
    check_torch()
    if not isinstance(states, list | tuple) or not all(isinstance(s, dict) and "rank" in s for s in states):
        raise ArgumentError("states: give a list of what State.state_dict() returned on each rank that saved")
    for i, s in enumerate(states):
        for key in ("step", "world", "memory", "codec"):
            if s.get(key) != states[0].get(key):
                raise CheckpointError(
                    f"{key} is {states[0].get(key)!r} in states[0] and {s.get(key)!r} in states[{i}]: pass "
                    "what the ranks of one run saved at one step"
                )
    old: dict[int, dict[int, dict[str, Any]]] = {}
    shards = 1
    for s in states:
        found = re.fullmatch(r"shard (\d+) of (\d+)", s.get("part", "") or "shard 0 of 1")
        if found is None:
            raise CheckpointError(f"part of a state is {s['part']!r}, not a shard: the checkpoint is damaged")
        shards = max(shards, int(found[2]))
        old.setdefault(s["rank"], {})[int(found[1])] = s
    for rank, own in sorted(old.items()):
        if missing := [i for i in range(shards) if i not in own]:
            raise CheckpointError(
                f"of replica {rank} the state of shard {missing[0]} is missing: pass those of all ranks"
            )
    units = units_of(module)
    return [_cut([own[i] for i in range(shards)], units) for _, own in sorted(old.items())]


def _cut(parts: Sequence[dict[str, Any]], units: Sequence["Unit"]) -> dict[str, Any]:
    """Returns the state of one replica, of whose shards `parts` are the states, for this rank's shard."""
    shapes: dict[str, tuple[int, ...]] = {}
    residuals: dict[str, torch.Tensor] = {}
    for unit in units:
        for name, shape, p in zip(unit.names, unit.shapes, unit.parameters, strict=True):
            shapes[name] = shape
            if any(name not in s["residuals"] for s in parts):
                continue
            whole = _joined(name, parts, tuple(p.sharded_param.shape))
            residuals[name] = _shard(whole, shape, p.fsdp_placement.dim, unit.place()[0])
    if gone := [name for s in parts for name in s["residuals"] if name not in shapes]:
        raise CheckpointError(f"the states are of another model: this one lacks {shorten(gone)}")
    none = torch.zeros(0, dtype=torch.uint8, device="cpu")
    layout = [
        {**g, "shapes": [list(shapes[n]) for n in g["names"]], "header": none, "extra": none}
        for g in parts[0]["layout"]
        if all(n in shapes for n in g["names"])
    ]
    return {
        **parts[0],
        "residuals": residuals,
        "layout": layout,
        "controller": None,
        "part": units[0].part(),
    }


def _joined(name: str, parts: Sequence[dict[str, Any]], whole: tuple[int, ...]) -> torch.Tensor:
    """Returns what all shards kept of a parameter of shape `whole`: (vectors, *whole). The shape of a shard
    tells over which dimension the parameter was sharded: FSDP2 pads shards in the first one alone."""
    shards = len(parts)
    saved = {
        tuple(shape)
        for s in parts
        for g in s["layout"]
        for n, shape in zip(g["names"], g["shapes"], strict=True)
        if n == name
    }
    of = [(dim, (*whole[:dim], -(-size // shards), *whole[dim + 1 :])) for dim, size in enumerate(whole)]
    dim, shape = next((one for one in of if {one[1]} == saved), (0, ()))
    pieces = [s["residuals"][name] for s in parts]
    if not shape or any(x.shape[1] != prod(shape) for x in pieces):
        raise CheckpointError(
            f"the states are of another model: {name!r} has another size, shards of "
            f"{sorted(map(list, saved))}, and here all {shards} shards together have {list(whole)}"
        )
    return torch.cat([x.view(len(x), *shape) for x in pieces], 1 + dim).narrow(1 + dim, 0, whole[dim])


def _shard(whole: torch.Tensor, shape: tuple[int, ...], dim: int, number: int) -> torch.Tensor:
    """Cuts one shard, padded to `shape`, out of what `_joined` returned: (vectors, elements)."""
    out = whole.new_zeros(len(whole), *shape)
    start = number * shape[dim]
    if (length := min(shape[dim], whole.shape[1 + dim] - start)) > 0:
        out.narrow(1 + dim, 0, length).copy_(whole.narrow(1 + dim, start, length))
    return out.flatten(1)


def compress_all_gather(
    module: torch.nn.Module,
    codec: str = "int8",
    *,
    exclude: Exclude = (),
    seed: int = 0,
    **parameters: Setting,
) -> list[AllGather]:
    """Compresses the all-gather of the parameters between the ranks that share a replica, for a model to
    which `fully_shard` has been applied, on a mesh of one dimension or of two. On CPUs only so far.

    module      the root module
    codec, parameters
                as in `State`: a dense or quantized codec, because there is no memory for what is not sent.
                The default, "int8", sends one byte for each element, with a scale for each block
    exclude     [()] what is gathered as it is, as in `State`: a name, a pattern, "1-D", "embedding", ...
    seed        [0] for codecs that draw random numbers

    The forward and the backward pass compute with the rounded parameters, which have the same bits on all
    ranks. The shards stay as they are, and so do optimizers and checkpoints. If a parameter is not finite,
    all parameters of its `fully_shard` call are NaN on all ranks.

    Returns an object for each of FSDP's parameter groups, in the order of the modules, with `sent_bytes` and
    `dense_bytes`: what this rank has sent, and what it would have sent uncompressed. Raises SetupError or
    UnsupportedError, which say what to change.
    """
    check_torch()
    units = [u for u in units_of(module) if u.place()[1] > 1]
    if not units:
        raise SetupError("the model is not sharded, so it has no all-gather of parameters")
    names = {id(p): name for name, p in named_parameters(module)}
    shapes = {
        names.get(id(p.sharded_param), ""): tuple(p._orig_size) for u in units for p in u.group.fsdp_params
    }
    exact = Policy(exclude=parse_exclude(exclude), roles=roles(module)).excluded(shapes)
    made: list[AllGather] = []
    for unit in units:
        own = unit.group.fsdp_params
        if any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in own):
            raise UnsupportedError(
                f"{unit.label()} has a tensor subclass that encodes its own all-gather: leave it out here"
            )
        encoded = [names.get(id(p.sharded_param), "") not in exact for p in own]
        made.append(AllGather(codec, parameters, seed, len(made), own, encoded))
    for unit, one in zip(units, made, strict=True):
        unit.group._all_gather_comm = one
    return made
