"""Deltas of weights (sidcomp.delta) beside what projects write themselves, and the entropy bound.

    python -m benchmarks.bench_delta            # 2.5e8 weights: 3 GB of memory, half an hour
    python -m benchmarks.bench_delta --n 1e9    # 10 GB

Weights are bfloat16, cast from float32 masters. Synthetic ones are normal (deviation 0.02) and move by a rate
times a normal number. Real ones are the transformer of examples/tasks.py: trained for a while, then on at a
small rate, with a delta after 1, 10 and 100 steps. Each method turns old weights and new ones into bytes, and
applies these to the old ones in place, on one thread; the methods take turns. Times are by the clock on the
wall, and the load says what else ran: 1 is this process.

    raw             u32 index and new value of each element that changes
    gaps, zstd-1    u16 gaps and new values, each through zstd at level 1
    XOR, zstd-1     old bits XOR new bits, through zstd at level 1; or 3
    bound           entropy of positions and of steps in units of the last place, as if all were independent

Needs zstandard: pip install '.[bench]'
"""

import math
import os
import resource
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from sidcomp import delta

from benchmarks.common import RESULTS, Timing, command, race, report
from benchmarks.examples import TASKS

Array = Any
OURS, BOUND = "sidcomp.delta", "bound"
RATES = (1.86e-8, 2.4e-7, 8.83e-7, 3.99e-6)  # a share of 0.1, 1, 3 and 10 % changes
SOME = 1 << 22  # elements that are made at a time


class Method(NamedTuple):
    """encode: of old and new elements, as uint16. apply: to the old ones, in place."""

    encode: Callable[[Array, Array], Any]
    apply: Callable[[Array, Any], object]
    size: Callable[[Any], int]


def as_tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def raw_encode(old: Array, new: Array) -> tuple[Array, Array]:
    at = np.flatnonzero(old != new).astype(np.uint32)
    return at, new[at]


def raw_apply(old: Array, sent: tuple[Array, Array]) -> None:
    at, values = sent
    old[at] = values


def methods() -> dict[str, Method]:
    import zstandard

    def packed(level: int) -> Callable[[Array], bytes]:
        return lambda x: zstandard.ZstdCompressor(level).compress(x.data)

    def unpacked(data: bytes, dtype: Any) -> Array:
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), dtype)

    def gaps_encode(old: Array, new: Array) -> tuple[Any, bytes, bytes]:
        at = np.flatnonzero(old != new)
        gaps = np.diff(at, prepend=0)
        dtype = np.uint16 if gaps.max(initial=0) < 1 << 16 else np.uint32
        return dtype, packed(1)(gaps.astype(dtype)), packed(1)(new[at])

    def gaps_apply(old: Array, sent: tuple[Any, bytes, bytes]) -> None:
        dtype, gaps, values = sent
        old[np.cumsum(unpacked(gaps, dtype), dtype=np.int64)] = unpacked(values, np.uint16)

    def by_xor(level: int) -> Method:
        return Method(
            lambda old, new: packed(level)(old ^ new),
            lambda old, sent: np.bitwise_xor(old, unpacked(sent, np.uint16), out=old),
            len,
        )

    return {
        "raw": Method(raw_encode, raw_apply, lambda sent: sent[0].nbytes + sent[1].nbytes),
        "gaps, zstd-1": Method(gaps_encode, gaps_apply, lambda sent: len(sent[1]) + len(sent[2])),
        "XOR, zstd-1": by_xor(1),
        "XOR, zstd-3": by_xor(3),
        OURS: Method(
            lambda old, new: delta.encode(as_tensor(old), as_tensor(new), threads=1),
            lambda old, sent: delta.apply(as_tensor(old), sent, threads=1),
            len,
        ),
    }


# ---- weights -------------------------------------------------------------------------------------------


def bits(x: torch.Tensor) -> Array:
    return x.bfloat16().view(torch.int16).numpy().view(np.uint16)


def synthetic(n: int, rate: float) -> tuple[Array, Array]:
    old, new = np.empty(n, np.uint16), np.empty(n, np.uint16)
    random = torch.Generator().manual_seed(1)
    for at in range(0, n, SOME):
        here = min(SOME, n - at)
        x = 0.02 * torch.randn(here, generator=random, dtype=torch.float32, device="cpu")
        step = rate * torch.randn(here, generator=random, dtype=torch.float32, device="cpu")
        old[at : at + here], new[at : at + here] = bits(x), bits(x + step)
    return old, new


def flat(model: torch.nn.Module) -> Array:
    return np.concatenate([bits(p.detach()).reshape(-1) for p in model.parameters()])


def trained(before: int, rate: float) -> Iterator[tuple[int, Array, Array]]:
    """Steps between two versions, and both."""
    torch.manual_seed(0)
    task = TASKS["gpt"](0, 1, 8, torch.device("cpu"))
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    carry, versions = None, {}
    for step in range(before + 101):
        if step == before:
            for group in optimizer.param_groups:
                group["lr"] = rate
        if step - before in (0, 1, 10, 100):
            versions[step - before] = flat(model)
        loss, carry = task.loss(model, step, carry)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for steps in (1, 10, 100):
        yield steps, versions[0], versions[steps]


