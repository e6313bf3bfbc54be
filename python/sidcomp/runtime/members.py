"""Who the ranks of a process group are. Of those that it has made torch.distributed knows. Others, such as
torchft's, are asked themselves, and may be given other members between two steps."""

import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from sidcomp.config.settings import Settings
from sidcomp.errors import SetupError, UnsupportedError

GIVE = (
    "give sidcomp.backend.process_group(group, place=...) a function that returns (rank, size, store), and "
    "use what it returns in place of the group"
)


class Members(NamedTuple):
    """This process among the members of a group.

    store   these members reach it; other members have another one
    since   an object that is another one as soon as there are other members
    """

    rank: int
    size: int
    store: Store
    since: "weakref.ref[Any]"

    def same(self, other: "Members") -> bool:
        since = self.since()
        alike = since is not None and since is other.since()
        return alike and (self.rank, self.size) == (other.rank, other.size)


def known(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed has made the group."""
    with suppress(KeyError, ValueError):
        dist.get_process_group_ranks(group)
        return True
    return False


def members_of(group: dist.ProcessGroup) -> Members:
    """Asks a group that torch.distributed does not know or, if it is a wrapper, the group inside. Raises
    SetupError."""
    own = getattr(group, "members", None)
    if callable(own):  # of the backend "sidcomp"
        found: Members = own()
        return found
    inner = group
    try:
        while isinstance(next_ := getattr(inner, "parent", None), dist.ProcessGroup):
            inner = next_
        return checked(inner.rank(), inner.size(), inner.get_group_store(), inner)
    except (AssertionError, AttributeError, NotImplementedError, RuntimeError, SetupError) as e:
        raise SetupError(
            f"{type(group).__name__} is a process group that torch.distributed does not know, and it does "
            f"not say what its rank, size and store are ({type(e).__name__}: {e}): configure it first; or "
            f"{GIVE}"
        ) from e


def checked(rank: object, size: object, store: object, since: object) -> Members:
    """Raises SetupError."""
    if not isinstance(rank, int) or not isinstance(size, int) or not 0 <= rank < size:
        raise SetupError(f"rank {rank!r} of {size!r} ranks")
    if not isinstance(store, Store):
        raise SetupError(f"its store is {store!r}")
    return Members(rank, size, store, weakref.ref(since))


def rank_of(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if group is None or known(group) else members_of(group).rank


def size_of(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if group is None or known(group) else members_of(group).size


def refuse(group: dist.ProcessGroup, what: str, instead: str) -> None:
    """Raises SetupError for a group that torch.distributed does not know. what: what is asked of it."""
    if not known(group):
        raise SetupError(
            f"{type(group).__name__} is a process group that torch.distributed does not know, such as "
            f"torchft's, and {what}: {instead}"
        )


def check_ranks(given: object, averaged: dist.ProcessGroup) -> None:
    """Raises SetupError unless State(process_group=given) has the ranks over which the model is averaged."""
    if not isinstance(given, dist.ProcessGroup):
        raise SetupError(
            f"State(process_group={given!r}) is no process group of which this rank is a member: "
            "give one that torch.distributed.new_group returned on a member, or leave it out"
        )
    mine, its = (dist.get_process_group_ranks(g) if known(g) else type(g).__name__ for g in (given, averaged))
    if given is not averaged and (mine != its or isinstance(mine, str)):
        raise SetupError(
            f"State(process_group=...) has the ranks {mine}, but DDP averages over {its}: give "
            "both the same process group"
        )


def over_unknown(own: Settings) -> Settings:
    """Returns the settings over a process group that torch.distributed does not know, whose members may
    change. Raises UnsupportedError for what does not go over it."""
    text = "torch.distributed does not know the process group, whose members may change between steps"
    if own.planned:
        raise UnsupportedError(
            f"{text}, so no plan would hold, and groups={own.groups!r} are planned: name a codec and groups"
        )
    if named := [c.choice.exchange.name for c in own.candidates if c.choice is not None]:
        raise UnsupportedError(
            f"{text}, so ranks send no messages to each other, as exchange={named[0]!r} does: leave "
            "exchange out"
        )
    return replace(own, gathers=True)
