"""What few exchanges do to the loss: Outer and plain averaging, beside an all-reduce in every step.

    python -m benchmarks.bench_outer                       # 4 ranks, every 5, 10, 30 and 100 steps
    python -m benchmarks.bench_outer --every 30 --seeds 3 --only averaging --save

Every row takes the same steps on the same batches (equal tokens). The ranks are processes that exchange
through Gloo. The inner optimizer is AdamW, with a warm-up of 20 steps and a cosine down to a tenth. With
--save it adds to what benchmarks/results/outer-TASK-WORLD.json holds already, and measures only what is
missing there. Times are not measured here.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import sidcomp
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import compact_json
from benchmarks.common import RESULTS, machine, report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tasks import TASKS

RATES = {"lm": 0.004, "gpt": 0.003}
SPARSE = {"ratio": 128, "values": "log2", "indices": "packed", "beta": 0.95}
AVERAGE = {"lr": 1.0, "momentum": 0.0}
DENSE = "dense"
# The codec's State, and the outer optimizer.
WAYS: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "averaging": (("none", {}), AVERAGE),
    "averaging, delay 1/3": (("none", {}), {**AVERAGE, "delay": 1 / 3}),
    "DiLoCo": (("none", {}), {}),
    "averaging, top-k": (("topk", {**SPARSE, "beta": 1.0}), AVERAGE),
    "averaging, int4": (("int4", {}), AVERAGE),
    "SparseLoCo": (("topk", SPARSE), AVERAGE),
    "SparseLoCo with DiLoCo's momentum": (("topk", SPARSE), {"lr": 0.7, "momentum": 0.9}),
}


def train(
    rank: int, world: int, file: str, task: str, steps: int, every: int, way: str, seed: int, out: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    data = TASKS[task](rank, world, TASKS[task].batch, torch.device("cpu"))
    torch.manual_seed(seed)
    model = data.model()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATES[task], betas=(0.9, 0.95), weight_decay=0.1)
    codec, given = WAYS.get(way, (("none", {}), {}))
    outer, state = None, None
    if way != DENSE:
        state = sidcomp.State(codec[0], **codec[1])
        how = {**given, "delay": round(given.get("delay", 0) * every)}
        outer = sidcomp.Outer(model, optimizer, state, every=every, **how)
    carry = None
    for step in range(steps):
        rate = RATES[task] * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss, carry = data.loss(model, 1000 * seed + step, carry)
        loss.backward()
        if outer is None:
            grads = torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
            dist.all_reduce(grads)
            for p, g in zip(parameters, (grads / world).split([p.numel() for p in parameters]), strict=True):
                p.grad = g.view_as(p)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0 if outer is None else math.sqrt(world))
        if outer is None:
            optimizer.step()
        else:
            outer.step()
    sent = 1.0
    if outer is not None and state is not None:
        outer.average()
        n = sum(p.numel() for p in parameters)
        dense = 2 * (world - 1) / world * 4 * n * steps
        sent = dense / state.stats()["wire_bytes"]
        state.close()
    model.eval()
    with torch.no_grad():
        total = torch.tensor(data.measure(model), dtype=torch.float64)
    dist.all_reduce(total)
    if rank == 0:
        Path(out).write_text(json.dumps({"loss": float(total[0] / total[1]), "ratio": sent}))
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace, every: int, way: str, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="outer-") as folder:
        out = Path(folder) / "out.json"
        given = (args.world, f"{folder}/store", args.task, args.steps, every, way, seed, str(out))
        mp.start_processes(train, given, nprocs=args.world)
        found: dict[str, float] = json.loads(out.read_text())
    return found


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    dense = found[DENSE]["loss"]
    out = []
    for label, of in found.items():
        over = [loss / dense[seed] - 1 for seed, loss in of["loss"].items() if seed in dense]
        out.append(
            {
                "way": label,
                "dense bytes / sent bytes": f"{of['ratio']:.1f}",
                "validation loss": f"{mean(of['loss'].values()):.4f}",
                "seeds": ", ".join(f"{x:.4f}" for x in of["loss"].values()),
                "over dense": f"{100 * mean(over):+.2f} %" if over else "",
            }
        )
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", default="lm", choices=sorted(RATES), help="of examples/tasks.py (default lm, the GRU)")
    add("--world", type=int, default=4, help="ranks (default 4)")
    add("--steps", type=int, default=450, help="of each row (default 450)")
    add("--every", type=int, nargs="+", default=[5, 10, 30, 100], help="steps between two exchanges")
    add("--seeds", type=int, default=1, help="0, 1, ... (default 1)")
    add("--only", help="the rows that begin with this, and dense")
    add("--save", action="store_true", help="keep the results in benchmarks/results")
    args = parser.parse_args(argv)
    name = f"outer-{args.task}-{args.world}"
    kept = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(kept.read_text())["found"] if args.save and kept.exists() else {}
    cells = [(DENSE, DENSE, 1)]
    cells += [
        (f"{way}, every {h}", way, h) for h in args.every for way in WAYS if way.startswith(args.only or "")
    ]
    for seed in range(args.seeds):
        for label, way, every in cells:
            of = found.setdefault(label, {"ratio": 1.0, "steps": args.steps, "loss": {}})
            if of["steps"] == args.steps and str(seed) in of["loss"]:
                continue
            one = measure(args, every, way, seed)
            of["loss"][str(seed)], of["ratio"] = one["loss"], one["ratio"]
            print(f"{label}, seed {seed}: {one['loss']:.4f}, 1/{one['ratio']:.1f}", flush=True)
            if args.save:
                kept.write_text(compact_json.dumps({"found": found, "machine": machine()}))
    note = (
        f"{TASKS[args.task].title}, AdamW, {args.world} ranks, {args.steps} steps of all ranks. Over dense: "
        "the mean of what each seed loses to an all-reduce in every step with that seed."
    )
    report(name, "Outer: loss at equal tokens", rows(found), note, None)
    if args.save:
        table = ["| " + " | ".join(row) + " |" for row in ([*rows(found)[0]], *map(dict.values, rows(found)))]
        table.insert(1, "|---" * len(rows(found)[0]) + "|")
        kept.with_suffix(".md").write_text("\n".join([*table, "", note, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
