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
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sidcomp.config.grouping import shorten
from sidcomp.config.policy import Exclude, Policy, parse_exclude
from sidcomp.config.schedule import Setting
from sidcomp.errors import ArgumentError, CheckpointError, SetupError, UnsupportedError
from sidcomp.integrations.all_gather import AllGather, encodes_itself, for_parameters
from sidcomp.integrations.ddp import roles
from sidcomp.integrations.reduce_scatter import Passes, ReduceScatter
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.engine import Model
from sidcomp.state import State

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DataParallelMeshInfo,
        DDPMeshInfo,
        FSDPMeshInfo,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
except ImportError:  # an older torch
    FSDPState = None  # type: ignore[assignment,misc]

_NEEDS = (
    "sidcomp.fsdp needs PyTorch 2.13 or newer: it uses internals of fully_shard that older "
    "versions do not have"
)


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
    the first backward pass nothing overlaps, because the order of the parameter groups is not known yet.
    Gradients are complete when backward() returns. They may be accumulated: by several backward passes,
    `set_requires_gradient_sync`, `set_requires_all_reduce` and `set_is_last_backward`. Mixed precision works
    with float32 or bfloat16 as reduce_dtype. CPU offload has not run on a GPU. Needs PyTorch 2.13.

    The residual takes 4 bytes for each element of the rank's shard. Each rank saves its own state_dict.

    Raises SetupError or UnsupportedError, which say what to change.
    """
    if FSDPState is None:
        raise UnsupportedError(_NEEDS)
    if isinstance(module, DistributedDataParallel):
        raise SetupError("fsdp.compress is for fully_shard and replicate: use sidcomp.register for DDP")
    if type(module).__name__ == "FullyShardedDataParallel":
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) has no place for compression with a residual: use fully_shard "
            "(FSDP2)"
        )
    if not isinstance(state, State):
        raise ArgumentError(f'state={state!r}: give a sidcomp.State, such as sidcomp.State("topk")')
    units = _units(module)
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
    if state._door is not None and state._door.open:
        raise SetupError("this State serves a model already: give every model a State of its own")
    door = _Door(module, units, group, state)
    state._attach(door, roles(module))
    state._engine.connect(door.model, units[0].device, "sidcomp.fsdp.compress()")
    for index, unit in enumerate(units):
        unit.take_over(door, index)


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
    ranks that share the replica, and clears the residuals. Raises SetupError or UnsupportedError, which say
    what to change.
    """
    if FSDPState is None:
        raise UnsupportedError(_NEEDS)
    made: list[ReduceScatter] = []
    passes = Passes()
    for unit in _units(module):
        if unit.place()[1] > 1:
            one = ReduceScatter(codec, memory, parameters, seed, len(made), passes)
            unit.group._reduce_scatter_comm = one
            made.append(one)
    if not made:
        raise SetupError("the model is not sharded, so it has no reduce-scatter: use fsdp.compress")
    return made


def reshard(states: Sequence[dict[str, Any]], module: torch.nn.Module) -> list[dict[str, Any]]:
    """Takes the states that all ranks saved on another mesh, and cuts out what this rank's shard needs:

        sidcomp.fsdp.compress(model, state)
        state.load_state_dict(sidcomp.fsdp.reshard(states, model))

    states: the results of `State.state_dict` of all ranks that saved, in any order. module: as in `compress`,
    sharded over the new mesh. Returns a list with a state for each old replica. Residuals are joined and cut
    as the parameters are, so each element keeps its own; `load_state_dict` distributes them if there is now
    another number of replicas. The codecs' statistics and the plans of "auto" begin anew.

    Raises CheckpointError if the state of a shard is missing, or if they are of another model.
    """
    if FSDPState is None:
        raise UnsupportedError(_NEEDS)
    if not isinstance(states, list | tuple) or not all(isinstance(s, dict) and "rank" in s for s in states):
        raise ArgumentError("states: give a list of what State.state_dict() returned on each rank that saved")
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
    units = _units(module)
    return [_cut([own[i] for i in range(shards)], units) for _, own in sorted(old.items())]


