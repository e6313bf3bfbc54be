"""One rank of `sidcomp bench`: measures codecs and exchanges with the other ranks of this machine, over Gloo.

The command starts it as a process: `python -m sidcomp.autotune.local_ranks RANK RANKS STORE REQUEST`. Rank 0
prints lines of JSON: {"next": what, "spent": a fraction} before each measurement, then {"found": ...}.
"""

import gc
import json
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.autotune import measurement, probe
from sidcomp.config.settings import Settings
from sidcomp.runtime.process_group import Exchange


def candidates(codecs: list[tuple[str, dict[str, Any]]], world: int) -> list[probe.Candidate]:
    """The codecs as the micro-benchmarks take them, and what State("auto") chooses from on one node."""
    found = [measurement.measurable(Settings.parse(name, own), 0, world) for name, own in codecs]
    auto = Settings.parse("auto", {})
    for i, c in enumerate(auto.candidates):
        if c.choice is None or (world > 2 and "ranks_per_node" not in c.choice.parameters):
            found.append(measurement.measurable(auto, i, world))
    return list({c.name: c for c in found}.values())


def run(rank: int, ranks: int, store: str, request: dict[str, Any]) -> None:
    """Takes the measurements of all ranks together; rank 0 prints them."""
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )

    def tell(what: str, spent: float) -> None:
        if rank == 0:
            print(json.dumps({"next": what, "spent": spent}), flush=True)

    device = torch.device("cpu")
    codecs = [(name, own) for name, own in request["codecs"]]
    group = dist.group.WORLD
    assert group is not None
    exchange = Exchange(group, device, "sidcomp bench")
    found = probe.measure(
        candidates(codecs, ranks), exchange, request["bytes"], torch.float32, device, request["seconds"],
        progress=tell,
    )  # fmt: skip
    if rank == 0:
        methods = [asdict(m) for m in found.methods]
        plain = {"methods": methods, "contention": found.contention, "measured_s": found.seconds}
        print(json.dumps({"found": {**plain, "threads": torch.get_num_threads()}}), flush=True)
    exchange.close()
    del exchange
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
