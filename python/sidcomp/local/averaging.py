"""Whether all ranks call `average` together: one that takes another step waits in an exchange meanwhile."""

from typing import Any

import torch
import torch.distributed as dist

from sidcomp.errors import RankError
from sidcomp.local.shards import own_part
from sidcomp.runtime.communicator import exchanging
from sidcomp.runtime.forming import rank_error

Updates = Any  # of steps.py, which imports this module

_ADVICE = "all ranks must take the same number of steps: let the rank with the fewest batches end each epoch"


def agree(updates: Updates) -> None:
    """Raises RankError on all ranks unless all of them call `average` after as many steps. Whatever a rank
    with another step sends first, this takes part in: with zeros in what the noise correction sums, and with
    an error in the exchange, whose bytes it costs. On a device no payload tells of an error, and only ranks
    that call `average` are compared."""
    engine, steps = updates.state.engine, updates.steps
    engine.keep()
    exchange = engine.exchange
    if exchange.world == 1:
        return
    work = None
    if not engine.on_device:
        then, parts = updates._schedule.next(steps)
        if updates.noise is not None and 0 in parts:
            work = updates.noise.stand_in(then - steps)
        mine = RankError(f"average() after {steps} steps, not {then}: {_ADVICE}")
        for rank, why in engine.stand_in(mine, updates._schedule.indices(parts)):
            if why and f"{type(mine).__name__}: {mine}".startswith(why):
                continue
            told = f"could not: {why}" if why else f"exchanged what step {then} did"
            other = f"rank {rank}" if rank >= 0 else "another rank"
            text = f"rank {exchange.rank} called average() after {steps} steps, and {other} {told}: {_ADVICE}"
            raise rank_error(rank, text)
    if work is not None:
        with exchanging("average()"):
            work.wait()
    own = torch.tensor([steps], dtype=torch.int64, device=own_part(updates._parameters()[0]).device)
    everyone = [torch.empty_like(own) for _ in range(exchange.world)]
    with exchanging("comparing in average() how far the ranks are"):
        dist.all_gather(everyone, own, group=updates._group)
    counts = [int(x) for x in everyone]
    if differing := [rank for rank, count in enumerate(counts) if count != counts[0]]:
        text = f"the ranks called average() after {', '.join(map(str, counts))} steps: {_ADVICE}"
        raise rank_error(differing[0], text)