def _cut(parts: Sequence[dict[str, Any]], units: Sequence["_Unit"]) -> dict[str, Any]:
    """Returns the state of one replica, of whose shards `parts` are the states, for this rank's shard."""
    shapes: dict[str, tuple[int, ...]] = {}
    residuals: dict[str, torch.Tensor] = {}
    for unit in units:
        for name, shape, p in zip(unit.names, unit.shapes, unit.parameters, strict=True):
            shapes[name] = shape
            if any(name not in s["residuals"] for s in parts):
                continue
            pieces = [s["residuals"][name] for s in parts]
            rows, width = p.sharded_param.shape[0], p.sharded_param.shape.numel() // p.sharded_param.shape[0]
            each = -(-rows // len(parts))
            if any(x.shape[1] != each * width for x in pieces):
                raise CheckpointError(f"the states are of another model: {name!r} has another size")
            whole = torch.cat([x.view(len(x), each, width) for x in pieces], 1)[:, :rows]
            start = unit.place()[0] * shape[0]
            own = whole[:, start : start + shape[0]]
            out = whole.new_zeros(len(whole), shape[0], width)
            out[:, : own.shape[1]] = own
            residuals[name] = out.flatten(1)
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
    if FSDPState is None:
        raise UnsupportedError(_NEEDS)
    units = [u for u in _found(module) if u.place()[1] > 1]
    if not units:
        raise SetupError("the model is not sharded, so it has no all-gather of parameters")
    names = {id(p): name for name, p in module.named_parameters()}
    shapes = {
        names.get(id(p.sharded_param), ""): tuple(p._orig_size) for u in units for p in u.group.fsdp_params
    }
    exact = Policy(exclude=parse_exclude(exclude), roles=roles(module)).excluded(shapes)
    made: list[AllGather] = []
    for unit in units:
        own = unit.group.fsdp_params
        if encodes_itself(own):
            raise UnsupportedError(
                f"{unit.label()} has a tensor subclass that encodes its own all-gather: leave it out here"
            )
        encoded = [names.get(id(p.sharded_param), "") not in exact for p in own]
        made.append(for_parameters(own, encoded, codec, parameters, seed, len(made)))
    for unit, one in zip(units, made, strict=True):
        unit.group._all_gather_comm = one
    return made


def _found(module: torch.nn.Module) -> list["_Unit"]:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"module={module!r}: give the torch.nn.Module that fully_shard was called with")
    names = {id(p): name for name, p in module.named_parameters()}
    found: list[_Unit] = []
    for m in module.modules():
        state = _get_module_fsdp_state(m)
        if state is None or any(state is u.state for u in found):
            continue
        groups = state._fsdp_param_groups
        if len(groups) > 1:
            raise UnsupportedError(
                "fully_shard(shard_placement_fn=...) with several meshes in one module is not supported: "
                "call fully_shard once for each mesh"
            )
        found += [_Unit(state, g, names) for g in groups]
    if not found:
        raise SetupError("fsdp.compress: call fully_shard or replicate on the model first")
    return found


def _units(module: torch.nn.Module) -> list["_Unit"]:
    units = [u for u in _found(module) if u.names]
    if not units:
        raise SetupError("fsdp.compress: no parameter of the model requires a gradient")
    return units


