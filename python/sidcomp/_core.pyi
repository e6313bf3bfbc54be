"""The C core (csrc/sidcomp.h) from Python. Pointers and CUDA streams are integers; calls release the GIL."""

from collections.abc import Mapping, Sequence
from typing import TypedDict, overload

version: str
cuda_built: bool
cuda_early: int  # or'ed to a device: sidcomp.h, SID_CUDA_EARLY
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
    """Number of usable devices, and the reason where it is 0."""

class Segments:
    """A list of (pointer, length in elements): the parts of a group. Build once per bucket layout."""

    def __init__(self, pointers: Sequence[int], lengths: Sequence[int]) -> None: ...
    n: int
    def table(self) -> bytes:
        """The C array of sid_segment, to be copied to a device."""

class Stats:
    """sid_stats of the last encode."""

    count: int
    found: int
    nonfinite: int
    threshold: float
    stages: int
    walks: int

stats_bytes: int  # of a sid_stats, as an encode on a device writes it

def read_stats(data: bytes) -> Stats:
    """Stats that an encode on a device has written: stats_bytes bytes, copied to the host."""

state_header_bytes: int  # at the start of every state, before the memory's vectors

class Exchange:
    """One rank's part in an exchange of messages; sidcomp.h says what its rounds do."""

    def __init__(
        self,
        exchange: str,
        codec: str,
        memory: str,
        n: int,
        dtype: str,
        rank: int,
        world: int,
        settings: Mapping[str, float | int | str] = ...,  # of exchange, codec and memory
        isa: str | None = None,
    ) -> None: ...
    n: int
    rank: int
    world: int
    k: int
    state_bytes: int
    work_bytes: int
    wire_bytes: int
    sent_bytes: int  # by a rank in a step, the most that any does
    control_bytes: int  # of them, those of the last round, which tells whether all went well
    # Vectors of n elements that a rank encodes, decodes, and merges as packed signs, in a step.
    encoded: float
    decoded: float
    merged: float
    ring_passes: int  # of a vector, where the process group does the exchange in a ring; else 0
    rounds: int
    vectors: int
    shares: list[tuple[int, int, int, bool]]  # of the state: offset, first element, elements, kept for all
    def messages(self, round: int, receive: bool) -> list[tuple[int, int, int]]:  # peer, offset, bytes
        ...
    def advance(
        self,
        round: int,
        segments: Segments,
        state: int,
        work: int,
        wire: int,
        *,
        step: int,
        seed: int,
        group: int,
        carry: float = ...,  # of what is owed, before the gradient is added
        origin: int = ...,  # of the state that the step starts from, in bytes from state; 0: in place
    ) -> bool: ...  # whether the step was not finite, after the last round
    has_meanwhile: bool
    def meanwhile(  # while the messages of `round` travel; may be left out
        self,
        round: int,
        segments: Segments,
        state: int,
        work: int,
        wire: int,
        *,
        step: int,
        seed: int,
        group: int,
    ) -> None: ...
    def cuda_work_bytes(self) -> int:
        """UnsupportedError where the exchange, codec or memory has no CUDA kernels."""

    def cuda_advance(
        self,
        round: int,
        segments: int,
        n_segments: int,
        state: int,
        work: int,
        wire: int,
        *,
        step: int,
        seed: int,
        group: int,
        carry: float = ...,
        origin: int = ...,
        stats: int,
        report: int,
        device: int,
        stream: int,
    ) -> None: ...
    def cuda_settle(
        self,
        segments: int,
        n_segments: int,
        state: int,
        work: int,
        wire: int,
        *,
        device: int,
        stream: int,
    ) -> None: ...
    def cuda_unsend(self, state: int, *, device: int, stream: int) -> None: ...
    def cuda_checksum(
        self,
        segments: int,
        n_segments: int,
        work: int,
        *,
        report: int,
        sum: int,
        device: int,
        stream: int,
    ) -> None: ...
    def abandon(
        self, segments: Segments, state: int, work: int, wire: int, *, step: int, seed: int, group: int
    ) -> None: ...
    def residual_out(self, state: int, out: int) -> None: ...
    def residual_in(self, state: int, values: int) -> None: ...
    def unsend(self, state: int) -> None: ...
    def forget(self, state: int) -> None: ...  # nothing is owed any more; momenta begin at 0
    def rescale(self, state: int, factor: float) -> None: ...

