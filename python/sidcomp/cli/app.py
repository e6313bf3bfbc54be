"""The command `sidcomp`: its commands, one module each, and how it ends. None needs torch to start."""

import errno
import os
import sys
from typing import Annotated

import typer

from sidcomp import core as _core
from sidcomp.cli.bench import bench_command
from sidcomp.cli.codecs import codecs_command
from sidcomp.cli.doctor import doctor_command
from sidcomp.cli.estimate import estimate_command
from sidcomp.cli.plan import plan_command
from sidcomp.cli.simulate import simulate_command
from sidcomp.errors import SidcompError

app = typer.Typer(
    help="Gradient compression for PyTorch DDP: what there is, and what works on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(show: bool) -> None:
    if show:
        print(_core.version)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


for _name, _command in (
    ("bench", bench_command),
    ("codecs", codecs_command),
    ("doctor", doctor_command),
    ("estimate", estimate_command),
    ("plan", plan_command),
    ("simulate", simulate_command),
):
    app.command(_name)(_command)


def main() -> None:
    """The command. Whatever is wrong with what it was given, or with where it writes, is one line."""
    try:
        app()
    except (SidcompError, ValueError, OSError, MemoryError, RecursionError) as e:
        sys.exit(f"Error: {_one_line(e)}")
    finally:
        try:
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()
        except OSError as e:  # a full disk; click ends quietly where a pipe has no reader
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries once more when it ends
            if e.errno != errno.EPIPE:
                sys.exit(f"Error: {_one_line(e)}")


def _one_line(e: BaseException) -> str:
    return " ".join(str(e).split()) or type(e).__name__
