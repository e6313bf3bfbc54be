"""The transports of a State on a GPU that several ranks share: the same bits? And what does the host pay?

    python benchmarks/one_gpu.py                # two ranks; gpu_check.py starts it (processes.py)

Each rank trains a small model of several groups with torch's transport, and with NCCL called by sidcomp, from
the same start. Gathered payloads must give all ranks the same weights, whatever the transport, and so must
sums of two ranks. The host's time is that of enqueueing a group's step (`_launch`), the device idle before
each step; the median over groups and steps, of rank 0. While it enqueues, waiting for the device is an error
(torch's sync debug mode), and nothing may be allocated. Ranks on one GPU take turns, so nothing is said of
how long the exchange itself takes.

NCCL takes two ranks of a device for a mistake unless their hosts differ, so that each gets a name of its own;
it then goes through sockets on the loopback.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.processes import Row, end, run_units, start, tell  # noqa: E402

CODECS = ("topk", "sidco-e", "int8", "efsignsgd", "fp16")
TRANSPORTS = ("torch", "native")
STEPS, WARM = 15, 3
LIMIT = 150.0  # seconds of all ranks
NCCL = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1", "NCCL_PROTO": "Simple", "NCCL_ALGO": "Ring", "NCCL_RAS_ENABLE": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


def check(world: int, steps: int = STEPS, limit: float = LIMIT) -> Iterator[Row]:
    """For each codec, as soon as all ranks have trained with it: {"what", host time in us by transport,
    "wrong": what differs, "" if all is well}. limit: seconds of all ranks."""
    with tempfile.TemporaryDirectory() as room:
        outputs = [Path(room) / f"rank-{r}" for r in range(world)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for r, output in enumerate(outputs):
                arguments = "--rank", str(r), "--world", str(world), "--store", f"{room}/store"
                with output.open("wb") as file:
                    command = [sys.executable, __file__, *arguments, "--steps", str(steps)]
                    ranks.append(start(command, file, **NCCL, NCCL_HOSTID=f"sidcomp-{r}"))
            yield from follow(ranks, outputs, time.monotonic() + limit)
        finally:
            for p in ranks:
                end(p)


def follow(ranks: list["subprocess.Popen[bytes]"], outputs: list[Path], until: float) -> Iterator[Row]:
    done = 0
    while True:
        over = all(p.poll() is not None for p in ranks)
        texts = [output.read_text(errors="replace") for output in outputs]
        told = [
            [json.loads(x) for x in t.splitlines(True) if x[:9] == '{"codec":' and x[-1] == "\n"]
            for t in texts
        ]
        for of in list(zip(*told, strict=False))[done:]:
            yield compare(list(of))
            done += 1
        failed = [r for r, p in enumerate(ranks) if p.poll()]
        if failed or over or time.monotonic() > until:
            break
        time.sleep(0.05)
    what = f"{len(ranks)} ranks"
    for r in failed:
        yield {
            "what": what,
            "wrong": f"rank {r} ended with {ranks[r].returncode}: {texts[r].strip()[-1500:]}",
        }
    if not failed and not over:
        yield {"what": what, "wrong": "they were not done in time"}


def compare(ranks: list[dict[str, Any]]) -> Row:
    """ranks: what each has told of one codec."""
    of, codec, wrong = ranks[0]["transports"], ranks[0]["codec"], []
    for transport in of:
        if len({r["transports"][transport]["weights"] for r in ranks}) > 1:
            wrong.append(f"the ranks have different weights over {transport}")
        if grown := max(r["transports"][transport]["allocations"] for r in ranks):
            wrong.append(f"{grown} allocations over {transport} after the first steps")
    if len({x["weights"] for x in of.values()}) > 1 and not (of["torch"]["sums"] and len(ranks) > 2):
        wrong.append("the transports give different weights")
    host = {f"{transport} us": x["host us"] for transport, x in of.items()}
    return {"what": f"{codec}, {len(ranks)} ranks", **host, "wrong": "; ".join(wrong)}


def train(rank: int, codec: str, transport: str, emulated: bool, steps: int) -> dict[str, Any]:
    import sidcomp
    import torch
    from torch import nn

    torch.manual_seed(3)
    device = torch.device("cpu") if emulated else torch.device("cuda", 0)
    width, layers = (48, 2) if emulated else (512, 6)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
    ddp = nn.parallel.DistributedDataParallel(
        model, device_ids=None if emulated else [0], bucket_cap_mb=4 * width * width / 2**20
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = sidcomp.State(codec, transport=transport)
    if emulated:
        from emulated import emulate

        emulate(state)
    ddp.register_comm_hook(state, sidcomp.hook)
    rng = torch.Generator().manual_seed(50 + rank)
    took: list[int] = []
    grown = 0
    warm = min(WARM, steps)
    for step in range(warm + steps):
        if step == warm:
            from sidcomp.runtime.cuda_executor import CudaExecutor

            executor = state.engine.executor
            assert isinstance(executor, CudaExecutor)
            launch = executor._launch

            def timed(*arguments: Any, launch: Any = launch) -> None:
                nonlocal grown
                before = allocations(emulated)
                if not emulated:
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    start = perf_counter_ns()
                    launch(*arguments)
                    took.append(perf_counter_ns() - start)
                finally:
                    if not emulated:
                        torch.cuda.set_sync_debug_mode("default")
                grown += allocations(emulated) - before

            executor._launch = timed  # type: ignore[method-assign]
        x = torch.randn(16, width, generator=rng).to(device)
        optimizer.zero_grad()
        loss = ddp(x).square().mean()
        if not emulated:
            torch.cuda.synchronize()
        loss.backward()
        optimizer.step()
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    sums = next(c for c in sidcomp.codecs() if c.name == codec).linear
    state.close()
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "host us": round(statistics.median(took) / 1e3, 1),
        "sums": sums,
        "allocations": grown,
    }


def allocations(emulated: bool) -> int:
    """Blocks that torch's allocator has handed out so far."""
    import torch

    return 0 if emulated else int(torch.cuda.memory_stats()["allocation.all.allocated"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rank", type=int, help="of one of its own processes; --store: where they meet")
    parser.add_argument("--store", default="")
    parser.add_argument("--after", default="", help="what gpu_check.py says behind a unit that failed")
    args = parser.parse_args()
    if args.rank is None:
        run_units({f"{args.world} ranks": lambda: check(args.world, args.steps)}, args.after)
        return
    import gc

    import torch
    import torch.distributed as dist
    from sidcomp import _core

    emulated = _core.cuda_archs == "emulated"
    if not emulated:
        torch.cuda.set_device(0)
    backend, store = "gloo" if emulated else "nccl", f"file://{args.store}"
    dist.init_process_group(backend, init_method=store, rank=args.rank, world_size=args.world)
    for c in CODECS:
        tell(codec=c, transports={t: train(args.rank, c, t, emulated, args.steps) for t in TRANSPORTS})
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads may outlive the interpreter


if __name__ == "__main__":
    main()
