"""The model whose gradients an engine averages, as a door describes it."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Model:
    """A description of the model, which a door gives the engine once.

    process_group   the ranks to average over
    shapes          the shapes of the parameters whose gradients are averaged, by name
    names           the names of the model's parameters, by id: for the optimizer that is followed. They may
                    include parameters that are in no bucket.
    part            which part of a sharded model these ranks have, such as "shard 0 of 4"; "" for all of it
    plain           what trains it without sidcomp, in messages
    gradients       the buckets of a step are all gradients of the whole model. In a further backward pass
                    before the optimizer's step they also hold what the earlier ones have returned
    updates         the buckets hold what each rank's own optimizer did. They are all ready when the first one
                    is, and each rank keeps its own error
    beside          bytes that the door itself all-reduces in each step, for a noise correction
    """

    process_group: dist.ProcessGroup
    shapes: dict[str, tuple[int, ...]]
    names: dict[int, str]
    part: str = ""
    plain: str = "plain DDP"
    gradients: bool = False
    updates: bool = False
    beside: int = 0

    def speaker(self, rank: int) -> int:
        """0 on the rank that speaks for all. The ranks of each shard count from 0: those of one speak."""
        return rank if not self.part or self.part.startswith("shard 0 ") else 1
