"""What the engine needs from a kind of device."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp.config.settings import Settings
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.group import Group, Residual
from sidcomp.runtime.replica_check import ReplicaCheck

Future = torch.futures.Future


class Executor:
    """Encodes, exchanges and decodes groups, and completes their buckets' futures.

    The engine calls its methods in its own thread, in the same order on all ranks. Those that are only for a
    device whose work is enqueued do nothing here.
    """

    on_device: bool  # `launch` only enqueues: the host's clock does not show when the work ends

    # ---- groups

    def check(self, settings: Settings, groups: Sequence[Group]) -> None:
        """Raises UnsupportedError if this device cannot execute these groups."""

    def in_place(self, settings: Settings, exchange: Exchange) -> bool:
        """Whether a dense group that is contiguous in memory can be reduced where it is."""
        return True

    def prepare(self, group: Group, world: int, twice: bool) -> None:
        """Allocates states and buffers of the group. twice: two states."""
        raise NotImplementedError

    def prepare_full(self, group: Group, plan: _core.Plan) -> None:
        """Allocates what the group needs for full-precision steps."""
        raise NotImplementedError

    def connect(
        self,
        settings: Settings,
        groups: Sequence[Group],
        exchange: Exchange,
        parent: dist.ProcessGroup,
        check: ReplicaCheck,
    ) -> None:
        """Takes the groups of a new layout. All ranks call it at the same point of the program."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Drops the groups of the layout. Call it between steps."""
        raise NotImplementedError

    def keep_two(self, group: Group) -> bool:
        """Makes the group's state two states. False: it already has two, or has none."""
        raise NotImplementedError

    def turn(self, group: Group) -> None:
        """Switches the group between the codec's steps and full-precision steps."""
        raise NotImplementedError

    def residual(self, group: Group) -> Sequence[Residual]:
        """Returns the first vector of the group's memory, on the group's device, in one or several parts. The
        values are valid until the next call, or the next step. On CUDA they are the memory itself, and what
        is enqueued on the current stream comes after what computes them. Call it between steps."""
        raise NotImplementedError

    def put_residual(self, group: Group) -> None:
        """Takes over what the caller has changed in the values that `residual` has just returned."""
        raise NotImplementedError

    def clear(self, group: Group) -> None:
        """Sets the group's memory to 0. Call it between steps."""
        raise NotImplementedError

    # ---- a step

    def future(self) -> "Future[torch.Tensor]":
        """Returns a future for a bucket whose gradients are enqueued on the current stream."""
        return Future()

    def follow(self) -> None:
        """Orders what is launched from here on after the caller's work on the device so far."""

    def launch(self, group: Group, unable: Exception | None = None, withdrawn: bool = False) -> None:
        """Encodes a group and starts its exchange. unable: why this rank cannot encode; then the other ranks
        fail too. withdrawn: the futures of this rank have failed already."""
        raise NotImplementedError

    def launched(self, groups: Sequence[Group], in_place: bool) -> None:
        """Called when all groups of the step have been launched. in_place: the groups have one state."""

    def lead(self) -> None:
        """Orders the caller's later work on the device after all that was launched. The futures do this,
        unless one has failed: DDP waits for none after it."""

    def before_exit(self) -> None:
        """Called at the end of backward() under torch's profiler: waits until all profiling records have
        ended."""

    def outcome(self, groups: Sequence[Group]) -> tuple[bool, bool]:
        """Returns whether a group of the last step was not finite, and whether one failed. May wait."""
        raise NotImplementedError

    def finite(self, group: Group) -> bool:
        """Whether the last step of this group was finite, on all ranks, and did not fail. Call it after
        `outcome`."""
        raise NotImplementedError

    def forget(self, groups: Sequence[Group], several: bool) -> None:
        """Clears the residuals of these groups, which worked in place, because the last step is discarded.
        several: more than one step is discarded."""
        raise NotImplementedError

    def compare(self, bucket: Bucket, step: int) -> None:
        """Gathers the checksums of `step`. If they differ, `bucket` fails; on a device, a later step
        fails."""
        raise NotImplementedError

    def compared(self, before: int) -> Exception | None:
        """Returns an error if the replicas differed at a step before `before`."""
        return None

    def synchronize(self, everything: bool = False) -> bool:
        """Waits for everything launched, or for the whole device. False: there is no device."""
        return False

    def stats(self, group: Group) -> Any:
        """Returns the statistics of the last encode (count, found, threshold, stages), or None."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
