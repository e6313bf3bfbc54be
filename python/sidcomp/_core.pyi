"""The C core (csrc/sidcomp.h) from Python. Pointers and CUDA streams are integers; calls release the GIL."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypedDict, overload

from typing_extensions import Unpack

Buffer: TypeAlias = bytes | bytearray | memoryview

version: str
cuda_built: bool
cuda_early: int  # SID_CUDA_EARLY of sidcomp_cuda.h, to be or'ed to a device number
cuda_beside: int  # SID_CUDA_BESIDE, likewise, of cuda_advance
cuda_archs: str

class SidcompError(Exception):
    """Base of every error of the core; `status` is the C status."""

    status: int

class ArgumentError(SidcompError, ValueError): ...
class ParameterError(SidcompError, ValueError): ...
class SpaceError(SidcompError, ValueError): ...
class CorruptPayloadError(SidcompError): ...
class MismatchError(SidcompError): ...
class UnsupportedError(SidcompError, NotImplementedError): ...
class DeviceError(SidcompError, RuntimeError): ...

class ExchangeError(SidcompError, RuntimeError):
    """A collective failed: a peer has died or hangs, or the process group's timeout has passed."""

class ParameterInfo(TypedDict):
    name: str
    kind: str  # "real", "int" or "choice"
    default: float | int | str
    min: float
    max: float
    unit: str
    choices: list[str]
    doc: str

class Info(TypedDict):
    name: str
    family: str
    paper: str
    doc: str
    wire_id: int
    memory: str
    traits: list[str]  # "linear", "lossless", "stochastic", "unbiased"
    cuda: bool
    parameters: list[ParameterInfo]

def codecs() -> list[Info]: ...
def exchanges() -> list[Info]: ...
def memories() -> list[Info]: ...
def isa_best() -> str: ...
def cuda_devices() -> tuple[int, str]:
    """The number of usable devices, and the reason if it is 0."""

class Segments:
    """The parts of a group, as pointers and lengths in elements. Build it once per bucket layout."""

    def __init__(self, pointers: Sequence[int], lengths: Sequence[int]) -> None: ...
    n: int
    def table(self) -> bytes:
        """Returns the C array of sid_segment, to be copied to a device."""

class Buffers:
    """What a call works on: a group's segments, and the addresses of its state, work memory and payload on
    the host. For an exchange, `payload` is the address of its wire block. An address may be 0 if no call
    needs it; a call that needs it raises ArgumentError. Buffers keep their segments alive, but not the
    memory: the caller does that."""

    def __init__(self, segments: Segments, state: int = 0, work: int = 0, payload: int = 0) -> None: ...
    segments: Segments
    state: int
    work: int
    payload: int

class DeviceBuffers:
    """The same on a device. table: the address of a copy of `Segments.table()`; n_segments: the number of its
    entries."""

    def __init__(
        self, table: int, n_segments: int, state: int = 0, work: int = 0, payload: int = 0
    ) -> None: ...
    table: int
    n_segments: int
    state: int
    work: int
    payload: int

class Stats:
    """The statistics of the last encode: sid_stats in sidcomp.h explains each."""

    count: int
    found: int
    nonfinite: int
    threshold: float
    stages: int
    passes: int

stats_bytes: int  # size of a sid_stats, which an encode on a device writes

def read_stats(data: bytes) -> Stats:
    """Reads the statistics that an encode on a device has written: stats_bytes bytes, copied to the host."""

state_header_bytes: int  # size of the header of every state, before the memory's vectors
state_lasting: tuple[tuple[int, int], ...]  # first and end of the parts of a header that outlast residual_in
extra_unit_bytes: int  # the size of the codec's own part of a state is a multiple of this
max_vectors: int  # the maximum that a memory keeps

# Keywords that several calls take.

class _Call(TypedDict):
    step: int
    seed: int
    group: int

class _Reads(TypedDict, total=False):
    carry: float  # multiplies the residual before the gradient is added
    origin: int  # the state that the step reads, in bytes from the buffers' state; 0: in place

