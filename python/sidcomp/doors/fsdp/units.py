"""FSDP2's parameter groups, which one reduce-scatter carries each, as this package uses them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.autotune.measurement import Recorder
from sidcomp.config.grouping import shorten
from sidcomp.doors.fsdp.peers import Peers
from sidcomp.doors.names import named_parameters
from sidcomp.errors import ArgumentError, SetupError, UnsupportedError
from sidcomp.runtime.members import refuse
from sidcomp.runtime.plain_data import listing, text
from sidcomp.runtime.telling import tell


@functools.cache
def _fsdp2() -> Any:
    """Returns the module of FSDP2's meshes, or None: this torch is older. To import it takes a second and
    sympy, which only those pay who use it."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_common
        from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state  # noqa: F401
    except ImportError:
        return None
    return _fsdp_common


def check_torch() -> None:
    if _fsdp2() is None:
        raise UnsupportedError(
            "sidcomp.fsdp needs PyTorch 2.13 or newer: it uses internals of fully_shard that older versions "
            "do not have"
        )


def units_of(module: torch.nn.Module) -> list["Unit"]:
    """Returns the parameter groups of the module and of all modules in it. Raises SetupError, if there are
    none, or UnsupportedError."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"module={module!r}: give the torch.nn.Module that fully_shard was called with")
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    names = {id(p): name for name, p in named_parameters(module)}
    found: list[Unit] = []
    for m in module.modules():
        state = _get_module_fsdp_state(m)
        if state is None or any(state is u.state for u in found):
            continue
        groups = state._fsdp_param_groups
        if len(groups) > 1:
            raise UnsupportedError(
                "fully_shard(shard_placement_fn=...) with several meshes in one module is not supported: "
                "call fully_shard once for each mesh. All must have the same replicas"
            )
        found += [Unit(state, g, names) for g in groups]
    if not found:
        raise SetupError("fsdp.compress: call fully_shard or replicate on the model first")
    return found


def check_shards(units: Sequence["Unit"], group: dist.ProcessGroup, peers: Peers) -> None:
    """Raises SetupError on all ranks if `group`, which the program has named as the replicas, has ranks that
    hold different shards: their average would be of different parameters. All ranks call it. peers: the
    ranks with the other shards of this replica."""
    parts = [unit.part() for unit in units]
    told = tell(group, parts, listing(text), "fsdp.compress()")
    differ = [[x for x in zip(told[0], theirs, strict=False) if x[0] != x[1]] for theirs in told]
    other = next((r for r, found in enumerate(differ) if found), None)
    if peers.all_agree(other is None):
        return
    advice = 'give ranks that hold the same shard, for example mesh["replicate"].get_group()'
    if other is None:
        raise SetupError(
            "other ranks have got as replicas= (of sidcomp.compress: process_group=) ranks that hold "
            f"different shards: {advice}"
        )
    ranks = dist.get_process_group_ranks(group)
    a, b = differ[other][0]
    raise SetupError(
        f"of replicas= (of sidcomp.compress: process_group=) rank {ranks[0]} holds {a or 'all shards'}, and "
        f"rank {ranks[other]} {b or 'all shards'}: {advice}"
    )


class Hook:
    """FSDP's all-reduce hook of a parameter group whose average over replicas `owner` has taken over.

    info: the mesh as FSDP knew it before.
    """

    def __init__(self, owner: Any, arrive: Callable[[torch.Tensor], None], info: Any) -> None:
        self.owner, self._arrive, self.info = owner, arrive, info

    def __call__(self, buffer: torch.Tensor) -> None:
        self._arrive(buffer)


class Unit:
    """One of FSDP's parameter groups: what one reduce-scatter carries. Of each parameter it holds this rank's
    shard, padded to the size that all shards have.

    owner   who has taken over its average, or None
    coming  the indices of the parameters whose gradients the reduce-scatter in progress carries
    """

    def __init__(self, state: Any, group: Any, names: dict[int, str]) -> None:
        self.state, self.group = state, group
        self.parameters = group.fsdp_params
        self.names = [names.get(id(p.sharded_param), "") for p in self.parameters]
        self.shapes = [tuple(p.padded_sharded_param_size) for p in self.parameters]
        self.sizes = [p.padded_sharded_param_size.numel() for p in self.parameters]
        self.device: torch.device = group.device
        self.coming: tuple[int, ...] = ()
        self.partial: tuple[tuple[int, ...], torch.Tensor] | None = None  # of passes without an all-reduce
        hook = group._all_reduce_hook
        self.owner: Any = hook.owner if isinstance(hook, Hook) else None
        self._info = hook.info if isinstance(hook, Hook) else group.mesh_info

    @property
    def trainable(self) -> list[int]:
        """The indices of the parameters that require a gradient."""
        return [i for i, p in enumerate(self.parameters) if p.sharded_param.requires_grad]

    def label(self) -> str:
        return shorten([self.names[i] for i in self.trainable] or self.names)

    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that FSDP itself would average over."""
        return self._info.replicate_process_group if isinstance(self._info, _fsdp2().DDPMeshInfo) else None

    def shards(self) -> dist.ProcessGroup | None:
        """The ranks that share a replica."""
        return self._info.shard_process_group if isinstance(self._info, _fsdp2().FSDPMeshInfo) else None

    def place(self) -> tuple[int, int]:
        """The number of this rank's shard, and how many there are."""
        info = self._info
        sharded = isinstance(info, _fsdp2().FSDPMeshInfo)
        return (info.shard_mesh_rank, info.shard_mesh_size) if sharded else (0, 1)

    def part(self) -> str:
        rank, shards = self.place()
        return f"shard {rank} of {shards}" if shards > 1 else ""

    def dtype(self) -> torch.dtype:
        """That of a result of the reduce-scatter. Call it after the first forward pass."""
        p = self.parameters[0]
        dtype: torch.dtype = self.group._reduce_dtype or p.param_dtype or p.orig_dtype
        return dtype

    def check(self, group: dist.ProcessGroup, given: bool) -> None:
        """Raises SetupError or UnsupportedError if its average over `group` cannot be taken over. given: the
        program has named the group."""
        own = self.replicas()
        if given and own is not None:
            raise SetupError(
                "the model is on a mesh of two dimensions, which names its replicas: leave replicas= out"
            )
        refuse(
            group,
            "FSDP shards a model over ranks that stay",
            "give replicas= a group that torch.distributed has made, or leave it out",
        )
        ranks = dist.get_process_group_ranks(group)
        if not given and (own is None or dist.get_process_group_ranks(own) != ranks):
            raise UnsupportedError(
                f"{self.label()} is replicated over other ranks than {ranks}: give all modules the same mesh"
            )
        if self.group._all_reduce_hook is not None and self.owner is None:
            raise UnsupportedError(
                f"{self.label()} has an all-reduce hook (set_all_reduce_hook), whose place compress needs: "
                "leave that call out"
            )
        self._check_factors()
        if any(self.parameters[i].sharded_param.is_complex() for i in self.trainable):
            raise UnsupportedError(
                f"{self.label()} has complex parameters: keep real and imaginary parts apart"
            )

    def _check_factors(self) -> None:
        if self.group.gradient_divide_factor is not None:
            raise UnsupportedError(
                "set_gradient_divide_factor is not supported: replicas are averaged; leave that call out, "
                "and scale the loss instead"
            )
        if self.group.force_sum_reduction_for_comms:
            raise UnsupportedError(
                "set_force_sum_reduction_for_comms(True) is not supported: leave that call out"
            )

    def take_over(self, owner: Any, arrive: Callable[[torch.Tensor], None]) -> None:
        """Makes FSDP hand over the result of the reduce-scatter, and not average it over replicas itself."""
        group, info = self.group, self._info
        if self.owner is None:
            shared = {"mesh": info.mesh, "dp_mesh_dims": info.dp_mesh_dims, "spmd_mesh": info.spmd_mesh}
            fsdp2 = _fsdp2()
            if isinstance(info, fsdp2.DDPMeshInfo):
                if isinstance(info, fsdp2.FSDPMeshInfo):
                    mine = fsdp2.FSDPMeshInfo(shard_mesh_dim=info.shard_mesh_dim, **shared)
                    mine.reduce_scatter_process_group = info.reduce_scatter_process_group
                else:
                    mine = fsdp2.DataParallelMeshInfo(replicate_mesh_dim=info.replicate_mesh_dim, **shared)
                if group.post_forward_mesh_info is info:
                    # Otherwise FSDP takes it for another mesh, and copies the shards after the forward pass.
                    group.post_forward_mesh_info = mine
                group.mesh_info = mine
        group._all_reduce_hook = Hook(owner, arrive, info)
        group.post_backward = self._post_backward
        if hasattr(group, "_reset_iter_state"):
            group._reset_iter_state = self._reset_iter_state
        self.owner = owner

    # ---- in a step

    def _post_backward(self, *unused: Any) -> None:
        """Notes what FSDP is about to reduce, which nobody can see in the result, and lets it do so."""
        self.coming = tuple(i for i, p in enumerate(self.parameters) if self._comes(p))
        type(self.group).post_backward(self.group, *unused)

    def _reset_iter_state(self) -> None:
        """FSDP forgets the step in progress; what has been collected for it goes too."""
        self.partial = None
        type(self.group)._reset_iter_state(self.group)

    def _comes(self, p: Any) -> bool:
        whole = getattr(p, "_unsharded_param", None)
        if whole is None:
            return False
        filled = self.group.reduce_scatter_unused_params and whole.requires_grad
        return filled or whole.grad is not None or p.unsharded_accumulated_grad is not None

    def check_step(self, buffer: torch.Tensor) -> None:
        self._check_factors()
        if buffer.dtype is torch.float16:
            raise UnsupportedError(
                "MixedPrecisionPolicy(reduce_dtype=torch.float16) is divided again after the average: use "
                "bfloat16 or float32"
            )

    def refuse_hooks(self) -> None:
        own = (self.parameters[i].sharded_param for i in self.coming)
        hooks = (h for p in own for h in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())
        if not all(map(Recorder.has, hooks)):  # by which "auto" learns when a gradient is there
            raise UnsupportedError(
                f"{self.label()} has hooks that run as soon as a gradient is there (an optimizer in the "
                "backward pass), but gradients are complete only when backward() returns: step after it"
            )

    def set_grads_aside(self) -> list[torch.Tensor | None]:
        """Takes the accumulated gradients away, so that FSDP does not add to them what is not averaged
        yet."""
        own = [self.parameters[i].sharded_param for i in self.coming]
        kept = [p.grad for p in own]
        for p in own:
            p.grad = None
        return kept

    def put_back(self, coming: Sequence[int], kept: Sequence[torch.Tensor | None]) -> None:
        """Undoes `set_grads_aside`, because the pass has failed: what it brought is averaged nowhere."""
        for i, before in zip(coming, kept, strict=True):
            p = self.parameters[i].sharded_param
            if p.grad is not None:  # else the program has dropped the gradients
                p.grad = before

    def complete(
        self, coming: tuple[int, ...], buffer: torch.Tensor, kept: Sequence[torch.Tensor | None]
    ) -> None:
        """Puts the averaged shards into the gradients. A gradient that is a view of the buffer has its shard
        already; FSDP copies it where it converts the dtype or moves it to the CPU."""
        offset, start = 0, buffer.untyped_storage().data_ptr()
        for i, before in zip(coming, kept, strict=True):
            p = self.parameters[i]
            grad = p.sharded_param.grad
            assert grad is not None
            local = grad._local_tensor
            if local.untyped_storage().data_ptr() != start:
                local.copy_(torch.as_strided(buffer, p.sharded_size, p.contiguous_sharded_stride, offset))
            if before is not None:
                before._local_tensor += local  # type: ignore[attr-defined]
                p.sharded_param.grad = before
            offset += self.sizes[i]
