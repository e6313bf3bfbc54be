"""`sidcomp simulate`: what exchanges would cost on links of given speed."""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sidcomp.cli.common import Json, codec_names, count, grid, parameter_names, refuse_plot, settings_of
from sidcomp.errors import SidcompError
from sidcomp.standalone.simulation import Link, measure, simulate


def simulate_command(
    codec: Annotated[
        str, typer.Argument(help="One that `sidcomp codecs` lists.", autocompletion=codec_names)
    ] = "topk",
    elements: Annotated[
        int, typer.Option("-n", "--elements", parser=count, metavar="N", help="Of the gradient; 1e6 is one.")
    ] = 25_000_000,
    gbit: Annotated[float, typer.Option(help="Gbit/s of a node, each way.")] = 1.0,
    latency_us: Annotated[float, typer.Option(help="Of a round of messages.")] = 100.0,
    message_us: Annotated[float, typer.Option(help="Of each message, at its sender.")] = 0.0,
    ranks_per_node: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Ranks that share a node's link.")
    ] = 1,
    node_gbit: Annotated[float, typer.Option(help="Gbit/s between ranks of a node.")] = 400.0,
    together: Annotated[
        float, typer.Option(help="Share of the link for messages to several nodes at once.")
    ] = 1.0,
    param: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE of codec, memory or exchange; may be repeated.", autocompletion=parameter_names
        ),
    ] = None,
    measured: Annotated[
        bool, typer.Option("--measure", help="Add what encoding and decoding take on this machine.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw time by number of ranks into this file.")] = None,
    as_json: Json = False,
) -> None:
    """What each exchange would cost, for 2 to 4096 ranks."""
    try:
        parameters = _parameters_of(param or [])
        refuse_plot(plot)
        link = Link(gbit, latency_us, message_us, node_gbit, together=together)
        compute = measure(codec, **parameters) if measured else None
        found = simulate(
            elements, codec, link=link, compute=compute, ranks_per_node=ranks_per_node, **parameters
        )
        if plot is not None:
            found.plot(plot)
    except (SidcompError, ValueError, OSError) as e:
        raise typer.BadParameter(str(e)) from None
    if as_json:
        print(json.dumps([vars(r) for r in found.rows], indent=1))
        return
    names = found.names
    body = [
        [str(row["world"]), *(f"{row[n]:.4g}" if n in row else "" for n in names), row["best"]]
        for row in found.table()
    ]
    print(f"ms for {elements:,} elements of {codec}, {gbit:g} Gbit/s and {ranks_per_node} ranks a node")
    print(grid(("ranks", *names, "fastest"), *body))


def _parameters_of(pairs: Sequence[str]) -> dict[str, Any]:
    """["density=0.1", "memory=none"] as keyword arguments of simulate(); raises ValueError."""
    own = set(inspect.signature(simulate).parameters) - {"memory", "parameters"}
    parameters = settings_of(pairs, "--param")
    for name in parameters:
        if name in own:
            raise ValueError(f"--param {name}: no codec, memory or exchange has it; see --help for options")
    return parameters