class _Ranked(_Call):
    rank: int
    world: int

class _Stream(TypedDict):
    device: int
    stream: int

class _Advance(_Call, _Reads): ...
class _Encode(_Ranked, _Reads): ...
class _RankedOnDevice(_Ranked, _Stream): ...

class _EncodeOnDevice(_Encode, _Stream):
    stats: int

class _AdvanceOnDevice(_Advance, _Stream):
    stats: int
    report: int

class _Memory:
    """What Plan and Exchange say of a group's state, and do with it. CUDA: all calls enqueue on `stream` of
    `device`."""

    n: int
    k: int
    state_bytes: int
    work_bytes: int
    vectors: int
    def residual_out(self, state: int, out: int) -> None: ...
    def residual_in(self, state: int, values: int) -> None: ...
    def unsend(self, state: int) -> None: ...
    def forget(self, state: int) -> None: ...  # clears the residual; momenta start from 0
    def rescale(self, state: int, factor: float) -> None: ...
    def cuda_work_bytes(self) -> int:
        """Raises UnsupportedError if the exchange, codec or memory has no CUDA kernels."""

    def cuda_settle(self, buffers: DeviceBuffers, **where: Unpack[_Stream]) -> None: ...
    def cuda_unsend(self, state: int, **where: Unpack[_Stream]) -> None: ...
    def cuda_checksum(
        self, buffers: DeviceBuffers, *, report: int, sum: int, **where: Unpack[_Stream]
    ) -> None: ...

class Exchange(_Memory):
    """One rank's part in an exchange that sends messages; sidcomp.h says what its rounds do."""

    def __init__(
        self,
        exchange: str,
        codec: str,
        memory: str,
        n: int,
        dtype: str,
        rank: int,
        world: int,
        settings: Mapping[str, float | int | str] = ...,  # parameters of exchange, codec and memory
        isa: str | None = None,
    ) -> None: ...
    rank: int
    world: int
    wire_bytes: int
    sent_bytes: int  # what a rank sends in a step: the maximum over the ranks
    control_bytes: int  # the part of them that the last round sends, which reports success or failure
    # Vectors of n elements that a rank encodes, decodes, and merges as packed signs, in a step.
    encoded: float
    decoded: float
    merged: float
    in_node: float  # vectors that it sends, adds and gets back uncompressed inside its node
    ring_passes: int  # passes of a vector, if the process group does the exchange in a ring; else 0
    rounds: int
    # Parts of the state: offset, first element, elements, whether it is kept for all ranks.
    shares: list[tuple[int, int, int, bool]]
    def messages(self, round: int, receive: bool) -> list[tuple[int, int, int]]:  # peer, offset, bytes
        ...
    def advance(
        self, round: int, buffers: Buffers, **at: Unpack[_Advance]
    ) -> bool: ...  # after the last round: whether the step was not finite
    has_meanwhile: bool
    def meanwhile(  # optional work while the messages of `round` travel
        self, round: int, buffers: Buffers, **at: Unpack[_Call]
    ) -> None: ...
    def cuda_advance(self, round: int, buffers: DeviceBuffers, **at: Unpack[_AdvanceOnDevice]) -> None: ...
    def cuda_meanwhile(  # where every cuda_advance of the step was given cuda_beside
        self, round: int, buffers: DeviceBuffers, **at: Unpack[_AdvanceOnDevice]
    ) -> None: ...
    def abandon(self, buffers: Buffers, **at: Unpack[_Call]) -> None: ...

def loopback(
    exchanges: Sequence[Exchange],
    buffers: Sequence[Buffers],
    *,
    carry: float = ...,
    **at: Unpack[_Call],
) -> tuple[bool, list[int], list[int]]: ...  # not finite?; bytes sent by each rank; of these, for control

