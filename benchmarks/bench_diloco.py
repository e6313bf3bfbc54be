"""DiLoCo tuned as its authors tune it, and sidcomp's updates beside it at equal bytes and equal tokens.

    python -m benchmarks.bench_diloco --save --ranks 4       # 0.22 million parameters: one to two hours
    python -m benchmarks.bench_diloco --save --minutes 60    # starts no run after an hour; call it again
    python -m benchmarks.bench_diloco --save --seeds 3 --ablation --hundredth --muon
    python -m benchmarks.bench_diloco --save --width 208     # a million parameters; not timed

A transformer over bytes reads 20 bytes a parameter, without repeats, of the Python sources of torch. All ways
read the same batches: plain DDP as one process (the sums are those of an all-reduce), the others as ranks
that exchange through Gloo. AdamW, betas 0.9 and 0.95, decay 0.1, clipped at 1, 5 % warm-up, and a cosine to
a tenth.

Tuning: each of plain DDP, DiLoCo on one rank and DiLoCo on four takes the best of inner rates a factor of two
apart, widened until the best is not at an edge. DiLoCo's outer rates are 0.2, 0.4, 0.6, 0.8 and 1, with
Nesterov momentum 0.9, and its inner rates are tried at the best of these; so are SparseLoCo's, whose outer
rates begin with 0.4, 0.65 and 1. Beside DiLoCo stands what the scaling laws of its authors
(arXiv:2503.09799) predict for this size. sidcomp's rows take plain DDP's rate: they are not tuned. Tuning
takes seed 0; the rows are the mean of --seeds. A second measure: each result is then trained on as one
process, on C++ (the headers of torch), and compared again.

With --save each run is written as it ends to benchmarks/results/diloco-WIDTH.json.
"""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import sidcomp
import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks.common import RESULTS, command, machine, report, side_by_side, write
from benchmarks.examples import GPTModel
from benchmarks.ranks import spawned

LAYERS, HEADS, TIME, STREAMS = 2, 2, 64, 16
HELD = 512  # windows of TIME bytes
CORES = os.cpu_count() or 1
FURTHER, FURTHER_RATE = 100, 0.002  # steps on another text, and their rate, the same for all
EVERY = 30
INNER = (0.002, 0.004, 0.008, 0.016)
OUTER = (0.2, 0.4, 0.6, 0.8, 1.0)
LAW = {0: (18.129, -0.0953), 1: (18.363, -0.0961), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}  # 0: plain DDP
PLAIN, DILOCO = "plain DDP", "DiLoCo"
MUON = ", Muon"  # at the end of a way: for the matrices of the layers
TWICE = sidcomp.Options(exchange="twoshot")


class Way(NamedTuple):
    """The arguments of sidcomp.compress."""

    codec: str | sidcomp.State
    how: dict[str, Any]


