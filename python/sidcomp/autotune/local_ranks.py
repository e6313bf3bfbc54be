"""One rank of `sidcomp bench`: measures codecs and exchanges with the other ranks, over Gloo.

The command starts it as a process: `python -m sidcomp.autotune.local_ranks RANK RANKS STORE REQUEST`. Rank 0
prints lines of JSON: {"next": what, "spent": a fraction} before each measurement, then {"found": ...}. Where
torchrun has started the command itself, on one host or on several, each process of it calls `run`.
"""

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.autotune import measurement, probe
from sidcomp.config.kinds import from_environment
from sidcomp.config.settings import Settings
from sidcomp.errors import MismatchError
from sidcomp.planner.cost_curve import low
from sidcomp.runtime.communicator import Exchange

TURNS = 5  # in which everything is measured once more
_PATIENCE = 60.0  # seconds that a rank waits for the others, beside the time of the measurement


def candidates(codecs: list[tuple[str, dict[str, Any]]], world: int, local: int) -> list[probe.Candidate]:
    """The codecs as the micro-benchmarks take them, and what State("auto") chooses from. local: how many
    ranks share a host."""
    found = [measurement.measurable(Settings.parse(name, own), 0, world) for name, own in codecs]
    auto = Settings.parse("auto", {})
    hosts = 1 < local < world and world % local == 0
    for i, c in enumerate(auto.candidates):
        if c.choice is None or (world > 2 and (hosts or "ranks_per_node" not in c.choice.parameters)):
            found.append(measurement.measurable(auto, i, world))
    return list({c.name: c for c in found}.values())


def run(
    rank: int, ranks: int, store: str, request: dict[str, Any], tell: probe.Progress | None = None
) -> dict[str, Any]:
    """Meets the other ranks and measures with them, see `measured`. store: where they meet, as
    init_process_group takes it."""
    patience = timedelta(seconds=_PATIENCE + request["seconds"])
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=patience)
    try:
        return measured(request, tell)
    finally:
        gc.collect()
        dist.destroy_process_group()


def measured(request: dict[str, Any], tell: probe.Progress | None = None) -> dict[str, Any]:
    """Measures together with the other ranks of the default group. request: "codecs", "bytes" and "seconds",
    the same on all ranks. tell: is told what comes next. Returns the same on all ranks. Raises MismatchError
    if the requests differ, and what the measurement raises."""
    device, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None
    exchange = Exchange(group, device, "sidcomp bench")
    try:
        local = from_environment("LOCAL_WORLD_SIZE", exchange.world)
        threads = measurement.most_threads(exchange, "the measurement")
        told = exchange.tell_texts(json.dumps([request, local]), "the measurement")
        requests, of_hosts = zip(*map(json.loads, told), strict=True)
        _compare(requests)
        local = local if len(set(of_hosts)) == 1 else 1
        codecs = [(name, own) for name, own in request["codecs"]]
        found = probe.measure(
            candidates(codecs, exchange.world, local), exchange, request["bytes"], torch.float32, device,
            request["seconds"], progress=tell, turns=TURNS, level=low,
        )  # fmt: skip
    finally:
        exchange.close()
    plain = {key: value for key, value in asdict(found).items() if key != "seconds"}
    return {**plain, "measured_s": found.seconds, "threads": threads}


def _compare(every: Sequence[Any]) -> None:
    """Raises MismatchError if a rank was asked for something else than rank 0."""
    for rank, other in enumerate(every):
        if other != every[0]:
            error = MismatchError(
                f"rank {rank} was started with other arguments than rank 0: {json.dumps(other)} and "
                f"{json.dumps(every[0])}: start all ranks with the same command"
            )
            error.__dict__["rank"] = rank
            raise error


def main(rank: int, ranks: int, store: str, request: dict[str, Any]) -> None:
    def tell(what: str, spent: float) -> None:
        if rank == 0:
            print(json.dumps({"next": what, "spent": spent}), flush=True)

    found = run(rank, ranks, store, request, tell)
    if rank == 0:
        print(json.dumps({"found": found}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
