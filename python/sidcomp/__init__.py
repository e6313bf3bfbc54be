"""Gradient compression for PyTorch DDP.

    state = sidcomp.State("auto")
    sidcomp.register(ddp, state)

Importing this package needs neither torch nor numpy: parts that need torch are loaded when they are first
used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from sidcomp import errors
from sidcomp._core import version as __version__
from sidcomp.config.presets import names as presets
from sidcomp.config.registry import Codec, Parameter, codecs, exchanges, memories
from sidcomp.config.schedule import Schedule
from sidcomp.config.step_sizes import StepSizes, marsit_step_sizes
from sidcomp.doors.optimizer_check import check_optimizer
from sidcomp.errors import *  # noqa: F403
from sidcomp.notices import strict
from sidcomp.options import Options
from sidcomp.planner.fusion import evaluate, plan
from sidcomp.planner.profile import Profile
from sidcomp.standalone.compressor import Compressor
from sidcomp.standalone.loopback import Loopback
from sidcomp.standalone.simulation import Compute, Link, Simulation, simulate

# Pickles from before the modules moved into sub-packages contain these module names.
for _old, _of in (("schedule", Schedule), ("profile", Profile), ("registry", Codec)):
    sys.modules[f"sidcomp.{_old}"] = sys.modules[_of.__module__]

if TYPE_CHECKING:
    from sidcomp import fsdp
    from sidcomp.doors.backend.process_group import configure, process_group
    from sidcomp.doors.ddp import hook, register, rewrap
    from sidcomp.run import Run, compress
    from sidcomp.state import State, preset

_LAZY = {
    "Run": "sidcomp.run",
    "State": "sidcomp.state",
    "compress": "sidcomp.run",
    "configure": "sidcomp.doors.backend.process_group",
    "fsdp": "sidcomp.fsdp",
    "hook": "sidcomp.doors.ddp",
    "preset": "sidcomp.state",
    "process_group": "sidcomp.doors.backend.process_group",
    "register": "sidcomp.doors.ddp",
    "rewrap": "sidcomp.doors.ddp",
}

__all__ = [
    "Codec",
    "Compute",
    "Compressor",
    "Link",
    "Loopback",
    "Options",
    "Parameter",
    "Profile",
    "Run",
    "Schedule",
    "Simulation",
    "State",
    "StepSizes",
    "__version__",
    "check_optimizer",
    "codecs",
    "compress",
    "configure",
    "errors",
    "evaluate",
    "exchanges",
    "fsdp",
    "hook",
    "marsit_step_sizes",
    "memories",
    "plan",
    "preset",
    "presets",
    "process_group",
    "register",
    "rewrap",
    "simulate",
    "strict",
    *errors.__all__,
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