OURS = {
    "updates, topk": Way("topk", {"ratio": 30}),
    "updates, int4, every 4": Way("int4", {"every": 4, "options": TWICE}),
    "updates, 1/100": Way("auto", {"ratio": 100}),
    "updates, 1 bit, every 3": Way("deadzone", {"bits": 1.0, "every": 3, "options": TWICE}),
    "updates, 1 bit, every 32": Way("deadzone", {"bits": 1.0, "every": 32, "options": TWICE}),
}
BY_ROWS, UNCORRECTED, MEMORY = (
    sidcomp.Options(noise_correction="rows"),
    sidcomp.Options(noise_correction=False),
    sidcomp.Options(noise_correction=True, error="memory", exchange="twoshot"),
)
HUNDREDTH = {
    "updates, 1/100": OURS["updates, 1/100"],
    "1/100, values of 4 bits": Way("auto", {"ratio": 100, "values": "log4"}),
    "updates, 1 bit, every 3": OURS["updates, 1 bit, every 3"],
    "updates, 2 bits, every 6": Way("int2", {"every": 6, "options": TWICE}),
    "updates, int4, every 13": Way("int4", {"every": 13, "options": TWICE}),
    "1/100, 1/32 in the first 432 steps": Way("auto", {"density": sidcomp.Schedule({0: 0.145, 432: 0.0366})}),
    "1/100, noise correction by rows": Way("auto", {"ratio": 100, "options": BY_ROWS}),
    "1/100, no noise correction": Way("auto", {"ratio": 100, "options": UNCORRECTED}),
    "1/100, error in memory": Way("auto", {"ratio": 100, "options": MEMORY}),
    "1/100, error in memory, decay 0.95": Way("auto", {"ratio": 100, "beta": 0.95, "options": MEMORY}),
}
UPDATES = {**OURS, **HUNDREDTH}
SPARSE = "SparseLoCo"
OF_SPARSE = (0.4, 0.65, 1.0)  # outer rates
TABLES = {
    "rows": "DiLoCo, tuned, and sidcomp at equal tokens",
    "ablation": "SparseLoCo, one setting changed at a time",
    "hundredth": "Updates at a hundredth of the bytes, one setting changed at a time",
    "muon": "The same with Muon",
}
ABLATION: dict[str, dict[str, Any]] = {
    SPARSE: {},
    "density 0.5 %": {"density": 0.005},
    "density 3 %": {"density": 0.03},
    "density 10 %": {"density": 0.1},
    "values of 4 bits": {"values": "log4"},
    "values of 32 bits": {"values": "f32"},
    "decay 0.9": {"beta": 0.9},
    "no decay": {"beta": 1.0},
    "no error feedback": {"memory": "none"},
    "all elements, 2 bits": {"codec": "int2"},
    "all elements, 1 bit": {"codec": "deadzone"},
}


class Cell(NamedTuple):
    """A run. ranks: 0 of plain DDP. outer: the rate of DiLoCo and SparseLoCo, 0 of other ways."""

    way: str
    ranks: int
    inner: float
    outer: float = 0.0
    seed: int = 0

    def __str__(self) -> str:
        outer = f", outer {self.outer:g}" if self.outer else ""
        ranks = f", {self.ranks} ranks" if self.ranks else ""
        return f"{self.way}{ranks}, rate {self.inner:g}{outer}, seed {self.seed}"


def sparse(outer: Any, codec: str = "topk", memory: str = "residual", **settings: Any) -> Way:
    """SparseLoCo but for these settings."""
    own: dict[str, Any] = {"bits": 1.0} if codec == "deadzone" else {}
    if codec == "topk":
        own = {"density": 1 / 64, "block": 4096, "values": "log2"}
    if memory == "residual":
        own["beta"] = 0.95
    state = sidcomp.State(codec, memory=memory, groups="model", exchange="allgather", **(own | settings))
    return Way(state, {"every": EVERY, "outer": outer})


def way_of(cell: Cell) -> Way:
    name = cell.way.removesuffix(MUON)
    if ours := UPDATES.get(name):
        return ours
    if name in ABLATION:
        return sparse(partial(torch.optim.SGD, lr=cell.outer), **ABLATION[name])
    nesterov = partial(torch.optim.SGD, lr=cell.outer, momentum=0.9, nesterov=True)
    return Way("none", {"every": EVERY, "outer": nesterov})


class Text(NamedTuple):
    """Bytes, uint8."""

    train: torch.Tensor
    held: torch.Tensor


def read(kind: str) -> Text:
    """One file in 50, by its name, is held out. Files of over 200 KB are mostly tables."""
    root = Path(torch.__file__).parent
    train, held = [], []
    for file in sorted(root.rglob(kind)):
        if file.stat().st_size <= 200_000:
            out = hashlib.sha256(file.relative_to(root).as_posix().encode()).digest()[0] % 50 == 0
            (held if out else train).append(file.read_bytes())
    return Text(*(torch.frombuffer(bytearray().join(x), dtype=torch.uint8) for x in (train, held)))


def size(width: int) -> int:
    """Parameters that are not embeddings."""
    return 12 * LAYERS * width**2


