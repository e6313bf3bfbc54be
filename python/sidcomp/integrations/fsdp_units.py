"""FSDP2's parameter groups, which one reduce-scatter carries each, as this package uses them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.config.grouping import shorten
from sidcomp.errors import ArgumentError, SetupError, UnsupportedError
from sidcomp.runtime.members import refuse

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DataParallelMeshInfo,
        DDPMeshInfo,
        FSDPMeshInfo,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
except ImportError:  # an older torch
    FSDPState = None  # type: ignore[assignment,misc]


def check_torch() -> None:
    if FSDPState is None:
        raise UnsupportedError(
            "sidcomp.fsdp needs PyTorch 2.13 or newer: it uses internals of fully_shard that older versions "
            "do not have"
        )


def found(module: torch.nn.Module) -> list["Unit"]:
    """Returns the parameter groups of the module and of all modules in it. Raises SetupError, if there are
    none, or UnsupportedError."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"module={module!r}: give the torch.nn.Module that fully_shard was called with")
    names = {id(p): name for name, p in module.named_parameters()}
    found: list[Unit] = []
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
        found += [Unit(state, g, names) for g in groups]
    if not found:
        raise SetupError("fsdp.compress: call fully_shard or replicate on the model first")
    return found


def trained(module: torch.nn.Module) -> list["Unit"]:
    """The same, without those of which no parameter requires a gradient."""
    units = [u for u in found(module) if u.names]
    if not units:
        raise SetupError("fsdp.compress: no parameter of the model requires a gradient")
    return units


class Unit:
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

    def take_over(self, arrive: Callable[[torch.Tensor], None]) -> None:
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
        self.group._all_reduce_hook = arrive

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
