"""What the engine asks of a device."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp.config.settings import Settings
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.group import Group
from sidcomp.runtime.process_group import Exchange
from sidcomp.runtime.replica_check import ReplicaCheck

Future = torch.futures.Future


class Executor(Protocol):
    """Encodes, exchanges and decodes groups, and completes their buckets' futures.

    Its functions are called in the engine's thread, in the same order on all ranks.
    """

    on_device: bool  # what `launch` begins ends later, and the host's clock sees only when it was enqueued

    # ---- groups

    def check(self, settings: Settings, groups: Sequence[Group]) -> None:
        """Raises UnsupportedError if these groups cannot be executed here."""

    def prepare(self, group: Group, world: int, twice: bool) -> None:
        """Allocates what the group needs. twice: two states."""

    def prepare_full(self, group: Group, plan: _core.Plan) -> None:
        """And what it needs for steps of full precision."""

    def connect(
        self,
        settings: Settings,
        groups: Sequence[Group],
        exchange: Exchange,
        parent: dist.ProcessGroup,
        check: ReplicaCheck,
    ) -> None:
        """The groups of a new layout; all ranks, at the same point of the program."""

    def keep_two(self, group: Group) -> bool:
        """The group's states become two. False: it has two, or none."""

    def turn(self, group: Group) -> None:
        """From the codec's steps to one of full precision, or back."""

    # ---- a step

    def future(self) -> "Future[torch.Tensor]":
        """For a bucket whose gradients the current stream has been given."""

    def launch(self, group: Group, unable: Exception | None = None, withdrawn: bool = False) -> None:
        """Encodes a group and sends it on its way. unable: why it cannot; then the others fail with this
        rank. withdrawn: this rank has failed already."""

    def launched(self, groups: Sequence[Group], in_place: bool) -> None:
        """All groups of the step have been launched. in_place: they have one state."""

    def before_exit(self) -> None:
        """Under torch's profiler, at the end of backward(): ends what the profiler may have records of."""

    def outcome(self, groups: Sequence[Group]) -> tuple[bool, bool]:
        """Whether a group of the last step was not finite, and whether one failed. May wait."""

    def forget(self, groups: Sequence[Group], several: bool) -> None:
        """The last step is thrown away, and these groups have worked in place. several: more than one step
        is."""

    def compare(self, bucket: Bucket, step: int) -> None:
        """Gathers the checksums of `step`. `bucket` completes only if they are equal, or, on a device, a
        later step fails."""

    def compared(self, before: int) -> Exception | None:
        """An error if replicas have differed at a step before this one."""

    def synchronize(self, everything: bool = False) -> bool:
        """Waits for what was launched, or for the whole device. False: there is no device."""

    def stats(self, group: Group) -> Any:
        """Of the last encode: count, found, threshold, stages; or None."""

    def close(self) -> None: ...
