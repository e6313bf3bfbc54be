"""What ranks tell each other outside of steps: plain data, as JSON. torch's collectives of objects unpickle,
and whoever unpickles what another rank has sent runs its code."""

import json
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import files
from sidcomp.errors import ArgumentError, CheckpointError, MismatchError
from sidcomp.runtime.communicator import exchanging, gather_bytes, has_gloo, tell_all, tell_texts
from sidcomp.runtime.plain_data import DAMAGED, Check


def tell(group: dist.ProcessGroup, mine: Any, check: Check, what: str) -> list[Any]:
    """Returns what each rank of `group` passes as `mine`, in the order of ranks. Every rank calls it at the
    same point. check: of what one rank has sent. what: the point in the program, for messages.

    Raises ExchangeError, which names the ranks that have ended if the group has Gloo; and on every rank
    MismatchError, if a rank has sent something else.
    """

    def say(data: bytes, what: str) -> list[bytes]:
        if has_gloo(group):
            return tell_all(group, data, what)
        with exchanging(what):
            return gather_bytes(group, _device_of(group), data)

    read: dict[str, Any] = {}  # most often all ranks say the same
    told = tell_texts(say, json.dumps(mine), what, files.MOST)
    for rank, text in enumerate(told):
        if text in read:
            continue
        try:
            read[text] = files.parse_json(text, "it")
            check(read[text], "it")
        except (ArgumentError, CheckpointError) as e:
            error = MismatchError(
                f"rank {rank} has sent what is not of {what}: {str(e).removesuffix(DAMAGED)}; run the same "
                "program, with the same version of sidcomp, on all ranks"
            )
            error.__dict__["rank"] = rank
            raise error from e
    return [read[text] for text in told]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """One that the group's backend sends from."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
