"""Encode with error feedback and decode of 8 or 64 ranks, against the memory limit and torch's operations.

The limit of encode is `R += G` over the same memory (it reads the gradient, reads and writes the residual:
12 bytes an element); that of decode is one write of the vector, times what else has to be read. The baseline
is what a hook written with torch's operations does (baselines.py). One thread.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sidcomp import _core
from sidcomp.config.accuracy import FORTIETH

from benchmarks.baselines import BASELINES, Baseline, Job
from benchmarks.common import RESULTS, Timing, command, race, ratio, report

RANKS = 8
MANY = 64  # ranks, whose payloads are 8 in turn
POOL = 5  # gradients in turn, so that no step meets the last one's
FIRST = 12  # steps from an empty residual on, until it is emptied again
WARMUP = 2 * FIRST  # steps before the first timed one: the codec's threshold has settled
RESIDUALS = ("filled", "empty")


def block(nbytes: int) -> np.ndarray:
    """Zeroed bytes from a multiple of 64 on."""
    raw = np.zeros(nbytes + 64, np.uint8)
    at = -raw.ctypes.data % 64
    return raw[at : at + nbytes]


class Ours:
    def __init__(
        self,
        codec: str,
        n: int,
        settings: dict[str, Any],
        gradients: list[np.ndarray],
        memory: str,
        start: np.ndarray | None = None,
        dtype: str = "float32",
    ) -> None:
        """gradients: POOL of them. start: what the memory holds at first, where it holds anything."""
        self.plan = _core.Plan(codec, memory, n, dtype, settings)
        self.itemsize = gradients[0].itemsize
        # A body that is summed with others has no checksum. A codec that waits for a sum is alone.
        self.world = RANKS if self.plan.linear and self.plan.reductions == 1 else 1
        self.state, self.work = block(self.plan.state_bytes), block(self.plan.work_bytes)
        self.payload = block(self.plan.payload_bytes)
        places = (self.state.ctypes.data, self.work.ctypes.data, self.payload.ctypes.data)
        self.buffers = [_core.Buffers(_core.Segments([g.ctypes.data], [n]), *places) for g in gradients]
        self.step = 0
        self.passes = 0
        self.first = self.state.copy()  # before anything was kept
        if start is not None and self.plan.vectors:
            self.plan.residual_in(self.state.ctypes.data, start.ctypes.data)

    def encode(self) -> None:
        stats = self.plan.encode(
            self.buffers[self.step % POOL], step=self.step, seed=0, group=0, rank=0, world=self.world
        )
        self.step += 1
        self.passes += stats.passes

    def begin_again(self) -> None:
        """Every FIRST steps the state is what training begins with."""
        if self.step % FIRST == 0:
            self.state[:] = self.first

    def floor_bytes(self) -> float:
        """What a decode has to move: the bodies that were written are read, the vector is written."""
        return (1 if self.plan.linear else RANKS) * self.plan.payload_bytes + self.itemsize * self.plan.n

    def decoder(self, out: np.ndarray, ranks: int = RANKS) -> Callable[[], object]:
        count = 1 if self.plan.linear else ranks  # a linear one arrives summed
        size = self.plan.payload_bytes
        payloads = block(count * size)
        for rank in range(count):
            if rank < RANKS:  # another payload for each rank
                self.encode()
            at = rank * size
            payloads[at : at + size] = (
                self.payload if rank < RANKS else payloads[at % (RANKS * size) :][:size]
            )
        into = _core.Buffers(_core.Segments([out.ctypes.data], [self.plan.n]))
        return lambda: self.plan.decode(payloads.ctypes.data, size, count, 1 / count, into, step=-1, group=0)


def home(codec: str) -> str:
    """The codec's own memory; residual in place of those that hold a momentum or know the ranks' update."""
    own = next(c["memory"] for c in _core.codecs() if c["name"] == codec)
    return own if own == "none" else "residual"


def settings_of(info: dict[str, Any], densities: list[float]) -> list[dict[str, Any]]:
    """The rows of a codec: at each density, of the group and of blocks; and as State() has it."""
    if not any(p["name"] == "density" for p in info["parameters"]):
        return [{}]
    rows: list[dict[str, Any]] = [{"density": d} for d in densities]
    for p in info["parameters"]:
        if p["name"] == "block":  # so that a block sends one element or more
            rows += [{"density": d, "block": p["max"]} for d in densities if d * p["max"] >= 1]
    return [*rows, FORTIETH[1]] if info["name"] == FORTIETH[0] else rows


def in_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32, or the bits of x in float16 or bfloat16."""
    if dtype == "float32":
        return x
    return torch.from_numpy(x).to(getattr(torch, dtype)).view(torch.int16).numpy()


