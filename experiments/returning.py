"""Does a delta save bytes when a rank that was late takes over the common point?

Answer (29 November 2026): yes. After 1, 4 and 16 missed rounds SparseLoCo's top-k leaves 3, 12 and 36 % of the
point's bytes, because only what some rank has sent changes. bfloat16 without compression leaves 44 to 63 %. With
uncompressed float32, or 4 bits, nearly all elements change, and 71 to 86 % are left; of DiLoCo's momentum 76 to
88 %. So a late rank gets a delta (python/sidcomp/local/elastic.py). One that was started again has no base.

Run it from the repository's root: PYTHONPATH=python:examples python -m experiments.returning;
--save writes returning.json beside this file.

Two ranks train the transformer of examples/tasks.py by AdamW and exchange every five steps, in one process. A
rank leaves after round 4 and comes back k rounds later. sent: the delta from the common point of round 4 to
the present one, in percent of the point's bytes. momentum: the same of DiLoCo's momentum, which travels
beside the point.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sidcomp import delta
from sidcomp.config.accuracy import INT4, OUTER, CodecSpec
from sidcomp.standalone.loopback import Loopback
from tasks import TASKS
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.common import report

HERE = Path(__file__).parent
RANKS, EVERY, LEAVES, MISSED = 2, 5, 4, (1, 4, 16)
PLAIN: CodecSpec = ("none", {})
WAYS: tuple[tuple[str, torch.dtype, CodecSpec, float], ...] = (  # a name, a codec, the outer momentum
    ("top-k, SparseLoCo's", torch.float32, OUTER, 0.0),
    ("averaging", torch.float32, PLAIN, 0.0),
    ("DiLoCo", torch.float32, PLAIN, 0.9),
    ("averaging", torch.bfloat16, PLAIN, 0.0),
    ("4 bits", torch.float32, INT4, 0.0),
)


def rounds(
    dtype: torch.dtype, codec: str, parameters: dict[str, Any], momentum: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The common point and the outer momentum after each round."""
    tasks = [TASKS["gpt"](rank, RANKS, 2, torch.device("cpu")) for rank in range(RANKS)]
    torch.manual_seed(0)
    models = [task.model().to(dtype) for task in tasks]
    point = parameters_to_vector(models[0].parameters()).detach()
    velocity = torch.zeros_like(point)
    exchange = "allreduce" if codec == "none" else "allgather"
    ranks = Loopback(RANKS, exchange, codec, len(point), dtype=dtype, **parameters)
    for model in models:
        vector_to_parameters(point.clone(), model.parameters())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=tasks[0].lr) for model in models]
    for number in range(LEAVES + max(MISSED)):
        for step in range(number * EVERY, (number + 1) * EVERY):
            for task, model, optimizer in zip(tasks, models, optimizers, strict=True):
                optimizer.zero_grad()
                task.loss(model, step, None)[0].backward()
                optimizer.step()
        moved = [point - parameters_to_vector(model.parameters()).detach() for model in models]
        mean = torch.as_tensor(ranks.step(moved))
        if momentum:  # Nesterov's, as DiLoCo has it
            velocity.mul_(momentum).add_(mean)
            mean = 0.7 * (mean + momentum * velocity)
        point = point - mean
        with torch.no_grad():
            for model in models:
                vector_to_parameters(point.clone(), model.parameters())
        yield point, velocity.clone()


def percent(old: torch.Tensor, new: torch.Tensor) -> str:
    return f"{100 * len(delta.encode(old, new)) / new.nbytes:.1f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.returning", description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the results beside this file")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for way, dtype, codec, momentum in WAYS:
        found = list(rounds(dtype, *codec, momentum))
        for k in MISSED:
            (old, was), (new, now) = found[LEAVES - 1], found[LEAVES - 1 + k]
            row = {"parameters": str(dtype).removeprefix("torch."), "way": way, "rounds missed": k}
            row["changed, %"] = f"{100 * (old != new).float().mean():.1f}"
            row |= {"sent, %": percent(old, new), "momentum, %": percent(was, now) if momentum else ""}
            rows.append(row)
            print(row, flush=True)
    note = f"{RANKS} ranks, AdamW, an exchange every {EVERY} steps; rank away from round {LEAVES} on"
    report("returning", "A rank that comes back", rows, note, HERE if args.save else None)


if __name__ == "__main__":
    main()
