"""`sidcomp estimate`: would compression help, before a script is touched."""

import json
import sys
from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sidcomp.cli.common import Codecs, Json, codecs_of, gbit_of
from sidcomp.config.accuracy import CodecSpec
from sidcomp.errors import SidcompError
from sidcomp.standalone.estimate import GPU, Estimate, Way, candidates, estimate
from sidcomp.standalone.model_shapes import Model, read_model
from sidcomp.standalone.simulation import DENSE, Compute, Link, measure


class Device(str, Enum):
    """Where codecs run."""

    cpu = "cpu"
    gpu = "gpu"


def estimate_command(
    model: Annotated[
        str,
        typer.Option(help="parameters.json, a Hugging Face config.json, torchvision:NAME or timm:NAME."),
    ],
    link: Annotated[str, typer.Option(help="The network of a node, each way: 10gbit, 100mbit.")],
    ranks: Annotated[int, typer.Option(help="How many ranks train together.")],
    step_ms: Annotated[
        float, typer.Option(help="Milliseconds of a step of one rank alone, without communication.")
    ],
    latency_us: Annotated[float, typer.Option(help="Of a round of messages.")] = 50.0,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks that share a node's link.")] = 1,
    node_gbit: Annotated[float, typer.Option(help="Gbit/s between ranks of a node.")] = 400.0,
    codec: Codecs = None,
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
        found = estimate(shapes, ranks, step_ms, speed, compute, codecs, ranks_per_node)
    except (SidcompError, ValueError, OSError) as e:
        raise typer.BadParameter(str(e)) from None
    notes = assumptions(shapes, found, compute, device)
    if as_json:
        plain = {**asdict(found), "gains": found.gains, "sentence": found.sentence, "assumed": notes}
        print(json.dumps(plain, indent=1))
    else:
        show(model, found, notes)


def _compute(needed: dict[str, CodecSpec], device: Device) -> dict[str, Compute]:
    if device is Device.gpu:
        return dict.fromkeys(needed, GPU)
    return {label: measure(name, **parameters) for label, (name, parameters) in needed.items()}


def assumptions(model: Model, found: Estimate, compute: dict[str, Compute], device: Device) -> list[str]:
    """What the prediction takes for granted, a sentence each."""
    if device is Device.gpu:
        speed = (
            f"codecs on a GPU: encode {GPU.encode_ns:g} and decode {GPU.decode_ns:g} ns an element, "
            "for every codec; not measured"
        )
    else:
        costs = ", ".join(
            f"{k.split()[0]} {c.encode_ns:.2g} and {c.decode_ns:.2g}" for k, c in compute.items()
        )
        speed = f"codecs on one thread of this machine, measured: encode and decode, ns an element: {costs}"
    return [
        f"model: {model.about}",
        "gradients in float32; a third of the computation is forward, two thirds are backward",
        speed,
        f"network: {found.link.gbit:g} Gbit/s and {found.link.latency_us:g} us a round, not shared with "
        "others; exchanges take no computing time of their own",
        'table: over the buckets of DDP, 25 MB each; State("auto") plans its groups',
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
    for column in ("codec", "exchange", "MB a rank sends", "ms a step", "speed-up"):
        left = column in ("codec", "exchange")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    dense = Way("plain DDP", DENSE, "allreduce", found.dense_bytes, found.dense_ms, 1.0)
    for way in (dense, *found.ways):
        table.add_row(*_cells(way, way.name, way.exchange))
    table.add_row(*_cells(found.auto, 'State("auto")', found.auto.exchange))
    console.print(table)
    line(f'State("auto") would send in {found.groups} groups: {found.auto.name}')
    for label, why in found.refused.items():
        line(f"left out: {label}: {why}")
    line("This is a model, not a measurement. It assumes:")
    for note in notes:
        line(f"  {note}")
    console.print()
    line(found.sentence)


def _cells(way: Way, name: str, exchange: str) -> tuple[str, ...]:
    return escape(name), exchange, f"{way.bytes / 1e6:.2f}", f"{way.step_ms:.4g}", f"{way.speedup:.2f}"