def run(n: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    repeats = args.repeats
    rng = np.random.default_rng(0)
    gradients = [rng.laplace(size=n).astype(np.float32) for _ in range(POOL)]
    # a residual that many steps have filled
    start = (20 * np.random.default_rng(1).laplace(size=n)).astype(np.float32)
    given = [in_dtype(g, args.dtype) for g in gradients]
    summed, out = np.zeros(n, np.float32), np.zeros_like(given[0])
    # As many elements as have the bytes of the residual, read and written, and of the gradient.
    m = n * (8 + given[0].itemsize) // 12
    rows = []
    for info in _core.codecs():
        if not any(part in info["name"] for part in args.only):
            continue
        for settings in settings_of(info, args.density):
            memory = home(info["name"])
            for residual in args.residual if memory == "residual" else ["filled"]:
                ours = Ours(info["name"], n, settings, given, memory, start, args.dtype)
                filled = residual == "filled"
                for _ in range(WARMUP):
                    ours.encode()
                turn = iter(range(10**9))
                runners: dict[str, Callable[[], object]] = {
                    "encode": ours.encode,
                    "R += G": lambda turn=turn: np.add(
                        summed[:m], gradients[next(turn) % POOL][:m], out=summed[:m]
                    ),
                }
                baseline = None
                if (
                    not args.no_baseline
                    and filled
                    and args.dtype == "float32"
                    and info["name"] in BASELINES
                    and len(settings) < 2
                ):
                    baseline = Baseline(
                        info["name"],
                        Job(n, ours.plan.k),
                        [*map(torch.from_numpy, gradients)],
                        torch.from_numpy(start.copy()),
                        1 if ours.plan.linear else RANKS,
                    )
                ours.passes = 0
                if filled:
                    encode = race(runners, repeats)
                    passes = ours.passes / (repeats + 2)
                else:
                    encode = race(runners, 2 * FIRST, 0, ours.begin_again)
                    passes = ours.passes / (2 * FIRST)
                decode, slow = {}, {}
                if filled:
                    write: dict[str, Callable[[], object]] = {"write": lambda: out.fill(0)}
                    decode = race({"decode": ours.decoder(out), **write}, repeats)
                    decode["many"] = race({"decode": ours.decoder(out, MANY)}, max(3, repeats // 3))["decode"]
                if baseline:  # after ours: what it allocates would push ours out of the caches
                    few = max(3, repeats // 3)
                    slow = race({"encode": baseline.encode}, few, 1)
                    while len(baseline.sent) < baseline.ranks:
                        baseline.encode()
                    slow["decode"] = race({"decode": baseline.decode}, few, 1)["decode"]
                rows.append(
                    row_of(ours, info["name"], memory, residual, settings, encode, passes, decode, slow)
                )
    return rows


def row_of(
    ours: Ours,
    codec: str,
    memory: str,
    residual: str,
    settings: dict[str, Any],
    encode: dict[str, Timing],
    passes: float,
    decode: dict[str, Timing],
    slow: dict[str, Timing],
) -> dict[str, Any]:
    n = ours.plan.n
    more = "".join(f" {k}={v}" for k, v in settings.items() if k != "density")
    row: dict[str, Any] = {
        "codec": codec + more,
        "memory": memory,
        "residual": residual if memory == "residual" else "",
        "n": n,
        "density %": settings.get("density", 1.0) * 100,
        "wire bits / element": ours.plan.payload_bytes * 8 / n,
        "encode ms": str(encode["encode"]),
        "R+=G ms": str(encode["R += G"]),
        "encode / limit": encode["encode"].median / encode["R += G"].median,
        "its quartiles": ratio(encode["encode"], encode["R += G"]),
        "torch / encode": slow["encode"].median / encode["encode"].median if slow else "",
        "passes": passes,
        "decode ms": "",
        "write ms": "",
        "decode / limit": "",
        "quartiles of that": "",
        f"decode of {MANY} ms": "",
        "ms an added rank": "",
        "added rank / its bytes": "",
        "torch / decode": slow["decode"].median / decode["decode"].median if slow else "",
    }
    if not decode:
        return row
    write = decode["write"].median / (ours.itemsize * n)  # ms a byte
    row["decode ms"] = str(decode["decode"])
    row["write ms"] = str(decode["write"])
    row["decode / limit"] = decode["decode"].median / (write * ours.floor_bytes())
    of_write = ours.itemsize * n / ours.floor_bytes()
    row["quartiles of that"] = ratio(decode["decode"], decode["write"], of_write)
    if not ours.plan.linear:
        added = (decode["many"].median - decode["decode"].median) / (MANY - RANKS)
        row[f"decode of {MANY} ms"] = str(decode["many"])
        row["ms an added rank"] = added
        row["added rank / its bytes"] = added / (write * ours.plan.payload_bytes)
    return row


def quieter(tables: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each row the one whose encode took less: what disturbs a run of minutes is not the codec's."""
    return [min(rows, key=lambda r: float(r["encode ms"].split()[0])) for rows in zip(*tables, strict=True)]


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    dtype, repeats = args.dtype, args.repeats
    note = (
        f"{dtype}, one thread, Laplace gradients. residual: filled by many steps, or the first {FIRST} steps "
        f"from an empty one, twice; median [quartiles] of {repeats} (first steps: {2 * FIRST}, decode of "
        f"{MANY}: {max(3, repeats // 3)}). A linear codec encodes as one of {RANKS} ranks. "
        f"Limits: of encode: R += G, {12 if dtype == 'float32' else 10} bytes an element, of decode "
        f"({RANKS} ranks, linear: their sum): the time of one write, times the bytes read and written "
        f"over those of that write. An added rank: of {MANY} beside {RANKS} (payloads of {RANKS} ranks, in "
        "turn), and over the time of its payload's bytes at the speed of the write. "
        "torch: the same written with torch's operations (benchmarks/baselines.py)."
    )
    if args.runs > 1:
        note += f" Each row from the one of {args.runs} runs of the table in which its encode took least."
    name = args.name or ("codec" if dtype == "float32" else f"codec-{dtype}")
    report(name, "Encode and decode", rows, note, RESULTS if args.save else None)


def main(argv: list[str] | None = None) -> None:
    parser = command("bench_codec", __doc__)
    parser.add_argument(
        "--n", type=int, nargs="+", default=[25_600_000], help="elements (default: ResNet-50's)"
    )
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each (default 15)")
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01, 0.1], help="fractions")
    parser.add_argument("--only", nargs="+", default=[""], help="codecs whose names hold one of these")
    parser.add_argument(
        "--residual", nargs="+", choices=RESIDUALS, default=["filled"], help="(default filled)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="(default float32)"
    )
    parser.add_argument("--no-baseline", action="store_true", help="leave torch's operations out")
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        help="of the whole table: row by row the quieter one counts (default 1)",
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME.json")
    parser.add_argument("--name", help="(default codec, of other types codec-bfloat16 and so on)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    show(quieter([[row for n in args.n for row in run(n, args)] for _ in range(args.runs)]), args)


if __name__ == "__main__":
    main()