class Nccl:
    """The NCCL library. Without a path it is the one already loaded, else the one that the loader finds."""

    def __init__(self, path: str | None = None) -> None: ...
    version: int  # 22809 is 2.28.9
    def unique_id(self) -> bytes: ...

class Communicator:
    """One rank's end of an NCCL communicator. A call that fails, or that takes longer than `limit` seconds,
    ends it: every later call raises the same ExchangeError. Calls may come from several threads."""

    def __init__(
        self,
        nccl: Nccl,
        id: bytes,
        rank: int,
        world: int,
        *,
        device: int,
        limit: float,
    ) -> None: ...
    rank: int
    world: int
    device: int
    def all_gather(self, mine: int, all: int, nbytes: int, *, stream: int) -> None: ...
    def all_reduce(self, mine: int, sum: int, count: int, dtype: str, *, stream: int) -> None: ...
    def average(self, mine: int, mean: int, count: int, dtype: str, *, stream: int) -> None: ...
    def reduce_scatter(self, all: int, mine: int, count: int, dtype: str, *, stream: int) -> None: ...
    def messages(
        self,
        wire: int,
        sends: Sequence[tuple[int, int, int]],  # peer, offset, bytes
        receives: Sequence[tuple[int, int, int]],
        *,
        stream: int,
    ) -> None: ...
    def poll(self) -> None:
        """Raises ExchangeError if something has failed since, on the device or at another rank."""

    def leave(self) -> None: ...
    def abort(self, why: str) -> None: ...

class DeviceGroup:
    """A group's buffers on the device, and further addresses there. incoming is 0 if the plan is linear,
    shown if no report is wanted. in_place: the payload is the gradient itself, which a step averages where it
    is; for the codec none without a memory, and one segment."""

    @overload
    def __init__(
        self,
        exchange: Exchange,
        buffers: DeviceBuffers,
        stats: int,
        report: int,
        shown: int,
    ) -> None: ...
    @overload
    def __init__(
        self,
        plan: Plan,
        buffers: DeviceBuffers,
        incoming: int,
        stats: int,
        report: int,
        shown: int,
        in_place: bool = False,
    ) -> None: ...
    def step(self, communicator: Communicator, *, stream: int, **at: Unpack[_Advance]) -> None:
        """Enqueues encode, all-gather or all-reduce, and decode, or the rounds of an exchange. The report,
        with step + 1, is copied to `shown`."""
    def kept(self) -> bytes:
        """The group's entries for the table of cuda_cancel, cuda_kept_bytes each."""

cuda_report_bytes: int  # size of a report on the device
cuda_shown_bytes: int  # size of the host memory that cuda_show writes to

class Reports:
    """A view of the last reports at an address in host memory, which cuda_show or DeviceGroup.step writes.
    They change while the device works. The caller keeps the memory alive."""

    def __init__(self, address: int) -> None: ...
    def upto(self, mark: int) -> tuple[bool, int, int, int]:
        """Returns the report with the highest mark up to `mark`, or zeros: whether the step was not finite;
        the payload or rank at fault, if there was a fault; 0, or the status of the first fault so far, which
        is below 0; and the mark, which cuda_show was given, or the low 32 bits of DeviceGroup.step's
        step + 1."""

cuda_kept_bytes: int

def cuda_cancel(sent: int, count: int, *, always: bool, device: int, stream: int) -> None:
    """Enqueues a check of the reports of `count` entries. If a step was not finite or failed, or if `always`,
    the groups clear their residuals, except those that have already taken their own gradient out."""

def cuda_show(report: int, mark: int, shown: int, *, device: int, stream: int) -> None:
    """Enqueues a copy of nonfinite, culprit, status and `mark` to an entry in pinned host memory."""

def cuda_upload(to: int, data: bytes, *, device: int, stream: int) -> None:
    """Enqueues a copy of `data`, a multiple of 8 bytes, to device memory. Does not wait for the device."""

