"""A DDP model whose ranks keep their own gradients, because updates are sent."""

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sidcomp.errors import UnsupportedError
from sidcomp.local.alarms import NotInCopies
from sidcomp.runtime.bucket import failed


def average_nothing(ddp: DistributedDataParallel, refusal: Callable[[], Exception | None]) -> None:
    """Makes DDP average neither gradients nor, as each exchange sends rank 0's, buffers. refusal: returns why
    a backward pass must fail, if it must."""
    its = weakref.ref(ddp)  # which keeps its hook alive

    def refused() -> Exception | None:
        model = its()
        if model is not None and model._join_config.enable:
            return UnsupportedError(
                "DDP's join() sends zeros for ranks that have run out of data, and no updates, for which the "
                "others would wait: give every rank the same number of batches (drop_last=True) and leave "
                "join() out"
            )
        return refusal()

    ddp.register_comm_hook(NotInCopies(refused), _own_gradient)
    ddp.broadcast_buffers = False


# Not a string: DDP compares a hook's annotations with the types themselves.
def _own_gradient(refusal: NotInCopies, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """A communication hook that averages nothing."""
    if (error := refusal()) is not None:
        return failed(error)
    out: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    out.set_result(bucket.buffer())
    return out
