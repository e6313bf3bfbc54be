"""Functions on several ranks of a thread each, over Gloo: in processes of this host, or on a lab's hosts."""

import datetime
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawned(call: Callable[..., Any], world: int, *arguments: Any) -> Any:
    """What call(rank, world, *arguments), a function of a module, returns on rank 0. It goes through JSON."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        mp.start_processes(_rank, (world, folder, call, arguments), nprocs=world)
        return json.loads((Path(folder) / "found.json").read_text())


def _rank(rank: int, world: int, folder: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    _finish(call(rank, world, *arguments), Path(folder) / "found.json")


def answer(call: Callable[[Any], Any], timeout: float = 60) -> None:
    """The main function of a module that `Lab.ask` runs. call: what was asked in, what rank 0 answers out.
    timeout: seconds of Gloo."""
    spec, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    _finish(call(spec), out)


def _finish(found: Any, out: Path) -> None:
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