def loopback(
    exchanges: Sequence[Exchange],
    segments: Sequence[Segments],
    state: Sequence[int],
    work: Sequence[int],
    wire: Sequence[int],
    *,
    step: int,
    seed: int,
    group: int,
    carry: float = ...,
) -> tuple[bool, list[int], list[int]]: ...  # not finite; bytes that each rank sent, and of them for control

nccl_least: int

class Nccl:
    """The NCCL library, found at run time. Without a path the one that is loaded, else the loader's."""

    def __init__(self, path: str | None = None) -> None: ...
    version: int  # 22809 is 2.28.9
    def unique_id(self) -> bytes: ...

class Communicator:
    """A rank's end of an NCCL communicator. What fails, or takes longer than `limit` seconds, ends it: every
    later call raises the same ExchangeError. Calls may come from several threads."""

    def __init__(
        self, nccl: Nccl, id: bytes, rank: int, world: int, *, device: int, limit: float
    ) -> None: ...
    rank: int
    world: int
    device: int
    def all_gather(self, mine: int, all: int, nbytes: int, *, stream: int) -> None: ...
    def all_reduce(self, mine: int, sum: int, count: int, dtype: str, *, stream: int) -> None: ...
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
        """Raises what has gone wrong since, on the device or at another rank."""

    def leave(self) -> None: ...
    def abort(self, why: str) -> None: ...

class DeviceGroup:
    """A group's places in device memory; incoming 0: a linear plan; seen 0: nobody looks."""

    @overload
    def __init__(
        self,
        exchange: Exchange,
        segments: int,
        n_segments: int,
        state: int,
        work: int,
        wire: int,
        stats: int,
        report: int,
        seen: int,
    ) -> None: ...
    @overload
    def __init__(
        self,
        plan: Plan,
        segments: int,
        n_segments: int,
        state: int,
        work: int,
        payload: int,
        incoming: int,
        stats: int,
        report: int,
        seen: int,
    ) -> None: ...
    def step(
        self,
        communicator: Communicator,
        *,
        step: int,
        seed: int,
        group: int,
        carry: float = ...,
        origin: int = ...,
        stream: int,
    ) -> None:
        """Enqueues encode, all-gather or all-reduce, and decode, or an exchange's rounds; `seen` gets the
        report, with step + 1."""
    def kept(self) -> bytes:
        """Its entries in the table of cuda_cancel, of cuda_kept_bytes each."""

cuda_report_bytes: int  # of a report, on the device and as cuda_show copies it to the host

class Report:
    """A view of a report at an address in host memory, which cuda_show or DeviceGroup.step writes. The values
    change while the device works. The caller keeps the memory alive."""

    def __init__(self, address: int) -> None: ...
    nonfinite: bool  # the step was not finite
    culprit: int  # the payload or rank at fault, where there was a fault
    status: int  # 0, or the status of the first fault so far, which is below 0
    mark: int  # what cuda_show was given, or the low 32 bits of DeviceGroup.step's step + 1

cuda_kept_bytes: int

def cuda_cancel(sent: int, count: int, *, always: bool, device: int, stream: int) -> None:
    """Enqueues: where one of `count` groups' steps was not finite, or always, what the others have sent
    counts as not sent."""

def cuda_show(report: int, mark: int, seen: int, *, device: int, stream: int) -> None:
    """Enqueues: nonfinite, culprit, status and `mark`, to pinned host memory."""

