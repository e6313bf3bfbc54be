"""Parameters that no rank uses in a pass, under `DDP(find_unused_parameters=True)`.

DDP puts zeros into a bucket for them, or their `grad` of the pass before, and does not take the result out.
But with what the residual adds, the result need not be zero, and the residual has given it up.
"""

import weakref
from collections.abc import Collection, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from sidcomp.doors.names import named_parameters
from sidcomp.runtime import unsent
from sidcomp.runtime.engine import Engine


def watched(ddp: DistributedDataParallel) -> bool:
    """Whether a pass may leave out parameters that others use. In a static graph none does, so the residual
    of a parameter that is unused is always zero."""
    return ddp.find_unused_parameters and not ddp.static_graph


class Unused:
    """Sees to it that what DDP does not take out of a DDP model's buckets is not lost."""

    def __init__(self, ddp: DistributedDataParallel, names: Collection[str]) -> None:
        """names: the parameters that DDP's buckets hold. Others may have been frozen before DDP wrapped the
        module, or be released since."""
        self._ref = weakref.ref(ddp)
        # in the order of DDP's map
        self._parameters = [(name, p) for name, p in named_parameters(ddp.module) if name in names]

    def after(self, engine: Engine, buffers: Sequence[torch.Tensor]) -> None:
        """Call it in a backward pass or in one of its callbacks, before DDP takes the gradients out of its
        buckets: what is to be done is done after that. buffers: the buckets' of the engine's layout."""
        queue = torch.autograd.Variable._execution_engine.queue_callback
        # DDP queues its own callback behind the hook of the last bucket. This one comes before it, the next
        # one after it.
        queue(lambda: queue(lambda: self._keep(engine, buffers)))

    def _keep(self, engine: Engine, buffers: Sequence[torch.Tensor]) -> None:
        ddp = self._ref()
        assert ddp is not None
        # how many ranks have used each parameter: DDP has summed it, and waited for the sum
        used = ddp.reducer._get_local_used_map().tolist()
        idle = [x for x, n in zip(self._parameters, used, strict=True) if not n]
        if not idle:
            return
        waits = {name for name, p in idle if p.grad is None}
        # A `grad` that is not a part of the bucket has been sent, as a gradient of this rank.
        apart = {name: p for name, p in idle if p.grad is not None and not ddp.gradient_as_bucket_view}
        for name, n, own in unsent.bring_back(engine, buffers, waits, apart):
            p = apart[name]
            assert p.grad is not None
            mean = buffers[n][own]
            p.grad.copy_(mean.as_strided(p.shape, p.stride(), mean.storage_offset()))
