"""Gradient compression for PyTorch DDP.

    state = sidcomp.State(codec="topk", density=0.01)
    ddp.register_comm_hook(state, sidcomp.hook)

Importing this package needs neither torch nor numpy: what needs torch is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sidcomp import errors
from sidcomp._core import version as __version__
from sidcomp.compressor import Compressor
from sidcomp.errors import *  # noqa: F403
from sidcomp.loopback import Loopback
from sidcomp.optimizer import check_optimizer
from sidcomp.planning import evaluate, plan
from sidcomp.profile import Profile
from sidcomp.registry import Codec, Parameter, codecs, exchanges, memories
from sidcomp.schedule import Schedule
from sidcomp.simulate import Compute, Link, Simulation, simulate

if TYPE_CHECKING:
    from sidcomp.ddp import hook, register, rewrap
    from sidcomp.state import State

_LAZY = {
    "State": "sidcomp.state",
    "hook": "sidcomp.ddp",
    "register": "sidcomp.ddp",
    "rewrap": "sidcomp.ddp",
}

__all__ = [
    "Codec",
    "Compute",
    "Compressor",
    "Link",
    "Loopback",
    "Parameter",
    "Profile",
    "Schedule",
    "Simulation",
    "State",
    "__version__",
    "check_optimizer",
    "codecs",
    "errors",
    "evaluate",
    "exchanges",
    "hook",
    "memories",
    "plan",
    "register",
    "rewrap",
    "simulate",
    *errors.__all__,
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'sidcomp' has no attribute {name!r}")
    try:
        value: object = getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as e:
        if e.name == "torch":
            raise ImportError(
                f"sidcomp.{name} needs PyTorch (2.4 or newer): pip install torch", name="torch"
            ) from e
        raise
    globals()[name] = value
    return value