class Plan:
    def __init__(
        self,
        codec: str,
        memory: str,
        n: int,
        dtype: str,  # "float32", "float16" or "bfloat16"
        settings: Mapping[str, float | int | str] = ...,
        isa: str = ...,  # "auto", "base", "avx2" or "avx512"
        flush: bool = False,  # a lossless codec takes the memory too, to send what is kept there
        shapes: Sequence[tuple[int, int]] | None = None,  # elements and columns of each tensor in the group
    ) -> None: ...
    codec: str
    memory: str
    n: int
    k: int
    dtype: str
    isa: str
    linear: bool
    lossless: bool
    payload_bytes: int
    body_offset: int
    body_count: int
    body_dtype: str
    state_bytes: int
    work_bytes: int
    extra_bytes: int  # at the end of the state, beside the vectors
    rounds: int
    ranks: int  # of a linear codec: the most whose bodies can be summed; 0: any number
    slices: list[tuple[int, int]]  # of a linear codec: offset in bytes and elements, for each round
    vectors: int
    def encode(
        self,
        segments: Segments,
        state: int,
        work: int,
        payload: int,
        *,
        step: int,
        seed: int,
        group: int,
        rank: int,
        world: int,
        carry: float = ...,  # of what is owed, before the gradient is added
        origin: int = ...,  # of the state that the step starts from, in bytes from state; 0: in place
    ) -> Stats: ...
    def next_round(
        self,
        round: int,
        segments: Segments,
        state: int,
        work: int,
        payload: int,
        *,
        step: int,
        seed: int,
        group: int,
        rank: int,
        world: int,
    ) -> None: ...
    def decode(
        self,
        payloads: int,
        stride: int,
        count: int,
        scale: float,
        segments: Segments,
        state: int,
        *,
        step: int,
        group: int,
    ) -> bool:
        """True if the step was not finite. state 0: none. step < 0 accepts any step and group.

        Raises CorruptPayloadError or MismatchError; their `culprit` is the index of the payload.
        """
    def learn(self, state: int, payload: int) -> None: ...
    def check(self, payload: int, nbytes: int, *, step: int = ..., group: int = ...) -> None: ...
    def residual_out(self, state: int, out: int) -> None: ...
    def residual_in(self, state: int, values: int) -> None: ...
    def unsend(self, state: int) -> None: ...
    def forget(self, state: int) -> None: ...  # nothing is owed any more; momenta begin at 0
    def rescale(self, state: int, factor: float) -> None: ...
    # CUDA: everything on `stream` of `device`; segments is a device copy of Segments.table()
    def cuda_work_bytes(self) -> int: ...
    def cuda_encode(
        self,
        segments: int,
        n_segments: int,
        state: int,
        work: int,
        payload: int,
        *,
        step: int,
        seed: int,
        group: int,
        rank: int,
        world: int,
        carry: float = ...,
        origin: int = ...,
        stats: int,
        device: int,
        stream: int,
    ) -> None: ...
    def cuda_next_round(
        self,
        round: int,
        segments: int,
        n_segments: int,
        state: int,
        work: int,
        payload: int,
        *,
        step: int,
        seed: int,
        group: int,
        rank: int,
        world: int,
        device: int,
        stream: int,
    ) -> None: ...
    def cuda_decode(
        self,
        payloads: int,
        stride: int,
        count: int,
        scale: float,
        segments: int,
        n_segments: int,
        state: int,
        work: int,
        *,
        step: int,
        group: int,
        report: int,
        device: int,
        stream: int,
    ) -> None: ...
    def cuda_settle(
        self,
        segments: int,
        n_segments: int,
        state: int,
        work: int,
        payload: int,
        *,
        device: int,
        stream: int,
    ) -> None: ...
    def cuda_unsend(self, state: int, *, device: int, stream: int) -> None: ...
    def cuda_checksum(
        self,
        segments: int,
        n_segments: int,
        work: int,
        *,
        report: int,
        sum: int,
        device: int,
        stream: int,
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
    takes_seed: bool  # a plan in use may be given: options "seed_ends" and "seed_methods", lists

class FusionDict(TypedDict):
    ends: list[int]
    methods: list[int]
    time_ps: int
    lower_bound_ps: int
    exact: bool
    work: int

class EvaluationDict(TypedDict):
    time_ps: int
    # A row a group: start and end of backward, encode, exchange, decode in ps; -1, -1: no such stage.
    timeline: list[tuple[int, int, int, int, int, int, int, int]]

def algorithms() -> list[AlgorithmInfo]: ...

class Instance:
    """A planning problem (csrc/fusion.h). Times in picoseconds, sizes in bytes of gradient, ready order.

    methods: (encode, exchange, decode), each a list of knots (bytes, ps); encode and decode may be None.
    Raises ArgumentError, which names the tensor, method or knot at fault.
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
            ]
        ],
        max_group_bytes: int = ...,
        cut_before: Sequence[int] = ...,
        overlap_permille: int = ...,
        stolen_permille: int = ...,
        decode_main: bool = ...,
    ) -> None: ...
    def fuse(self, algorithm: str, options: Mapping[str, int | Sequence[int]] = ...) -> FusionDict: ...
    def evaluate(self, ends: Sequence[int], methods: Sequence[int]) -> EvaluationDict: ...

def checksum(segments: Segments, dtype: str) -> int: ...
def scale(segments: Segments, dtype: str, factor: float) -> None:
    """segments *= factor, in place, computed in float32 and rounded once."""