class _Unit:
    """One of FSDP's parameter groups: what one reduce-scatter carries. Of each parameter it holds this rank's
    shard, padded to the size that all shards have."""

    def __init__(self, state: Any, group: Any, names: dict[int, str]) -> None:
        self.state, self.group = state, group
        self.parameters = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        self.names = [names.get(id(p.sharded_param), "") for p in self.parameters]
        self.shapes = [tuple(p.padded_sharded_param_size) for p in self.parameters]
        self.sizes = [p.padded_sharded_param_size.numel() for p in self.parameters]
        self.numel = sum(self.sizes)
        self.device: torch.device = group.device
        self.partial: torch.Tensor | None = None  # gradients of passes without an all-reduce

    def label(self) -> str:
        return shorten(self.names)

    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that FSDP itself would average over."""
        info = self.group.mesh_info
        return info.replicate_process_group if isinstance(info, DDPMeshInfo) else None

    def place(self) -> tuple[int, int]:
        """The number of this rank's shard, and how many there are."""
        info = self.group.mesh_info
        return (info.shard_mesh_rank, info.shard_mesh_size) if isinstance(info, FSDPMeshInfo) else (0, 1)

    def part(self) -> str:
        rank, shards = self.place()
        return f"shard {rank} of {shards}" if shards > 1 else ""

    def check(self, group: dist.ProcessGroup, given: bool) -> None:
        own = self.replicas()
        if given and own is not None:
            raise SetupError(
                "the model is on a mesh of two dimensions, which names its replicas: leave replicas= out"
            )
        ranks = dist.get_process_group_ranks(group)
        if not given and (own is None or dist.get_process_group_ranks(own) != ranks):
            raise UnsupportedError(
                f"{self.label()} is replicated over other ranks than {ranks}: give all modules the same mesh"
            )
        if self.group.gradient_divide_factor is not None:
            raise UnsupportedError(
                "set_gradient_divide_factor is not supported: replicas are averaged; scale the loss instead"
            )
        if self.group.force_sum_reduction_for_comms:
            raise UnsupportedError("set_force_sum_reduction_for_comms(True) is not supported: leave it out")
        if any(p.sharded_param.is_complex() for p in self.parameters):
            raise UnsupportedError(
                f"{self.label()} has complex parameters: keep real and imaginary parts apart"
            )

    def take_over(self, door: "_Door", index: int) -> None:
        """Makes FSDP hand over the result of the reduce-scatter, and not average it over replicas itself."""
        info = self.group.mesh_info
        shared = {"mesh": info.mesh, "dp_mesh_dims": info.dp_mesh_dims, "spmd_mesh": info.spmd_mesh}
        if isinstance(info, DDPMeshInfo):
            if isinstance(info, FSDPMeshInfo):
                mine: DataParallelMeshInfo = FSDPMeshInfo(shard_mesh_dim=info.shard_mesh_dim, **shared)
                mine.reduce_scatter_process_group = info.reduce_scatter_process_group  # type: ignore[attr-defined]
            else:
                mine = DataParallelMeshInfo(replicate_mesh_dim=info.replicate_mesh_dim, **shared)
            self.group.mesh_info = mine
        self.group._all_reduce_hook = lambda buffer: door.arrive(index, buffer)

    # ---- in a step
    # ------------------------------------------------------------------------------------------------

    def check_step(self, buffer: torch.Tensor) -> None:
        if buffer.numel() != self.numel:
            raise UnsupportedError(
                f"only some of the parameters {self.label()} had a gradient in this backward pass: call "
                "set_reduce_scatter_unused_params(True) on the model, or freeze those that are not used"
            )
        if buffer.dtype is torch.float16:
            raise UnsupportedError(
                "MixedPrecisionPolicy(reduce_dtype=torch.float16) is divided again after the average: use "
                "bfloat16 or float32"
            )

    def refuse_hooks(self) -> None:
        if any(getattr(p.sharded_param, "_post_accumulate_grad_hooks", None) for p in self.parameters):
            raise UnsupportedError(
                f"{self.label()} has hooks that run as soon as a gradient is there (an optimizer in the "
                "backward pass), but gradients are complete only when backward() returns: step after it"
            )

    def set_grads_aside(self) -> list[torch.Tensor | None]:
        """Takes the accumulated gradients away, so that FSDP does not add to them what is not averaged
        yet."""
        kept = [p.sharded_param.grad for p in self.parameters]
        for p in self.parameters:
            p.sharded_param.grad = None
        return kept

    def complete(self, buffer: torch.Tensor, kept: Sequence[torch.Tensor | None]) -> None:
        """Puts the averaged shards into the gradients. A gradient that is a view of the buffer has its shard
        already; FSDP copies it where it converts the dtype or moves it to the CPU."""
        offset, start = 0, buffer.untyped_storage().data_ptr()
        for p, size, before in zip(self.parameters, self.sizes, kept, strict=True):
            grad = p.sharded_param.grad
            assert grad is not None
            local = grad._local_tensor
            if local.untyped_storage().data_ptr() != start:
                local.copy_(torch.as_strided(buffer, p.sharded_size, p.contiguous_sharded_stride, offset))
            if before is not None:
                before._local_tensor += local  # type: ignore[attr-defined]
                p.sharded_param.grad = before
            offset += size


class _Arrival:
    """A parameter group whose gradients have come in this backward pass."""

    def __init__(self, unit: _Unit, buffer: torch.Tensor, kept: list[torch.Tensor | None]) -> None:
        self.unit, self.buffer, self.kept = unit, buffer, kept
        self.averaged = True  # False: it is only collected, for a later pass
        self.future: torch.futures.Future[torch.Tensor] | None = None


