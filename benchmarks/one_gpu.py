"""The transports of a State on a GPU that several ranks share: the same bits? And what does the host pay?

`check(world)` starts the ranks; gpu_check.py calls it. Each trains a small model of several groups with
torch's transport, with NCCL called by sidcomp, and with NCCL called so that it starts no thread for each
call, from the same start. Gathered payloads must give all ranks the same weights, whatever the
transport, and so must sums of two ranks. The host's time is that of enqueueing a group's step
(`_launch`), the device idle before each step; the median over groups and steps, of rank 0. While it
enqueues, waiting for the device is an error (torch's sync debug mode), and nothing may be allocated. Ranks on
one GPU take turns, so nothing is said of how long the exchange itself takes.

NCCL takes two ranks of a device for a mistake unless their hosts differ, so that each gets a name of its own;
it then goes through sockets on the loopback.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, perf_counter_ns
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.processes import end, start  # noqa: E402

CODECS = ("topk", "sidco-e", "int8", "efsignsgd", "fp16")
BLOCKING = "blocking"  # native, but NCCL works in the calling thread (SIDCOMP_NCCL_BLOCKING)
TRANSPORTS = ("torch", "native", BLOCKING)
STEPS, WARM = 15, 3
LIMIT = 150.0  # seconds of all ranks
NCCL = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1", "NCCL_PROTO": "Simple", "NCCL_ALGO": "Ring", "NCCL_RAS_ENABLE": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


def check(
    world: int,
    emulated: bool = False,
    steps: int = STEPS,
    limit: float = LIMIT,
    more: dict[str, str] | None = None,
) -> dict[str, Any]:
    """{"rows": for each codec, host time in us by transport; "wrong": what differs, [] if all is well}.
    limit: seconds of all ranks. more: of the ranks' environment."""
    with tempfile.TemporaryDirectory() as room:
        command = [sys.executable, __file__]
        outputs = [Path(room) / f"rank-{r}" for r in range(world)]
        ranks = []
        for r, output in enumerate(outputs):
            arguments = str(r), str(world), f"{room}/store", str(int(emulated)), str(steps)
            with output.open("wb") as file:
                env = NCCL | {"NCCL_HOSTID": f"sidcomp-{r}"} | (more or {})
                ranks.append(start([*command, *arguments], file, **env))
        try:
            until = monotonic() + limit
            for p in ranks:
                p.wait(max(0.0, until - monotonic()))
        except subprocess.TimeoutExpired:
            return {"rows": [], "wrong": [f"{world} ranks were not done within {limit:.0f} s"]}
        finally:
            for p in ranks:
                end(p)
        texts = [output.read_text(errors="replace") for output in outputs]
    wrong = [
        f"rank {r} ended with {p.returncode}: {text[-1500:]}"
        for r, (p, text) in enumerate(zip(ranks, texts, strict=True))
        if p.returncode
    ]
    if wrong:
        return {"rows": [], "wrong": wrong}
    return compare([json.loads(t.strip().splitlines()[-1]) for t in texts])


def compare(ranks: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    rows, wrong = [], []
    for codec in ranks[0]:
        for transport in ranks[0][codec]:
            if len({r[codec][transport]["weights"] for r in ranks}) > 1:
                wrong.append(f"{codec} over {transport}: the ranks have different weights")
            if grown := max(r[codec][transport]["allocations"] for r in ranks):
                wrong.append(f"{codec} over {transport}: {grown} allocations after the first steps")
        of = ranks[0][codec]
        if len({x["weights"] for x in of.values()}) > 1 and not (of["torch"]["sums"] and len(ranks) > 2):
            wrong.append(f"{codec}: the transports give different weights")
        rows.append({"codec": codec, **{f"{transport} us": x["host us"] for transport, x in of.items()}})
    return {"rows": rows, "wrong": wrong}


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
    # Read where the communicator is made, in the first step.
    os.environ["SIDCOMP_NCCL_BLOCKING"] = str(int(transport == BLOCKING))
    state = sidcomp.State(codec, transport="torch" if transport == "torch" else "native")
    if emulated:
        from emulated import emulate

        emulate(state)
    sidcomp.register(ddp, state)
    rng = torch.Generator().manual_seed(50 + rank)
    took: list[int] = []
    grown = 0
    warm = min(WARM, steps)
    for step in range(warm + steps):
        if step == warm:
            from sidcomp.runtime.cuda_executor import CudaExecutor

            executor = state._engine.executor
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
    store = sys.argv[3]
    rank, world, emulated, steps = (int(sys.argv[i]) for i in (1, 2, 4, 5))
    if not emulated:
        sys.path.insert(0, str(ROOT / "python"))
    import gc

    import torch
    import torch.distributed as dist

    if not emulated:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo" if emulated else "nccl", init_method=f"file://{store}", rank=rank, world_size=world
    )
    out = {c: {t: train(rank, c, t, bool(emulated), steps) for t in TRANSPORTS} for c in CODECS}
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(out), flush=True)
    os._exit(0)  # Gloo's threads may outlive the interpreter


if __name__ == "__main__":
    main()
