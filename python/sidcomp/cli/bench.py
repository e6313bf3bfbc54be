"""`sidcomp bench`: codecs and collectives against one another, between ranks of this machine or those that
torchrun has started."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from sidcomp import files
from sidcomp.cli.common import (
    Codecs,
    Json,
    codecs_of,
    count,
    empty_table,
    refuse_plot,
    refuse_unwritable,
    wide_console,
)
from sidcomp.config.kinds import from_environment
from sidcomp.errors import ArgumentError, SetupError, SidcompError
from sidcomp.planner.cost_curve import Spread
from sidcomp.planner.profile import Method, Profile, format_bytes, parse_method
from sidcomp.standalone.assumed_profile import assumed_profile
from sidcomp.standalone.estimate import candidates
from sidcomp.standalone.model_shapes import Model, Parameter, read_model

_TENSORS = 16  # of the model that stands for one where none is given
_RANKS = 2  # where nothing says how many
_PATIENCE = 120  # seconds that ranks may take beside the budget, to start and to end
_MOST = 2**30  # bytes of gradient that are measured at most


def bench_command(
    ranks: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="N",
            help="How many ranks this machine runs, one thread each (2). Under torchrun: its ranks.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure.")] = 10.0,
    mb: Annotated[float, typer.Option(help="MB of the largest gradient, if no model is given.")] = 16.0,
    codec: Codecs = None,
    model: Annotated[
        str | None, typer.Option(help="A model as `sidcomp estimate` takes it, for the profile.")
    ] = None,
    step_ms: Annotated[
        float, typer.Option(help="Milliseconds of a step without communication, for the profile.")
    ] = 100.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time by size of the gradient into this file.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write a profile, for `estimate --link`, `plan --profile` and State(profile=)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure encode, exchange and decode of codecs between ranks of this machine, or of a network.

    Between hosts: torchrun --nnodes 2 --nproc-per-node 1 ... -m sidcomp bench
    """
    try:
        place = _place(ranks)
        if place.rank == 0:
            refuse_plot(plot)
            refuse_unwritable("--save", save)
        _check(seconds, step_ms)
        codecs = codecs_of(codec)
        candidates(codecs)  # a codec that there is not is named before the ranks start
        shapes = read_model(model) if model is not None else _stand_in(mb)
        nbytes = min(_MOST, 4 * shapes.elements)
        found = _measure(place, {"codecs": codecs, "bytes": nbytes, "seconds": seconds})
        if place.rank:
            return
        profile = assumed_profile(shapes, step_ms, place.ranks, found)
        spreads = _spreads([[parse_method(m) for m in part] for part in found["parts"]], nbytes)
        if save is not None:  # first: nothing that fails later costs the measurement
            profile.save(save)
        if plot is not None:
            draw(profile.methods, _sizes(nbytes), profile.world, plot)
    except (SidcompError, ValueError, OSError) as e:
        raise typer.BadParameter(str(e)) from None
    if as_json:
        print(json.dumps(_plain(profile, spreads, nbytes), indent=1))
        return
    show(profile, spreads, nbytes, place.where)
    if save is not None:
        known = "given" if model is not None else "assumed"
        print(f"{save}: the costs are measured; the model and its step of {step_ms:g} ms are {known}")


def _check(seconds: float, step_ms: float) -> None:
    if not 0 < seconds <= 3600:
        raise ArgumentError(f"--seconds {seconds}: more than 0, up to 3600")
    if not 0 < step_ms <= 1e6:
        raise ArgumentError(f"--step-ms {step_ms}: more than 0, up to 1000000")
    if find_spec("torch") is None:
        raise SetupError("measuring exchanges needs torch: pip install 'torch>=2.4'")


class Place(NamedTuple):
    """Which of the ranks this process is. started: torchrun has started all of them; else this one starts
    them, and is none itself."""

    rank: int
    ranks: int
    where: str
    started: bool


_HERE = "this machine"


def _place(asked: int | None) -> Place:
    """Raises ArgumentError."""
    ranks, hosts = (from_environment(name, 1) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"))
    if ranks > 1 and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        if asked not in (None, ranks):
            raise ArgumentError(f"--ranks {asked}: torchrun has started {ranks} ranks; leave --ranks out")
        where = f"{hosts} hosts" if hosts > 1 else "one host"
        return Place(from_environment("RANK", 0), ranks, where, started=True)
    ranks = _RANKS if asked is None else asked
    if not 2 <= ranks <= 64:
        raise ArgumentError(f"--ranks {ranks}: 2 to 64")
    return Place(0, ranks, _HERE, started=False)


def _measure(place: Place, request: dict[str, Any]) -> dict[str, Any]:
    """Returns what the ranks measure. Rank 0 shows a progress bar on a terminal meanwhile."""
    silent = place.rank > 0 or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), disable=silent) as bar:
        task = bar.add_task("starting the ranks", total=1.0)

        def tell(what: str, spent: float) -> None:
            bar.update(task, description=what, completed=spent)

        if not place.started:
            return measured(request, place.ranks, tell)
        from sidcomp.autotune import local_ranks

        return local_ranks.run(place.rank, place.ranks, "env://", request, tell)


def _stand_in(mb: float) -> Model:
    """A model of equal tensors, where none is given."""
    if not 0.0625 <= mb <= _MOST / 2**20:
        raise ArgumentError(f"--mb {mb}: 0.0625 to {_MOST // 2**20}")
    n = int(mb * 2**18) // _TENSORS
    return Model(tuple(Parameter(f"layer{i}.weight", (n,), float(n)) for i in range(_TENSORS)), "assumed")


