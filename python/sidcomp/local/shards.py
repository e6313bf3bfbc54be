"""Updates of a module that FSDP2 has sharded: each rank exchanges what it holds of the parameters with the
ranks of other nodes that hold the same."""

import sys
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.doors.fsdp.peers import Peers
from sidcomp.errors import CheckpointError, SetupError, UnsupportedError


def is_sharded(p: torch.Tensor) -> bool:
    return hasattr(p, "to_local")


@torch.no_grad()
def own_part(x: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this rank holds, in the same memory. The tensor may be sharded."""
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def reshard(module: torch.nn.Module) -> None:
    """Frees what FSDP has gathered and not freed yet, as after a forward pass without a backward pass. It
    would not follow if the shards are changed."""
    # Its import takes a second. Where it has not been imported, nothing is sharded.
    sharded: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for m in module.modules() if sharded is not None else ():
        if isinstance(m, sharded):
            m.reshard()


class Shards:
    """The part of a module's parameters that a rank holds; without FSDP all of them.

    named   the parameters, by name, as after `reshard`
    group   the ranks that hold the same shards; None: the program has not said which

    Raises SetupError or UnsupportedError.
    """

    def __init__(self, named: dict[str, torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self._named = named
        self.part = ""  # in messages and checkpoints; "" for the whole module
        self.peers = Peers((), "cpu")
        self.least = 0  # parameters of which the smallest shard has elements; 0 without shards
        found = {name: p.device_mesh for name, p in named.items() if is_sharded(p)}  # type: ignore[attr-defined]
        if not found:
            return
        name, mesh = next(iter(found.items()))
        from torch.distributed import fsdp

        if not hasattr(fsdp, "FSDPModule"):
            raise UnsupportedError(f"parameter {name!r} is sharded, which needs PyTorch 2.6 or newer")
        if other := [n for n, its in found.items() if its != mesh]:
            raise UnsupportedError(
                f"parameters {name!r} and {other[0]!r} are sharded over different meshes: apply fully_shard "
                "to all modules with the same mesh"
            )
        ranks = mesh.mesh.flatten().tolist()
        if group is None:
            raise SetupError(
                f"parameter {name!r} is a shard: give as process_group the ranks of all nodes that hold the "
                'same shard, for example mesh["replicate"].get_group()'
            )
        mine = dist.get_rank()
        if both := set(ranks) & set(dist.get_process_group_ranks(group)) - {mine}:
            raise SetupError(
                f"parameter {name!r} is sharded over ranks {ranks}, and process_group has rank {min(both)} "
                "of them too, with which FSDP averages every gradient: shard inside a node alone, for "
                'example fully_shard(module, mesh=mesh["shard"]), and give '
                'mesh["replicate"].get_group()'
            )
        self.part = f"shard {ranks.index(mine)} of {len(ranks)}"
        self.peers = Peers([mesh.get_group(dim) for dim in range(mesh.ndim)], mesh.device_type)
        self.least = self.peers.smallest(len(self.local()))
        if not self.least:
            raise UnsupportedError("a shard holds no element of any parameter: use fewer shards")

    def local(self) -> dict[str, torch.Tensor]:
        """This rank's parts of the parameters, which share their memory; without those of no element."""
        own = {name: own_part(p) for name, p in self._named.items()}
        return {name: x for name, x in own.items() if x.numel()}

    def find(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The shards where they are now; empty if there are none."""
        if not self.part:
            return {}
        reshard(module)
        return self.local()

    def check_saved(self, saved: dict[str, Any]) -> None:
        """Raises CheckpointError if a rank with another shard has saved it."""
        if (part := saved.get("part", "")) != self.part:
            raise CheckpointError(
                f"sidcomp.compress: this was saved by a rank that had {part or 'the whole module'}, and this "
                f"one has {self.part or 'the whole module'}: every rank saves and loads its own, and the "
                "number of shards must stay"
            )
