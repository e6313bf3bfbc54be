"""The ranks that share one copy of a sharded model: what happens to one of them must end the step of all."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from sidcomp.errors import ExchangeError
from sidcomp.runtime.communicator import exchanging
from sidcomp.runtime.step import Step

_FAILED, _NOT_FINITE, _FINE = range(3)


class Peers:
    """groups: process groups over which these ranks are connected; none if this rank has the whole model."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: str) -> None:
        self._groups = tuple(groups)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that these ranks give. All of them call it."""
        if not self._groups:
            return number
        self._number.fill_(number)
        for group in self._groups:
            with exchanging("asking the other shards"):
                dist.all_reduce(self._number, dist.ReduceOp.MIN, group)
        return int(self._number.item())

    def all_agree(self, yes: bool) -> bool:
        """Whether it holds on all of these ranks."""
        return bool(self.smallest(int(yes)))

    @contextmanager
    def together(
        self, fail: Callable[[Exception], None] | None = None, step: Step | None = None
    ) -> Iterator[None]:
        """Raises an error inside it on all of these ranks, also on those whose own shard is fine: otherwise
        they would wait for the others. fail: called with the error first; an interrupt is one, too, because
        the program may go on or save. step: one that has ended; if it was not finite on one of these ranks,
        it counts on none of them."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as e:
            error = e
        mine = _FINE if step is None or not step.nonfinite else _NOT_FINITE
        try:
            worst = self.smallest(mine if error is None else _FAILED)
            if worst != _FAILED:
                if step is not None and worst == _NOT_FINITE:
                    step.nonfinite = True
                return
        except ExchangeError as e:
            error = error or ExchangeError(f"a rank that has another shard of this copy has ended ({e})")
        error = error or ExchangeError(
            "the exchange of another shard of this node has failed: see the output of its ranks"
        )
        if fail is not None:
            fail(error if isinstance(error, Exception) else ExchangeError(f"{type(error).__name__} came"))
        raise error
