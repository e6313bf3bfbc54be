"""Gradient compression for PyTorch that plans itself.

    run = sidcomp.compress(model, optimizer)  # the training loop does not change

Importing this package needs neither torch nor numpy: parts that need torch are loaded when they are first
used. Planning without a run is in `sidcomp.planner`, simulated networks and ranks in `sidcomp.simulation`,
deltas of weights in `sidcomp.delta`, FSDP2's other collectives in `sidcomp.fsdp`, the process-group backend
in `sidcomp.backend`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sidcomp import errors, planner, simulation
from sidcomp._core import version as __version__
from sidcomp.config.presets import names as presets
from sidcomp.config.registry import codecs, exchanges, memories
from sidcomp.config.schedule import Schedule
from sidcomp.errors import *  # noqa: F403
from sidcomp.notices import strict
from sidcomp.options import Options
from sidcomp.standalone.compressor import Compressor

if TYPE_CHECKING:
    from sidcomp import backend as backend
    from sidcomp import delta as delta
    from sidcomp import fsdp as fsdp
    from sidcomp.doors.ddp import hook
    from sidcomp.run import Run, compress
    from sidcomp.state import State, preset

_LAZY = {
    "Run": "sidcomp.run",
    "State": "sidcomp.state",
    "backend": "sidcomp.backend",
    "compress": "sidcomp.run",
    "delta": "sidcomp.delta",
    "fsdp": "sidcomp.fsdp",
    "hook": "sidcomp.doors.ddp",
    "preset": "sidcomp.state",
}

__all__ = [
    "Compressor",
    "Options",
    "Run",
    "Schedule",
    "State",
    "__version__",
    "codecs",
    "compress",
    "errors",
    "exchanges",
    "hook",
    "memories",
    "planner",
    "preset",
    "presets",
    "simulation",
    "strict",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'sidcomp' has no attribute {name!r}")
    try:
        home = import_module(_LAZY[name])
    except ModuleNotFoundError as e:
        if e.name == "torch":
            raise ImportError(
                f"sidcomp.{name} needs PyTorch (2.4 or newer): pip install torch", name="torch"
            ) from e
        raise
    value: object = home if _LAZY[name] == f"sidcomp.{name}" else getattr(home, name)
    globals()[name] = value
    return value