def measured(request: dict[str, Any], ranks: int, tell: Callable[[str, float], None]) -> dict[str, Any]:
    """Starts the ranks, returns what they measure, and ends them whatever happens. Raises SetupError."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform.startswith("linux"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        errors = [stack.enter_context(Path(folder, str(rank)).open("w+")) for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "sidcomp.autotune.local_ranks",
                    str(rank), str(ranks), f"file://{folder}/store", json.dumps(request),
                ],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=errors[rank],
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        found: dict[str, Any] | None = None
        try:
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                with suppress(json.JSONDecodeError):  # a library's own output
                    said = json.loads(line)
                    if not isinstance(said, dict):
                        continue
                    if "next" in said:
                        tell(said["next"], said["spent"])
                    found = said.get("found", found)
            for process in processes:
                process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            raise SetupError("a rank does not end: is the machine overloaded? give fewer --ranks") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
            if processes[0].stdout is not None:
                processes[0].stdout.close()
        if found is None:
            raise SetupError(f"the ranks could not measure: {_reason(errors)}")
        return found


def _reason(errors: Sequence[Any]) -> str:
    """The last line that the first failing rank wrote to stderr."""
    for file in errors:
        file.seek(0)
        lines = file.read().strip().splitlines()
        if lines:
            return str(lines[-1])
    return "they ended without a message; `sidcomp doctor --try` checks the machine"


def _sizes(nbytes: int) -> list[int]:
    """The sizes of the table: small, medium, and the largest."""
    return [*(size for size in (2**16, 2**20) if 2 * size <= nbytes), nbytes]


def _stages(m: Method, nbytes: int) -> list[float]:
    """Milliseconds of encode, exchange and decode. Dense is exchanged in its bucket, without a copy."""
    curves = (m.encode, m.exchange_curve, m.decode if m.encode is not None else None)
    return [curve.at(nbytes) / 1e9 if curve is not None else 0.0 for curve in curves]


def _rows(m: Method, sizes: Sequence[int]) -> list[dict[str, float]]:
    names = ("encode", "exchange", "decode")
    return [{"bytes": size, **dict(zip(names, _stages(m, size), strict=True))} for size in sizes]


def _spreads(parts: Sequence[Sequence[Method]], nbytes: int) -> dict[str, Spread]:
    """Each method's share of dense's time, by what more than half of the turns show."""
    shares: dict[str, list[float]] = {}
    for methods in parts:
        dense = sum(_stages(methods[0], nbytes))
        for m in methods[1:]:
            shares.setdefault(m.name, []).append(sum(_stages(m, nbytes)) / dense if dense else 0.0)
    return {name: Spread(min(all_), max(all_)) for name, all_ in shares.items()}


def _plain(profile: Profile, spreads: Mapping[str, Spread], nbytes: int) -> dict[str, Any]:
    sizes = _sizes(nbytes)
    rows = [
        {
            "name": m.name,
            "exchange": m.exchange,
            "ms": _rows(m, sizes),
            "of_dense": list(spreads.get(m.name, (1.0, 1.0))),
        }
        for m in profile.methods
    ]
    return {"ranks": profile.world, "measured_s": profile.measured_s, "methods": rows}


def show(profile: Profile, spreads: Mapping[str, Spread], nbytes: int, where: str) -> None:
    """Prints a row for each method: the time of each size, and the stages of the largest."""
    sizes = _sizes(nbytes)
    console = wide_console()
    heads = [format_bytes(size) for size in sizes]
    columns = ("method", "exchange", *heads, "encode", "exchange", "decode", "of dense", "spread")
    table = empty_table(columns, left=range(2))
    dense = sum(_stages(profile.methods[0], nbytes))
    for m in profile.methods:
        totals = [sum(_stages(m, size)) for size in sizes]
        times = (*totals, *_stages(m, nbytes))
        share = f"{totals[-1] / dense:.2f}" if dense else ""
        spread = "{:.2f} to {:.2f}".format(*spreads[m.name]) if m.name in spreads else ""
        table.add_row(escape(m.name), m.exchange, *(f"{t:.3f}" for t in times), share, spread)
    console.print(
        f"ms between {profile.world} ranks of {where}, over Gloo, with little disturbance: the first decile; "
        f"measured in {profile.measured_s:.1f} s",
        soft_wrap=True,
    )
    console.print(table)
    note = (
        f"encode, exchange, decode, and the share of dense's time: those of {heads[-1]}; spread: the least "
        "and the most that any choice of more than half of the interleaved turns shows"
    )
    if where == _HERE:
        note += ". A real network is slower than this one: start it there with torchrun, or sidcomp estimate"
    console.print(note, soft_wrap=True)
    if wide := [name for name, spread in spreads.items() if spread.wide]:
        console.print(
            escape(
                f"too wide a spread to conclude from: {', '.join(wide)}. Something else used the machine "
                "or the network: measure again, or longer with --seconds"
            ),
            soft_wrap=True,
        )


def draw(methods: Sequence[Method], sizes: Sequence[int], ranks: int, path: Path) -> None:
    """Time by size of the gradient for each method."""
    figure = files.blank_picture(8, 5)
    axis = figure.subplots()
    top = sizes[-1]
    at = sorted({max(1, top // 4**i) for i in range(8)})
    for i, m in enumerate(methods):
        style: dict[str, Any] = {"color": "black", "ls": "--"} if i == 0 else {"marker": "os^vDP*X"[i % 8]}
        axis.plot(at, [sum(_stages(m, x)) for x in at], ms=5, label=m.name, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(at, [format_bytes(x) for x in at])
    axis.set_xlabel("gradient")
    axis.set_ylabel("ms of encode, exchange and decode")
    axis.set_title(f"Time to average a gradient between {ranks} ranks", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    files.picture(path, figure)