class Plan(_Memory):
    def __init__(
        self,
        codec: str,
        memory: str,
        n: int,
        dtype: str,  # "float32", "float16" or "bfloat16"
        settings: Mapping[str, float | int | str] = ...,
        isa: str | None = None,  # "auto", "base", "avx2", "avx512" or "avx512vbmi2"
        flush: bool = False,  # the lossless codec has the memory too, to send the residual
        shapes: Sequence[tuple[int, int]] | None = None,  # elements and columns of each tensor in the group
    ) -> None: ...
    codec: str
    memory: str
    dtype: str
    isa: str
    linear: bool
    lossless: bool
    payload_bytes: int
    body_offset: int
    body_count: int
    body_dtype: str
    extra_bytes: int  # the codec's own part of the state, after the vectors
    conserves: bool  # False: the codec drops a part of the gradient that it neither sends nor keeps
    reductions: int  # linear codecs: how many sums over the ranks a step takes; else 1
    ranks: int  # linear codecs: the maximum number of ranks whose bodies can be summed; 0: no limit
    slices: list[tuple[int, int]]  # linear codecs: offset in bytes and elements, for each reduction
    def encode(self, buffers: Buffers, **at: Unpack[_Encode]) -> Stats: ...
    def next_reduction(self, reduction: int, buffers: Buffers, **at: Unpack[_Ranked]) -> None: ...
    def decode(
        self,
        payloads: int,
        stride: int,
        count: int,
        scale: float,
        buffers: Buffers,
        *,
        step: int,
        group: int,
    ) -> bool:
        """Decodes into the buffers' segments; work and payload are not used. Returns whether the step was not
        finite. state 0: no state. step < 0: any step and group are accepted.

        Raises CorruptPayloadError or MismatchError; their `culprit` is the index of the payload at fault.
        """
    def decode_list(
        self, payloads: Sequence[int], scale: float, buffers: Buffers, *, step: int, group: int
    ) -> bool:
        """As decode, of payloads that lie anywhere, each at a multiple of 8 bytes."""
    def learn(self, state: int, payload: int) -> None: ...
    def check(self, payload: int, nbytes: int, *, step: int = ..., group: int = ...) -> None: ...
    def cuda_encode(self, buffers: DeviceBuffers, **at: Unpack[_EncodeOnDevice]) -> None: ...
    def cuda_next_reduction(
        self, reduction: int, buffers: DeviceBuffers, **at: Unpack[_RankedOnDevice]
    ) -> None: ...
    def cuda_decode(
        self,
        payloads: int,
        stride: int,
        count: int,
        scale: float,
        buffers: DeviceBuffers,
        *,
        step: int,
        group: int,
        report: int,
        **where: Unpack[_Stream],
    ) -> None: ...

class OptionInfo(TypedDict):
    name: str
    default: int
    min: int
    max: int
    doc: str

class AlgorithmInfo(TypedDict):
    name: str
    paper: str
    doc: str
    options: list[OptionInfo]

class FusionDict(TypedDict):
    ends: list[int]
    methods: list[int]
    time_ps: int
    lower_bound_ps: int
    exact: bool
    work: int

class EvaluationDict(TypedDict):
    time_ps: int
    # One row per group: start and end of backward, encode, exchange and decode in ps; -1, -1: no such stage.
    timeline: list[tuple[int, int, int, int, int, int, int, int]]

def algorithms() -> list[AlgorithmInfo]: ...

class Instance:
    """A planning problem (csrc/fusion.h). Times are in ps, sizes in bytes of gradient, tensors in ready
    order.

    methods: candidates as (encode, exchange, decode, delay), each a list of knots (bytes, ps); all but
    exchange may be None. Raises ArgumentError, which names the tensor, candidate or knot at fault.
    """

    def __init__(
        self,
        forward_ps: int,
        backward_ps: Sequence[int],
        bytes: Sequence[int],
        methods: Sequence[
            tuple[
                Sequence[tuple[int, int]] | None,
                Sequence[tuple[int, int]],
                Sequence[tuple[int, int]] | None,
                Sequence[tuple[int, int]] | None,
            ]
        ],
        max_group_bytes: int = ...,
        cut_before: Sequence[int] = ...,
        slowdown_permille: int = ...,
        decode_main: bool = ...,
    ) -> None: ...
    def fuse(self, algorithm: str, options: Mapping[str, int | Sequence[int]] = ...) -> FusionDict: ...
    def evaluate(self, ends: Sequence[int], methods: Sequence[int]) -> EvaluationDict: ...

