"""Does a second thread pay for encode and decode?

Answer (23 November 2026): only where a core is idle. Two groups at once are encoded 1.1 to 1.6 times as fast as in
turn, and decoded 1.0 to 1.9 times; `R += G` gains 1.05 times, because both threads share the main memory. So the
core runs a call on the calling thread and leaves splitting to the caller.

Run it from the repository's root: PYTHONPATH=python python -m experiments.threads;
--save writes threads.json beside this file.

Two halves of a vector are encoded and decoded in turn and at once.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.bench_codec import POOL, RANKS, WARMUP, Ours
from benchmarks.common import race, report

HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.threads", description=__doc__)
    parser.add_argument("--n", type=int, default=25_600_000, help="elements of both halves together")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each (default 15)")
    parser.add_argument("--save", action="store_true", help="write the results beside this file")
    args = parser.parse_args(argv)
    n = args.n // 2
    rng = np.random.default_rng(0)
    gradients = [rng.laplace(size=n).astype(np.float32) for _ in range(POOL)]
    start = (20 * rng.laplace(size=n)).astype(np.float32)
    summed, out = np.zeros((2, n), np.float32), np.zeros((2, n), np.float32)
    rows = []
    with ThreadPoolExecutor(2) as pool:

        def at_once(jobs: list) -> None:
            for done in [pool.submit(job) for job in jobs]:
                done.result()

        def in_turn(jobs: list) -> None:
            for job in jobs:
                job()

        for density in (0.001, 0.01, 0.1):
            halves = [Ours("topk", n, {"density": density}, gradients, start) for _ in range(2)]
            for _ in range(WARMUP):
                in_turn([h.encode for h in halves])
            adds = [lambda i=i: np.add(summed[i], gradients[i], out=summed[i]) for i in range(2)]
            decoders = [h.decoder(o) for h, o in zip(halves, out, strict=True)]
            encoders = [h.encode for h in halves]
            for what, jobs in (("R += G", adds), ("encode", encoders), ("decode", decoders)):
                runners = {"one": lambda jobs=jobs: in_turn(jobs), "two": lambda jobs=jobs: at_once(jobs)}
                times = race(runners, args.repeats)
                rows.append(
                    {
                        "what": what,
                        "density %": density * 100,
                        "one thread ms": str(times["one"]),
                        "two threads ms": str(times["two"]),
                        "speed-up": times["one"].median / times["two"].median,
                    }
                )
    note = f"topk, two groups of {n:,} float32, decode of {RANKS} ranks; median [quartiles] of {args.repeats}"
    report("threads", "One thread against two", rows, note, HERE if args.save else None)


if __name__ == "__main__":
    main()
