"""The settings of the backend "sidcomp": what it compresses, and how. `configure` or SIDCOMP gives them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from sidcomp.config import accuracy as accuracy_of
from sidcomp.config import specification
from sidcomp.config.grouping import UNITS
from sidcomp.config.kinds import is_list
from sidcomp.config.policy import by_size
from sidcomp.errors import ArgumentError, ParameterError
from sidcomp.state import State

BACKEND = "sidcomp"
VARIABLE = "SIDCOMP"
# Names of the mesh dimensions over which PyTorch, torchtitan and others average gradients.
REPLICAS = ("replicate", "dp_replicate", "ddp", "dp", "data_parallel")


@dataclass(frozen=True)
class Configuration:
    """codec: None for State's default, or "off"; arguments: of State; groups: names of mesh dimensions whose
    groups compress, None for the usual ones; min_bytes: smaller tensors pass uncompressed; outside: also
    all-reduces between a backward pass and the optimizer's step are compressed."""

    codec: str | None
    arguments: dict[str, Any]
    groups: tuple[str, ...] | None
    min_bytes: int
    outside: bool = False

    def state(self, process_group: dist.ProcessGroup | None = None) -> State:
        made = State(self.codec, process_group=process_group, **self.arguments)
        made._finalizer.detach()  # the process group says itself what becomes of it
        made.engine.announced = True
        return made

    def lines(self) -> list[str]:
        """Returns the settings that must be equal on all ranks: a line for each, with its value."""
        own = {} if self.codec == "off" else self.state().settings.saved()
        own = {"codec": "off", **own, "groups": sorted(self.groups or ()) or "the usual ones"}
        for name in ("min_bytes", "outside"):
            own[name] = getattr(self, name)
        return [f"{name} {value}" for name, value in own.items()]

    def costs(self) -> accuracy_of.Measured | None:
        """The codec, if nobody named it and it costs more beside Adam than the accuracy that was asked for
        allows."""
        if self.codec == "off":
            return None
        own = self.state().settings
        return accuracy_of.costly(own.accuracy, own.auto) if own.free else None


_configured: Configuration | None = None


def configure(
    codec: str | None = None,
    *,
    groups: str | Iterable[str] | None = None,
    min_bytes: int = 64 * 2**10,
    outside: bool = False,
    **arguments: Any,
) -> None:
    """Chooses what the backend "sidcomp" compresses, and how. Call it before init_process_group: it holds for
    process groups that are made from here on, and takes precedence over the environment variable SIDCOMP.

        sidcomp.backend.configure("topk", density=0.05)
        torch.distributed.init_process_group("cpu:sidcomp,cuda:sidcomp")

    codec, arguments    those of `State`; codec="off" compresses nothing. Each all-reduce is encoded for
                        itself, so the codec "auto", which plans groups, is refused. Tensors are flat and have
                        no parameter names, so rules in `exclude` and `policy` are about sizes only
    groups              the names of the process groups that compress: a mesh dimension's name, or a group's
                        `group_desc`. The default group always does. [None] "replicate", "dp_replicate",
                        "ddp", "dp" and "data_parallel". (This is not `groups` of a State.)
    min_bytes           [65536] smaller tensors pass uncompressed
    outside             [False] compress also what the program all-reduces after backward() and before the
                        optimizer's step, such as gradients that it flattens itself. A rank may skip
                        backward() and send zeros, but no step. A few numbers more are exchanged in each step

    Raises ArgumentError or ParameterError, which say what to change.
    """
    global _configured
    given: Any = (groups,) if isinstance(groups, str) else groups
    names = tuple(given) if is_list(given) else None
    if given is not None and (names is None or not all(isinstance(name, str) for name in names)):
        raise ArgumentError(f"groups={groups!r}: give a list of names of process groups, such as ['dp']")
    _configured = configuration_of(codec, names, min_bytes, arguments, outside)


def configuration_of(
    codec: str | None,
    groups: tuple[str, ...] | None,
    min_bytes: int,
    arguments: dict[str, Any],
    outside: bool,
) -> Configuration:
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 0:
        raise ArgumentError(f"min_bytes={min_bytes!r}: give a number of bytes, at least 0")
    if not isinstance(outside, bool):
        raise ArgumentError(f"outside={outside!r}: give True or False")
    if "process_group" in arguments:
        raise ArgumentError("process_group: the backend compresses on the group that it is; leave it out")
    chosen = Configuration(codec, arguments, groups, min_bytes, outside)
    if codec == "off" and outside:
        raise ArgumentError(
            "codec 'off' compresses nothing: leave outside out, or take the codec 'none', which leaves "
            "all-reduces as they are"
        )
    if codec != "off":
        settings = chosen.state().settings  # raises here, not in backward(), what is wrong with it
        if settings.planned or settings.groups not in ("bucket", "layer"):
            raise ArgumentError(
                f"the backend {BACKEND!r} encodes each all-reduce for itself, because its caller may wait "
                f"for it before the next one, so it cannot have groups={settings.groups!r}: name a codec and "
                "leave groups out, or use sidcomp.compress (DDP, FSDP2 and HSDP), "
                "which plan groups"
            )
        if settings.clip_gradient:
            raise ArgumentError(
                f"the backend {BACKEND!r} sees one all-reduce after the other, not a model's gradient: leave "
                "clip_gradient out, and use torch.nn.utils.clip_grad_norm_"
            )
        rules = [*settings.policy.exclude, *(rule for rule, _ in settings.policy.rules)]
        if not all(map(by_size, rules)):
            raise ArgumentError(
                f"the backend {BACKEND!r} sees flat tensors, without the names and the shapes that the rule "
                f"{next(r for r in rules if not by_size(r))!r} of exclude= or policy= asks for: give sizes, "
                "such as '<128KB', or use sidcomp.compress (DDP, FSDP2 and HSDP)"
            )
    return chosen


def current() -> Configuration:
    if _configured is not None:
        return _configured
    text = os.environ.get(VARIABLE, "")
    try:
        codec, arguments = specification.parse(text)
        groups = tuple(str(arguments.pop("only")).split("+")) if "only" in arguments else None
        min_bytes = _bytes(arguments.pop("min_bytes", "64KB"))
        outside = arguments.pop("outside", False)
        return configuration_of(codec, groups, min_bytes, arguments, outside)
    except (ArgumentError, ParameterError) as e:
        raise type(e)(f"environment variable {VARIABLE}={text!r}: {e}") from e


def _bytes(value: Any) -> Any:
    """A number of bytes, or a text such as 64KB."""
    text = str(value)
    for unit in sorted(UNITS, key=len, reverse=True):
        if text.endswith(unit) and text[: -len(unit)].isdigit():
            return int(text[: -len(unit)]) * UNITS[unit]
    return value