class _Door:
    """Hands the results of FSDP's reduce-scatters to the engine. The model keeps it alive, and with it the
    State; it does not keep the model alive."""

    def __init__(
        self, module: torch.nn.Module, units: list[_Unit], group: dist.ProcessGroup, state: State
    ) -> None:
        self._module = weakref.ref(module)
        self.units, self.state, self.engine = units, state, state._engine
        self.model = Model(
            group,
            {name: shape for u in units for name, shape in zip(u.names, u.shapes, strict=True)},
            {id(p): name for name, p in module.named_parameters()},
            units[0].part(),
            "plain HSDP" if units[0].part() else "plain replicate",
        )
        self._index: dict[int, int] = {}  # a unit's bucket, once their order is known
        self._arrived: dict[int, _Arrival] = {}
        self._error: Exception | None = None
        self._task = -1  # autograd's number of the backward pass in progress

    @property
    def open(self) -> bool:
        return self._module() is not None

    def before_forward(self, function: Callable[..., None]) -> torch.utils.hooks.RemovableHandle:
        module = self._module()
        assert module is not None
        return module.register_forward_pre_hook(function)

    def reset(self, error: Exception) -> None:
        self._arrived, self._error = {}, None

    # ---- a backward pass
    # ------------------------------------------------------------------------------------------------

    def arrive(self, index: int, buffer: torch.Tensor) -> None:
        """FSDP's all-reduce hook. It does not raise, because that would leave FSDP in the middle of a step;
        the end of the backward pass does."""
        task = torch._C._current_graph_task_id()
        if not self._arrived or (task != -1 and task != self._task):
            self.reset(SetupError("the backward pass before this one did not finish"))
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if self._error is None:
            try:
                self._take(index, buffer)
            except Exception as e:
                self._error = e

    def _take(self, index: int, buffer: torch.Tensor) -> None:
        self.state._open()
        unit = self.units[index]
        unit.check_step(buffer)
        if self.engine.tuner is None:  # which records with such hooks when a gradient is there
            unit.refuse_hooks()
        mine = self._arrived[index] = _Arrival(unit, buffer, unit.set_grads_aside())
        if not unit.group.all_reduce_grads:  # set_requires_all_reduce(False)
            unit.partial = buffer.clone() if unit.partial is None else unit.partial.add_(buffer)
            buffer.zero_()
            mine.averaged = False
            return
        if unit.partial is not None:
            buffer.add_(unit.partial)
            unit.partial = None
        if not self._formed:
            return  # `_finish` makes the groups, when all parameter groups are known
        if index not in self._index:
            raise UnsupportedError(
                f"{unit.label()} had no gradient in the first backward pass and has one now: freeze what is "
                "not used, and call fsdp.compress with a new State when that changes"
            )
        mine.future = self.engine.ready(self._index[index], buffer)

    @property
    def _formed(self) -> bool:
        return self.engine.layout is not None

    def _finish(self) -> None:
        """The end of the backward pass: waits, on the CPU here and on a GPU in its stream."""
        arrived, error = self._arrived, self._error
        self._arrived, self._error = {}, None
        averaged = {i: a for i, a in arrived.items() if a.averaged}
        try:
            if error is not None:
                raise error
            if averaged and not self._formed:
                self._form(averaged)
            if averaged and len(averaged) < len(self._index):
                missing = [self.units[i].label() for i in self._index if i not in averaged]
                raise UnsupportedError(
                    f"{missing[0]} had a gradient in the first backward pass and has none now: freeze what "
                    "is not used, and call fsdp.compress with a new State when that changes"
                )
            for a in averaged.values():
                assert a.future is not None
                a.future.wait()
        except Exception as e:
            self.engine.report(e)
            self.engine.abandon(e)
            raise
        if self.units[0].device.type == "cuda":
            # FSDP converts and accumulates what is not averaged yet in this stream; `complete` comes after.
            torch.cuda.current_stream().wait_stream(self.units[0].group.comm_ctx.all_reduce_stream)
        with torch.no_grad():
            for a in arrived.values():
                a.unit.complete(a.buffer, a.kept)

    def _form(self, arrived: dict[int, _Arrival]) -> None:
        """Makes the groups in the order in which gradients came, and sends them."""
        buckets = [
            Bucket(a.unit.names, a.unit.shapes, a.buffer, [p.sharded_param for p in a.unit.parameters])
            for a in arrived.values()
        ]
        self.engine.form(self.model, buckets)
        self._index = {i: bucket for bucket, i in enumerate(arrived)}
        for i, a in arrived.items():
            a.future = self.engine.ready(self._index[i], a.buffer)
