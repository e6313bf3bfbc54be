"""`sidcomp estimate`: would compression help, before a script is touched."""

import json
import sys
from dataclasses import asdict, replace
from enum import Enum
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sidcomp.cli.common import Codecs, Json, codecs_of, count, gbit_of
from sidcomp.config.accuracy import CodecSpec
from sidcomp.errors import SidcompError
from sidcomp.planner.cost_curve import Spread
from sidcomp.standalone.estimate import GPU, OPTIMIZERS, Estimate, Way, candidates, estimate
from sidcomp.standalone.model_shapes import Model, read_model
from sidcomp.standalone.simulation import DENSE, Link, Measured, measure_all


class Optimizer(str, Enum):
    """For which State("auto") chooses among other codecs."""

    sgd = "SGD"
    adam = "Adam"


class Device(str, Enum):
    """The device on which codecs run."""

    cpu = "cpu"
    gpu = "gpu"


def estimate_command(
    model: Annotated[
        str,
        typer.Option(help="parameters.json, a Hugging Face config.json, torchvision:NAME or timm:NAME."),
    ],
    link: Annotated[str, typer.Option(help="The network of a node, each way: 10gbit, 100mbit.")],
    ranks: Annotated[int, typer.Option(parser=count, metavar="N", help="How many ranks train together.")],
    step_ms: Annotated[
        float, typer.Option(help="Milliseconds of a step of one rank alone, without communication.")
    ],
    latency_us: Annotated[float, typer.Option(help="Of a round of messages.")] = 50.0,
    ranks_per_node: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Ranks that share a node's link.")
    ] = 1,
    node_gbit: Annotated[float, typer.Option(help="Gbit/s between ranks of a node.")] = 400.0,
    codec: Codecs = None,
    optimizer: Annotated[
        Optimizer | None,
        typer.Option(
            case_sensitive=False,
            help='What trains, which decides what State("auto") may choose: Adam stands for AdamW and all '
            "with two betas, SGD for the others. Without it: both.",
        ),
    ] = None,
    every: Annotated[
        int,
        typer.Option(parser=count, metavar="N", help="Steps between two exchanges of updates."),
    ] = 30,
    device: Annotated[
        Device,
        typer.Option(help="Where codecs run. cpu: their speed is measured here; gpu: it is assumed."),
    ] = Device.cpu,
    as_json: Json = False,
) -> None:
    """Predict whether compression would help, for a model and a network that need not be here."""
    try:
        speed = Link(gbit_of(link), latency_us, 0.0, node_gbit)
        shapes, codecs = read_model(model), codecs_of(codec)
        compute = _compute(candidates(codecs), device)
        optimizers = list(OPTIMIZERS) if optimizer is None else [optimizer.value]
        found = estimate(shapes, ranks, step_ms, speed, compute, codecs, ranks_per_node, optimizers, every)
    except (SidcompError, ValueError, OSError) as e:
        raise typer.BadParameter(str(e)) from None
    notes = assumptions(shapes, found, compute, device)
    if as_json:
        gains = {name: auto.gains for name, auto in found.auto.items()}
        plain = {**asdict(found), "gains": gains, "sentence": found.sentence, "assumed": notes}
        print(json.dumps(plain, indent=1))
    else:
        show(model, found, notes)


def _compute(needed: dict[str, CodecSpec], device: Device) -> dict[str, Measured]:
    if device is Device.gpu:
        return dict.fromkeys(needed, Measured.assumed(GPU))
    return measure_all(needed)


def assumptions(model: Model, found: Estimate, compute: dict[str, Measured], device: Device) -> list[str]:
    """Returns the assumptions of the prediction, a sentence each."""
    if device is Device.gpu:
        speed = (
            f"codecs on a GPU: encode {GPU.encode_ns:g} and decode {GPU.decode_ns:g} ns an element, and "
            f"{GPU.encode_us + GPU.decode_us:g} us a group for their launches, for every codec; not measured"
        )
    else:
        costs = "; ".join(
            f"{k}: {c.compute.encode_ns:.2g} and {c.compute.decode_ns:.2g}" for k, c in compute.items()
        )
        speed = (
            "codecs on one thread of this machine, measured in turns; spread: by the most and by the least "
            f"that more than half of the turns show; encode and decode, ns an element: {costs}"
        )
    return [
        f"model: {model.about}",
        "gradients in float32; a third of the computation is forward, two thirds are backward",
        speed,
        f"network: {found.link.gbit:g} Gbit/s and {found.link.latency_us:g} us a round, not shared with "
        "others; exchanges take no computing time of their own",
        'codecs: in the hook, over the buckets of DDP, 25 MB each; State("auto") plans its groups, and takes '
        "a codec only with an optimizer with which it was measured to keep the loss (docs/results.md)",
        "local training: the exchange overlaps with nothing (delay=0), and what is computed "
        "beside the codec is not counted; updates train otherwise than DDP's gradients",
        "accuracy is not predicted",
    ]


def show(name: str, found: Estimate, notes: list[str]) -> None:
    """Prints the prediction: two lines, a table, what was assumed, and the sentence that answers."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)

    def line(text: str) -> None:
        console.print(escape(text), soft_wrap=True)

    line(f"{name}: {found.elements:,} parameters in {found.tensors} tensors; {found.ranks} ranks")
    line(f"without communication {found.ceiling_ms:.4g} ms a step, plain DDP {found.dense_ms:.4g} ms")
    table = Table(box=SIMPLE_HEAD)
    left = ("codec", "exchange", "auto takes it")
    for column in (*left[:2], "MB a rank sends", "ms a step", "speed-up", "spread", left[2]):
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    plain = Way("plain DDP", DENSE, "allreduce", found.dense_bytes, found.dense_ms, 1.0, Spread(1.0, 1.0))
    table.add_row(*_cells(plain))
    every = [*found.ways, *(_named(name, auto.way) for name, auto in found.auto.items()), *found.local]
    for way in every:
        chosen = ", ".join(f"with {name}" for name in way.auto_with)
        table.add_row(*_cells(way), (chosen or "no") if way in found.ways else "")
    console.print(table)
    for name, auto in found.auto.items():
        line(f'State("auto") with {name} would send in {auto.groups} groups: {auto.way.name}')
    for label, why in found.refused.items():
        line(f"left out: {label}: {why}")
    line("This is a model, not a measurement. It assumes:")
    for note in notes:
        line(f"  {note}")
    if wide := [way.name for way in every if way.spread.wide]:
        line(
            f"Too wide a spread to conclude from: {', '.join(wide)}. Something else used this machine while "
            "the codecs were measured: measure again"
        )
    console.print()
    line(found.sentence)


def _named(optimizer: str, way: Way) -> Way:
    return replace(way, name=f'State("auto") with {optimizer}')


def _cells(way: Way) -> tuple[str, ...]:
    least, most = way.spread
    spread = f"{least:.2f} to {most:.2f}" if most > least else ""
    sent = f"{way.bytes / 1e6:.2f}"
    return escape(way.name), way.exchange, sent, f"{way.step_ms:.4g}", f"{way.speedup:.2f}", spread