def checksum(segments: Segments, dtype: str) -> int: ...
def scale(segments: Segments, dtype: str, factor: float) -> None:
    """Multiplies the segments by `factor`, in place, computed in float32 and rounded once."""

# Deltas (csrc/sidcomp_delta.h), a block of elements `first` to `first + n` of the segments a call.

delta_block: int  # elements of a block, at most
delta_slack: int  # bytes behind a body that must be readable
delta_floats: int  # to be or'ed to the bytes of an element where it is a float

def delta_bound(kind: int, n: int) -> int: ...
def delta_work(n: int) -> int: ...
def delta_bytes(kind: int, n: int) -> int:
    """The bytes of a body that holds n elements themselves."""

def delta_aligned(data: Buffer) -> bool:
    """Whether they begin at a multiple of 8 bytes of memory."""

def delta_encode(
    old: Segments | None,
    new: Segments,
    kind: int,
    first: int,
    n: int,
    work: bytearray | memoryview,
    out: bytearray | memoryview,
    offset: int = ...,
) -> tuple[int, int]:
    """The checksum of the new elements and the bytes of the body, which is written to `out`."""

def delta_check(
    segments: Segments,
    kind: int,
    first: int,
    n: int,
    message: Buffer,
    offset: int,
    bytes: int,
    checksum: int,
) -> None:
    """Raises CorruptPayloadError or MismatchError unless the body leads to elements of that checksum."""

def delta_apply(
    segments: Segments,
    kind: int,
    first: int,
    n: int,
    message: Buffer,
    offset: int,
    bytes: int,
    checksum: int,
) -> None: ...
def delta_checksum(data: Buffer, offset: int, bytes: int) -> int: ...

delta_elements: int  # byte of a body that holds the elements themselves, from which on it does

def delta_room(n: int) -> int:
    """Changes that a sparse body has at most."""

def delta_runs(kind: int, n: int) -> int:
    """Runs in which a device finds the changes of a block."""

def delta_encode_found(
    kind: int,
    n: int,
    changes: Buffer,
    count: int,
    runs: Buffer,
    work: bytearray | memoryview,
    out: bytearray | memoryview,
) -> int | None:
    """The bytes of a block's body with these changes; None if that takes the elements, and delta_encode."""

def delta_changes(
    kind: int,
    n: int,
    message: Buffer,
    offset: int,
    bytes: int,
    checksum: int,
    out: bytearray | memoryview,
) -> int | None:
    """Writes the changes of a body, 8 bytes each, to `out`. How many there are; None if it holds the
    elements, which have the checksum. Raises CorruptPayloadError, and for elements MismatchError, as
    delta_check."""

class DeltaWeights:
    """Elements `first` to `first + n` of a vector on a device, as blocks of `block` elements. table: the
    address of a table of its segments there (csrc/sidcomp_delta.h). All calls are enqueued."""

    def __init__(self, kind: int, table: int, n_segments: int, first: int, n: int, block: int) -> None: ...
    def find(
        self, old: int, room: int, found: int, runs: int, changes: int, *, device: int, stream: int
    ) -> None:
        """Finds what has changed since `old`, another table; changes: room for `room` of each block."""

    def sum(self, changes: int, upto: int, found: int, *, device: int, stream: int) -> None:
        """The checksums after the changes, of which block i has upto[i] to upto[i + 1]."""

    def change(self, changes: int, upto: int, *, device: int, stream: int) -> None:
        """Changes the elements."""
