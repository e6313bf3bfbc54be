"""A process group that compresses the gradients that a program all-reduces.

    import sidcomp.backend
    torch.distributed.init_process_group("cpu:sidcomp,cuda:sidcomp")

The rest of the program stays as it is. `SIDCOMP="topk:density=0.05"` in the environment, or `configure(...)`
before init_process_group, chooses the codec.

Everything goes to the inner group (Gloo on CPUs, NCCL on GPUs) untouched, except all-reduces of gradients: a
sum or an average of one large floating-point tensor, issued in a backward pass, on the default group or on a
group of data-parallel replicas. The backend recognizes them by the order in which they come. It watches whole
backward passes. When it has seen the same calls in two of them, it compresses these calls from the next one
on, each with a residual of its own. A pass that differs is sent uncompressed from the first call that
differs, and a line says so.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from sidcomp.doors.backend.all_reduce import ProcessGroup
from sidcomp.doors.backend.configuration import BACKEND, Configuration, configuration_of, configure, current
from sidcomp.doors.backend.idle_check import idle_check
from sidcomp.doors.backend.reconfigurable import ChangingGroup
from sidcomp.errors import ArgumentError, SetupError
from sidcomp.runtime.members import known

__all__ = ["BACKEND", "ProcessGroup", "configure", "process_group"]


def _make(options: Any, _backend_options: Any) -> ProcessGroup:
    """Makes a process group of this backend. torch calls it."""
    if not dist.is_initialized():  # the default group: another run begins
        idle_check.begin()
    rank, size = options.group_rank, options.group_size
    if _given is not None:
        given, configuration = _given
        return ProcessGroup(given, str(dist.get_backend_config(given)), configuration, rank, size)
    configuration = current()
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    inner = _empty(options, "NCCL" if cuda else "GLOO")
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", options.store), rank, size, options.timeout)
    gloo._set_sequence_number_for_group()
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    config = "cpu:gloo"
    if cuda:
        settings = dist.ProcessGroupNCCL.Options()
        settings._timeout = options.timeout
        settings.global_ranks_in_group = options.global_ranks_in_group
        settings.group_name = options.group_id
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", options.store), rank, size, settings)
        nccl._set_sequence_number_for_group()
        inner._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        config += ",cuda:nccl"
    return ProcessGroup(inner, config, configuration, rank, size)


def _empty(options: Any, default: str) -> dist.ProcessGroup:
    """Makes torch's process group, without its backends. default: the name of one of their types."""
    of: Any = dist.ProcessGroup
    if not hasattr(of, "_set_default_backend"):  # torch 2.4
        how = of.Options(backend=default.lower())
        how._timeout = options.timeout
        old: dist.ProcessGroup = of(options.store, options.group_rank, options.group_size, how)
        return old
    made: dist.ProcessGroup = of(options.store, options.group_rank, options.group_size)
    made._set_default_backend(getattr(of.BackendType, default))
    return made


_given: tuple[dist.ProcessGroup, Configuration] | None = None  # for `_make`, in process_group()


def process_group(
    inner: dist.ProcessGroup,
    codec: str | None = None,
    *,
    min_bytes: int = 64 * 2**10,
    outside: bool = False,
    place: Callable[[], tuple[int, int, Store]] | None = None,
    **arguments: Any,
) -> ProcessGroup:
    """Returns a process group over the ranks of `inner` that compresses gradients as the backend "sidcomp"
    does, and passes everything else to `inner`. Every rank of `inner` calls it at the same point.

        compressing = sidcomp.backend.process_group(group, "topk", density=0.05)
        ddp = DistributedDataParallel(module, process_group=compressing)

    inner: any process group, of any backend, of which this rank is a member. The other arguments are those of
    `configure`, which it does not read, and neither does it read SIDCOMP.

    inner may also be a group that torch.distributed does not know, such as torchft's, and have other members
    after a step: `Manager(pg=sidcomp.backend.process_group(ProcessGroupGloo(), "int4"), ...)`. So far that is
    for all-reduces on the CPU. After each change the members learn anew which calls to compress, and keep
    their residuals meanwhile.

    place: for such a group, if it does not say so itself: a function that returns (rank, size, store). store:
    one of torch.distributed, which the members, and no others, share. Other members have another one.

    Raises ArgumentError, ParameterError, SetupError or UnsupportedError.
    """
    global _given
    if not isinstance(inner, dist.ProcessGroup):
        raise ArgumentError(f"inner={inner!r}: give a process group of which this rank is a member")
    configuration = configuration_of(codec, (), min_bytes, arguments, outside)
    if not known(inner):
        if hasattr(inner, "_manager"):
            raise SetupError(
                f"{type(inner).__name__} hands its calls to a Manager, which would not learn of errors: give "
                "the Manager the group that compresses, Manager(pg=sidcomp.backend.process_group(...), ...)"
            )
        return ChangingGroup(inner, configuration, place)
    if place is not None:
        raise ArgumentError("place: torch.distributed knows this process group and its ranks; leave it out")
    _given = inner, configuration
    try:
        made = dist.new_group(
            dist.get_process_group_ranks(inner),
            backend=BACKEND,
            use_local_synchronization=True,
            group_desc=inner.group_desc,
        )
    finally:
        _given = None
    assert isinstance(made, ProcessGroup)
    made._compresses = configuration.codec != "off"
    return made


if BACKEND.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", "cuda"])