# ---- measuring -----------------------------------------------------------------------------------------


def ordered(x: Array) -> Array:
    x = x.astype(np.int32)
    return np.where(x >> 15, -1 - (x & 0x7FFF), x)


def bound(old: Array, new: Array) -> tuple[int, float]:
    """How many elements change, and the bytes that they take at least."""
    at = np.flatnonzero(old != new)
    share = len(at) / len(old)
    _, counts = np.unique(ordered(new[at]) - ordered(old[at]), return_counts=True)
    each = -float(np.sum(counts / len(at) * np.log2(counts / len(at))))
    places = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) if share < 1 else 0.0
    return len(at), (len(old) * places + len(at) * each) / 8


def extra_memory(call: Callable[[], object]) -> float:
    """Megabytes that a call needs beside what there is, in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.write(write, str((after - before) * 1024 / 1e6).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = float(pipe.read() or "nan")
    os.waitpid(child, 0)
    return found


def peak() -> float:
    """Gigabytes that this process, or it and a child of `extra_memory`, have taken at most."""
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return max(resource.getrusage(one).ru_maxrss for one in who) * 1024 / 1e9


def speed(gigabytes: float, took: Timing) -> str:
    """GB/s: the median and quartiles."""
    median, low, high = (gigabytes / ms * 1e3 for ms in (took.median, took.high, took.low))
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def rows_of(source: str, old: Array, new: Array, repeats: int) -> list[dict[str, Any]]:
    count, least = bound(old, new)
    there, sent, out = old.copy(), {}, []
    for name, method in methods().items():
        sent[name] = method.encode(old, new)
        np.copyto(there, old)
        method.apply(there, sent[name])
        if not np.array_equal(there, new):
            raise SystemExit(f"{name} leads to other weights")

    def again() -> None:
        np.copyto(there, old)

    to_encode = {k: partial(m.encode, old, new) for k, m in methods().items()}
    encoded = race(to_encode, repeats, 1)
    applied = race({k: partial(m.apply, there, sent[k]) for k, m in methods().items()}, repeats, 1, again)
    load = f"{os.getloadavg()[0]:.1f}"
    for name, method in methods().items():
        size = method.size(sent[name])
        out.append(
            {
                "source": source,
                "changed": f"{100 * count / len(old):.3g} %",
                "method": name,
                "bytes": size,
                "dense / sent": f"{old.nbytes / size:.1f}",
                "over the bound": f"{100 * (size / least - 1):+.1f} %",
                "encode GB/s": speed(old.nbytes / 1e9, encoded[name]),
                "apply GB/s": speed(old.nbytes / 1e9, applied[name]),
                "load": load,
                "MB to encode": f"{extra_memory(to_encode[name]):.0f}",
            }
        )
        print(out[-1], flush=True)
    line = {"source": source, "changed": out[-1]["changed"], "method": BOUND, "bytes": math.ceil(least)}
    line |= {"dense / sent": f"{old.nbytes / least:.1f}"}
    return [*out, line | {key: "" for key in out[0] if key not in line}]


def plot(rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, marker in zip((*methods(), BOUND), "v^sDox", strict=True):
        some = [r for r in rows if r["method"] == name and r["source"].startswith("synthetic")]
        style: dict[str, Any] = {"color": "black", "ls": "--"} if name == BOUND else {}
        x, y = ([float(str(r[key]).split()[0]) for r in some] for key in ("changed", "dense / sent"))
        axis.plot(x, [100 / v for v in y], marker=marker, ms=5, label=name, **style)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("weights that change, %")
    axis.set_ylabel("bytes sent, % of all weights'")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    figure.savefig(RESULTS.parents[1] / "docs" / "images" / "delta.png", dpi=100)


def main(argv: list[str] | None = None) -> int:
    parser = command("bench_delta", __doc__)
    parser.add_argument("--n", type=float, default=2.5e8, help="synthetic weights (default 2.5e8)")
    parser.add_argument("--repeats", type=int, default=5, help="of each method, in turn (default 5)")
    parser.add_argument(
        "--before", type=int, default=150, help="steps of training before the small rate (150)"
    )
    parser.add_argument("--rate", type=float, default=1e-6, help="the small rate (default 1e-6)")
    parser.add_argument("--save", action="store_true", help="keep results and picture")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for steps, old, new in trained(args.before, args.rate):
        rows += rows_of(f"transformer, {steps} steps", old, new, args.repeats)
    for rate in RATES:
        rows += rows_of(f"synthetic, {args.n:.3g}", *synthetic(int(args.n), rate), args.repeats)
    note = (
        f"bfloat16 weights from float32 masters; synthetic ones by {', '.join(f'{r:g}' for r in RATES)}; "
        f"AdamW at {args.rate:g} after {args.before} steps at its own rate. One thread, "
        f"{args.repeats} turns. GB/s of new weights by the clock on the wall: median [quartiles]. Load: of "
        f"the minute before. MB: beside both vectors; the whole run took {peak():.1f} GB at most."
    )
    report("delta", "Deltas of weights", rows, note, RESULTS if args.save else None)
    if args.save:
        plot(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