class Data:
    """`STREAMS` streams of text, of which a rank reads its share, and the held-out windows."""

    def __init__(self, text: Text, steps: int, rank: int = 0, world: int = 1) -> None:
        length = steps * TIME + 1
        if len(text.train) < STREAMS * length:
            raise SystemExit(f"{len(text.train):,} bytes of text are too few for {STREAMS} x {length:,}")
        streams = text.train[: len(text.train) // STREAMS * STREAMS].view(STREAMS, -1)[:, :length]
        self.streams = streams.chunk(world)[rank]
        starts = torch.arange(HELD) * (len(text.held) // HELD)
        self.held = text.held[starts[:, None] + torch.arange(TIME + 1)].chunk(world)[rank]

    def loss(self, model: torch.nn.Module, x: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        logits, _ = model(x[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten().long(), reduction=reduction)

    def held_out(self, model: torch.nn.Module) -> torch.Tensor:
        """The sum over this rank's windows, in nats."""
        model.eval()
        with torch.no_grad():
            return torch.stack([self.loss(model, x, "sum").double() for x in self.held.split(64)]).sum()


def optimizers(model: GPTModel, rate: float, muon: bool) -> list[torch.optim.Optimizer]:
    """AdamW; with muon, Muon of the same size of step for the matrices of the layers."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2] if muon else []
    others = [p for p in model.parameters() if all(p is not q for q in matrices)]
    adamw = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if not muon:
        return [adamw]
    return [torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), adamw]


def train(
    model: GPTModel, data: Data, rate: float, steps: int, seed: int, way: Way | None, muon: bool = False
) -> Any:
    """Over the data's windows in an order of this seed. Returns the run; None: of one process."""
    every = optimizers(model, rate, muon)
    run = sidcomp.compress(model, every, way.codec, **way.how) if way is not None else None
    warm = max(1, steps // 20)
    order = torch.randperm(steps, generator=torch.Generator().manual_seed(seed)).tolist()
    for step, window in enumerate(order):
        cosine = 0.55 + 0.45 * math.cos(math.pi * max(0, step - warm) / (steps - warm))
        model.zero_grad()
        data.loss(model, data.streams[:, window * TIME : (window + 1) * TIME + 1]).backward()
        if run is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            run.clip_grad_norm_(1.0)
        for optimizer in every:
            optimizer.param_groups[0]["lr"] = rate * min((step + 1) / warm, cosine)
            optimizer.step()
    return run


def on_rank(rank: int, world: int, texts: list[Text], width: int, steps: int, cell: Cell) -> dict[str, float]:
    data = Data(texts[0], steps, rank, world)
    torch.manual_seed(cell.seed)
    model = GPTModel(width, LAYERS, HEADS, TIME)
    way = way_of(cell) if cell.ranks else None
    run = train(model, data, cell.inner, steps, cell.seed, way, cell.way.endswith(MUON))
    found = {"ratio": 1.0, "apart": 0.0}
    if run is not None:
        found["apart"] = run.updates.apart()
        ring = 2 * (world - 1) / world * 4 * sum(p.numel() for p in model.parameters())
        found["ratio"] = ring * steps / max(1, run.stats()["wire_bytes"])
        run.average()
        run.close()
    total = data.held_out(model)
    dist.all_reduce(total)
    found["loss"] = total.item() / (HELD * TIME)
    if rank == 0:
        torch.set_num_threads(CORES if world > 1 else 1)
        other = Data(texts[1], FURTHER)
        train(model.train(), other, FURTHER_RATE, FURTHER, cell.seed, None)
        found["further"] = other.held_out(model).item() / (HELD * TIME)
    return found


def trained(texts: list[Text], width: int, steps: int, cell: Cell) -> dict[str, float]:
    return dict(spawned(on_rank, max(1, cell.ranks), texts, width, steps, cell))


class Runs:
    """What was measured, by cell."""

    def __init__(self, width: int, save: bool) -> None:
        self.width, self.save = width, save
        self.file = RESULTS / f"diloco-{width}.json"
        self.steps = 20 * size(width) // (STREAMS * TIME)
        self.record: dict[str, Any] = {"steps": self.steps, "found": {}}
        if save and self.file.exists():
            kept = json.loads(self.file.read_text())
            if kept["steps"] != self.steps:
                raise ValueError(f"{self.file.name} has {kept['steps']} steps, not {self.steps}")
            self.record = kept
        self.found: dict[str, dict[str, float]] = self.record["found"]
        self.tuned: dict[str, Cell] = {}

    @cached_property
    def texts(self) -> list[Text]:
        return [read("*.py"), read("*.h")]

    def loss(self, cell: Cell) -> float | None:
        return self.found[str(cell)]["loss"] if str(cell) in self.found else None

    def best(self, cells: list[Cell]) -> Cell:
        return min(cells, key=lambda cell: self.found[str(cell)]["loss"])

    def measure(self, cells: list[Cell]) -> None:
        """At the same time."""
        begun = time.monotonic()
        every = side_by_side(trained, [(self.texts, self.width, self.steps, cell) for cell in cells])
        for cell, of in zip(cells, every, strict=True):
            self.found[str(cell)] = of
            print(
                f"{cell}: {of['loss']:.4f} (then {of['further']:.4f}), 1/{of['ratio']:.1f} of the bytes, "
                f"{time.monotonic() - begun:.0f} s",
                flush=True,
            )
        self.record["machine"] = machine()
        if self.save:
            write(self.file, self.record)


def widened(
    runs: Runs, like: Cell, rate: str, rates: Iterable[float], factor: float = 2.0
) -> Generator[list[Cell], None, Cell]:
    """Cells of these inner or outer rates, and of further ones until the best, which it returns, has two
    neighbours."""
    tried: list[Any] = list(rates)
    while True:
        cells = [like._replace(**{rate: x}) for x in tried]
        if missing := [cell for cell in cells if runs.loss(cell) is None]:
            yield missing
            continue
        best = runs.best(cells)
        of = getattr(best, rate)
        if of == min(tried):
            tried.append(of / factor)
        elif of == max(tried):
            tried.append(of * factor)
        else:
            return best


def local(runs: Runs, like: Cell, inner: bool) -> Iterator[list[Cell]]:
    """The outer rate of DiLoCo or SparseLoCo, and then, if `inner`, the inner one."""
    best = yield from widened(runs, like, "outer", OF_SPARSE if like.way == SPARSE else OUTER, 1.5)
    if inner:
        best = yield from widened(runs, best, "inner", [best.inner / 2, best.inner, best.inner * 2])
    runs.tuned[str(like)] = best


def shown(runs: Runs, table: str, ranks: list[int]) -> list[Cell]:
    """The rows of seed 0."""
    plain, most = runs.tuned[PLAIN], ranks[-1]
    sparse = runs.tuned[str(Cell(SPARSE, most, plain.inner))]
    if table == "ablation":
        return [plain, *(sparse._replace(way=way) for way in ABLATION)]
    if table == "hundredth":
        return [plain, *(Cell(way, most, plain.inner) for way in HUNDREDTH)]
    if table == "muon":
        own = runs.tuned[PLAIN + MUON]
        ours = [Cell(way + MUON, most, own.inner) for way in OURS]
        return [plain, own, runs.tuned[str(Cell(DILOCO + MUON, most, own.inner))], *ours]
    tuned = [runs.tuned[str(Cell(DILOCO, world, plain.inner))] for world in ranks]
    return [plain, *tuned, *(Cell(way, most, plain.inner) for way in OURS), sparse]


def plan(runs: Runs, ranks: list[int], seeds: int, tables: list[str]) -> Iterator[list[Cell]]:
    """The runs that are missing; those of a list need not wait for one another."""
    for table in tables:
        if table in ("rows", "muon"):
            muon = MUON if table == "muon" else ""
            plain = yield from widened(runs, Cell(PLAIN + muon, 0, 0.0), "inner", INNER)
            runs.tuned[plain.way] = plain
            for world in ranks if table == "rows" else ranks[-1:]:
                yield from local(runs, Cell(DILOCO + muon, world, plain.inner), table == "rows")
        yield from local(runs, Cell(SPARSE, ranks[-1], runs.tuned[PLAIN].inner), True)
        cells = shown(runs, table, ranks)
        every = [cell._replace(seed=seed) for seed in range(seeds) for cell in cells]
        yield [cell for cell in every if runs.loss(cell) is None]


def predicted(width: int, ranks: int) -> float:
    def law(of: int) -> float:
        a, power = LAW[of]
        return a * size(width) ** power

    return law(ranks) / law(0) - 1


def rows(runs: Runs, table: str, ranks: list[int], seeds: int) -> list[dict[str, Any]]:
    plain, out = runs.tuned[PLAIN], []
    for cell in shown(runs, table, ranks):
        mine, dense = ([runs.found[str(c._replace(seed=s))] for s in range(seeds)] for c in (cell, plain))
        more, further = (
            [100 * (x[of] / y[of] - 1) for x, y in zip(mine, dense, strict=True)]
            for of in ("loss", "further")
        )
        out.append(
            {
                "way": cell.way,
                "ranks": str(cell.ranks or ""),
                "inner, outer rate": f"{cell.inner:g}" + (f", {cell.outer:g}" if cell.outer else ""),
                "dense bytes / sent bytes": f"{runs.found[str(cell)]['ratio']:.1f}" if cell.ranks > 1 else "",
                "validation loss": f"{sum(x['loss'] for x in mine) / seeds:.4f}",
                "over plain DDP": f"{sum(more) / seeds:+.2f} %",
                "each seed": ", ".join(f"{x:+.2f}" for x in more),
                "trained further": f"{sum(further) / seeds:+.2f} %",
                "replicas apart": f"{100 * mine[0]['apart']:.2f} %" if cell.ranks else "",
                "law": f"{100 * predicted(runs.width, cell.ranks):+.1f} %" if cell.way == DILOCO else "",
            }
        )
    return out


def main(argv: list[str] | None = None) -> int:
    parser = command("bench_diloco", __doc__)
    add = parser.add_argument
    add("--width", type=int, default=96, help="of the model (default 96; 208: a million parameters)")
    add(
        "--ranks",
        type=int,
        nargs="+",
        default=[1, 4],
        help="of DiLoCo; the last also of sidcomp (default 1 4)",
    )
    add("--seeds", type=int, default=1, help="of the rows: 0, 1, ... (default 1)")
    add("--ablation", action="store_true", help="also SparseLoCo with one setting changed at a time")
    add("--hundredth", action="store_true", help="also updates at 1/100 with one setting changed at a time")
    add("--muon", action="store_true", help="also with Muon for the matrices")
    add("--minutes", type=float, default=math.inf, help="start no run after so many minutes")
    add("--save", action="store_true", help="keep the results in benchmarks/results")
    args = parser.parse_args(argv)
    if unknown := [n for n in args.ranks if n not in LAW or not n]:
        parser.error(f"--ranks {unknown[0]}: the law is known of {', '.join(str(n) for n in LAW if n)}")
    runs, begun = Runs(args.width, args.save), time.monotonic()
    tables = [name for name in TABLES if name == "rows" or getattr(args, name)]
    for cells in plan(runs, args.ranks, args.seeds, tables):
        while cells:
            if time.monotonic() - begun > 60 * args.minutes:
                print("out of time; call it again to go on")
                return 0
            at_once = max(1, CORES // max(1, cells[0].ranks))
            now = [cell for cell in cells[:at_once] if cell.ranks == cells[0].ranks]
            runs.measure(now)
            cells = cells[len(now) :]
    note = (
        f"{size(args.width):,} parameters without embeddings, {runs.steps:,} steps of {STREAMS} x {TIME} "
        f"bytes, 20 a parameter. Every {EVERY} steps: DiLoCo and SparseLoCo. Law: arXiv:2503.09799 for this "
        "size. Over plain DDP: the mean of what each seed loses. "
        f"{len(runs.found)} runs, of which tuning took those of seed 0."
    )
    made = {name: rows(runs, name, args.ranks, args.seeds) for name in tables}
    for name, table in made.items():
        report("", TABLES[name], table, note, None)
    if args.save:
        write(runs.file, {**runs.record, "title": TABLES["rows"], "note": note, **made})
    return 0


if __name__ == "__main__":
    sys.exit(main())
