"""`sidcomp bench`: this machine's codecs and collectives against one another."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from sidcomp.cli.common import Codecs, Json, codecs_of, refuse_plot, refuse_unwritable
from sidcomp.config.accuracy import CodecSpec
from sidcomp.errors import ArgumentError, SetupError, SidcompError
from sidcomp.planner.profile import Method, Profile, format_bytes
from sidcomp.standalone.assumed_profile import assumed_profile
from sidcomp.standalone.estimate import candidates
from sidcomp.standalone.model_shapes import Model, Parameter, read_model

_TENSORS = 16  # of the model that stands for one where none is given
_PATIENCE = 120  # seconds that ranks may take beside the budget, to start and to end
_MOST = 2**30  # bytes of gradient that are measured at most


def bench_command(
    ranks: Annotated[int, typer.Option(help="How many ranks this machine runs, one thread each.")] = 2,
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
        Path | None, typer.Option(help="Write a profile, for `sidcomp plan --profile` and State(profile=).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure encode, exchange and decode of codecs between ranks of this machine."""
    try:
        refuse_plot(plot)
        refuse_unwritable("--save", save)
        if not 2 <= ranks <= 64:
            raise ArgumentError(f"--ranks {ranks}: 2 to 64")
        if not 0 < seconds <= 3600:
            raise ArgumentError(f"--seconds {seconds}: more than 0, up to 3600")
        if not 0 < step_ms <= 1e6:
            raise ArgumentError(f"--step-ms {step_ms}: more than 0, up to 1000000")
        if find_spec("torch") is None:
            raise SetupError("measuring exchanges needs torch: pip install 'torch>=2.4'")
        codecs = codecs_of(codec)
        candidates(codecs)  # a codec that there is not is named before the ranks start
        shapes = read_model(model) if model is not None else _stand_in(mb)
        nbytes = min(_MOST, 4 * shapes.elements)
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("starting the ranks", total=1.0)

            def tell(what: str, spent: float) -> None:
                bar.update(task, description=what, completed=spent)

            found = measured(codecs, ranks, nbytes, seconds, tell)
        profile = assumed_profile(shapes, step_ms, ranks, found)
        if plot is not None:
            draw(profile.methods, _sizes(nbytes), ranks, plot)
        if save is not None:
            profile.save(save)
    except (SidcompError, ValueError, OSError) as e:
        raise typer.BadParameter(str(e)) from None
    if as_json:
        sizes = _sizes(nbytes)
        rows = [{"name": m.name, "exchange": m.exchange, "ms": _rows(m, sizes)} for m in profile.methods]
        print(json.dumps({"ranks": ranks, "measured_s": profile.measured_s, "methods": rows}, indent=1))
    else:
        show(profile, nbytes)
        if save is not None:
            print(
                f"{save}: the costs are measured; the model and its step of {step_ms:g} ms are "
                f"{'given' if model is not None else 'assumed'}"
            )


def _stand_in(mb: float) -> Model:
    """A model of equal tensors, where none is given."""
    if not 0.0625 <= mb <= _MOST / 2**20:
        raise ArgumentError(f"--mb {mb}: 0.0625 to {_MOST // 2**20}")
    n = int(mb * 2**18) // _TENSORS
    return Model(tuple(Parameter(f"layer{i}.weight", (n,), float(n)) for i in range(_TENSORS)), "assumed")


def measured(
    codecs: Sequence[CodecSpec], ranks: int, nbytes: int, seconds: float, tell: Callable[[str, float], None]
) -> dict[str, Any]:
    """What the ranks measure: starts them, and ends them whatever happens. Raises SetupError."""
    request = json.dumps({"codecs": list(codecs), "bytes": nbytes, "seconds": seconds})
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform.startswith("linux"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        errors = [stack.enter_context(Path(folder, str(rank)).open("w+")) for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "sidcomp.autotune.local_ranks",
                    str(rank), str(ranks), f"file://{folder}/store", request,
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


def show(profile: Profile, nbytes: int) -> None:
    """Prints a row for each method: the time of each size, and the stages of the largest."""
    sizes = _sizes(nbytes)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(box=SIMPLE_HEAD)
    heads = [format_bytes(size) for size in sizes]
    columns = ("method", "exchange", *heads, "encode", "exchange", "decode", "of dense")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    dense = sum(_stages(profile.methods[0], nbytes))
    for m in profile.methods:
        totals = [sum(_stages(m, size)) for size in sizes]
        times = (*totals, *_stages(m, nbytes))
        share = f"{totals[-1] / dense:.2f}" if dense else ""
        table.add_row(escape(m.name), m.exchange, *(f"{t:.3f}" for t in times), share)
    console.print(
        f"ms between {profile.world} ranks of this machine, a thread each, over Gloo; "
        f"measured in {profile.measured_s:.1f} s"
    )
    console.print(table)
    console.print(
        f"encode, exchange, decode, and the share of dense's time: those of {heads[-1]}. "
        "A real network is slower than this one: sidcomp estimate",
        soft_wrap=True,
    )


def draw(methods: Sequence[Method], sizes: Sequence[int], ranks: int, path: Path) -> None:
    """Time by size of the gradient for each method. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SetupError("a picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
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
    axis.set_title(f"Time to average a gradient between {ranks} ranks of one machine", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
