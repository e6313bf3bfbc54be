"""`sidcomp estimate`: would compression help, and how, before a script is touched."""

import json
from dataclasses import asdict, replace
from enum import Enum
from typing import Annotated

import typer
from rich.markup import escape

from sidcomp.cli.common import Codecs, Json, codecs_of, count, empty_table, link_of, percent, wide_console
from sidcomp.config.accuracy import CodecSpec, Loss
from sidcomp.config.grouping import counted
from sidcomp.errors import SidcompError
from sidcomp.planner.cost_curve import Spread
from sidcomp.standalone.estimate import GPU, GRADIENTS, OPTIMIZERS, Estimate, Way, candidates, estimate
from sidcomp.standalone.model_shapes import Model, read_model
from sidcomp.standalone.simulation import DENSE, Measured, measure_all


class Optimizer(str, Enum):
    """For which State("auto") chooses among other codecs."""

    sgd = "SGD"
    adam = "Adam"


class Device(str, Enum):
    """The device on which codecs run."""

    cpu = "cpu"
    gpu = "gpu"


Network = Annotated[
    str,
    typer.Option(
        help="The network of a node: 10gbit; 500mbit/110mbit down and up; or a profile that `sidcomp "
        "bench --save` has measured between the hosts."
    ),
]
Trains = Annotated[
    Optimizer | None,
    typer.Option(
        case_sensitive=False,
        help='What trains, which decides what State("auto") may choose: Adam stands for AdamW and all '
        "with two betas, SGD for the others. Without it: both.",
    ),
]


def estimate_command(
    model: Annotated[
        str,
        typer.Option(help="parameters.json, a Hugging Face config.json, torchvision:NAME or timm:NAME."),
    ],
    link: Network,
    ranks: Annotated[int, typer.Option(parser=count, metavar="N", help="How many ranks train together.")],
    step_ms: Annotated[
        float, typer.Option(help="Milliseconds of a step of one rank alone, without communication.")
    ],
    latency_us: Annotated[
        float | None, typer.Option(help="Of a round of messages (50, or what the profile shows).")
    ] = None,
    ranks_per_node: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Ranks that share a node's link.")
    ] = 1,
    node_gbit: Annotated[float, typer.Option(help="Gbit/s between ranks of a node.")] = 400.0,
    codec: Codecs = None,
    optimizer: Trains = None,
    loss_budget: Annotated[
        float,
        typer.Option(
            parser=percent, metavar="PERCENT", help="By how much the loss may end above plain DDP's."
        ),
    ] = 1.0,
    every: Annotated[
        int,
        typer.Option(
            parser=count,
            metavar="N",
            help="Steps between two exchanges of updates: uncompressed, and by each --codec.",
        ),
    ] = 30,
    device: Annotated[
        Device,
        typer.Option(help="Where codecs run. cpu: their speed is measured here; gpu: it is assumed."),
    ] = Device.cpu,
    as_json: Json = False,
) -> None:
    """Predict whether compression would help, for a model and a network that need not be here."""
    try:
        speed, origin = link_of(link, latency_us, node_gbit)
        shapes, codecs = read_model(model), codecs_of(codec)
        compute = _compute(candidates(codecs), device)
        optimizers = list(OPTIMIZERS) if optimizer is None else [optimizer.value]
        found = estimate(
            shapes, ranks, step_ms, speed, compute, codecs, ranks_per_node, optimizers, every, loss_budget,
            codecs if codec else (),
        )  # fmt: skip
    except (SidcompError, ValueError, OSError) as e:
        raise typer.BadParameter(str(e)) from None
    notes = assumptions(shapes, found, compute, device, origin)
    if as_json:
        plain = {**asdict(found), "sentence": found.sentence, "assumed": notes}
        print(json.dumps(plain, indent=1))
    else:
        show(model, found, notes)


def _compute(needed: dict[str, CodecSpec], device: Device) -> dict[str, Measured]:
    if device is Device.gpu:
        return dict.fromkeys(needed, Measured.assumed(GPU))
    return measure_all(needed)


def assumptions(
    model: Model, found: Estimate, compute: dict[str, Measured], device: Device, origin: str
) -> list[str]:
    """Returns the assumptions of the prediction, a sentence each. origin: of the link."""
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
        f"network: {found.link.gbit:.3g} Gbit/s and {found.link.latency_us:.3g} us a round, {origin}, not "
        "shared with others; exchanges take no computing time of their own",
        'gradients: in the hook, over the buckets of DDP, 25 MB each; "auto" plans its groups, and takes '
        "a codec only with an optimizer with which it was measured to keep the loss (docs/results.md)",
        "updates: the exchange overlaps with nothing (delay=0); beside the codec it passes over whole "
        "vectors, and the noise correction is not counted",
        "loss: over plain DDP's, the worst of the models that were measured, on the nearest number of ranks "
        "(docs/results.md); yours may differ. Nothing is said where none was measured",
    ]


def show(name: str, found: Estimate, notes: list[str]) -> None:
    """Prints the prediction: two lines, a table, what was assumed, and the sentence that answers."""
    console = wide_console()

    def line(text: str) -> None:
        console.print(escape(text), soft_wrap=True)

    line(f"{name}: {found.elements:,} parameters in {found.tensors} tensors; {found.ranks} ranks")
    line(f"without communication {found.ceiling_ms:.4g} ms a step, plain DDP {found.dense_ms:.4g} ms")
    columns = ("sends", "codec", "exchange", "every", "MB a rank sends", "ms a step", "speed-up", "spread")
    table = empty_table((*columns, *(f"loss, {name}" for name in found.choice)), left=range(3))
    usual = Spread(1.0, 1.0)
    plain = Way("plain DDP", GRADIENTS, DENSE, "allreduce", 1, found.dense_bytes, found.dense_ms, 1.0, usual)
    table.add_row(*_cells(plain, found))
    autos = [replace(auto.way, name=f"auto with {name}") for name, auto in found.auto.items()]
    every = [*found.ways, *autos, *found.local]
    for way in every:
        table.add_row(*_cells(way, found))
    console.print(table)
    for name, auto in found.auto.items():
        line(f'"auto" with {name} would send in {counted(auto.groups)}: {auto.way.name}')
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


def _cells(way: Way, found: Estimate) -> tuple[str, ...]:
    least, most = way.spread
    spread = f"{least:.2f} to {most:.2f}" if most > least else ""
    times = (f"{way.bytes / 1e6:.2f}", f"{way.step_ms:.4g}", f"{way.speedup:.2f}", spread)
    losses = (_loss(way.loss.get(name), found.ranks) for name in found.choice)
    return way.sends, escape(way.name), way.exchange, str(way.every), *times, *losses


def _loss(loss: Loss | None, ranks: int) -> str:
    if loss is None:
        return ""
    if not loss.ranks:
        return "rounding"
    return f"{loss.percent:+.1f} %" + (f" ({loss.ranks} ranks)" if loss.ranks != ranks else "")
