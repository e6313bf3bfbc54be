"""What `configure` and the variable SIDCOMP say: what the backend "sidcomp" compresses, and how."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from sidcomp.config import accuracy as accuracy_of
from sidcomp.config import specification
from sidcomp.config.grouping import UNITS
from sidcomp.config.kinds import is_list
from sidcomp.config.policy import by_size, check_rule, fits
from sidcomp.config.registry import find_codec
from sidcomp.doors.fsdp import parameter_groups
from sidcomp.doors.fsdp.all_gather import AllGather, for_parameters
from sidcomp.doors.fsdp.reduce_scatter import ReduceScatter
from sidcomp.errors import ArgumentError, ParameterError, UnsupportedError
from sidcomp.state import State

BACKEND = "sidcomp"
VARIABLE = "SIDCOMP"
# Names of the mesh dimensions over which PyTorch, torchtitan and others average gradients.
REPLICAS = ("replicate", "dp_replicate", "ddp", "dp", "data_parallel")
# And of those over which they shard a model; the last one is FSDP2's own name for a second group.
SHARDS = ("shard", "dp_shard", "dp_shard_cp", "fsdp", "fsdp_reduce_scatter")


class Coding(NamedTuple):
    """How reduce-scatters, or all-gathers, are compressed. exclude: rules for parameters gathered as they
    are."""

    codec: str
    memory: str
    parameters: dict[str, Any]
    seed: int
    exclude: tuple[str | int, ...]

    def __str__(self) -> str:
        named = {**self.parameters, "memory": self.memory, "seed": self.seed, "exclude": self.exclude}
        return f"{self.codec}:{','.join(f'{k}={v}' for k, v in named.items())}"

    @property
    def lossless(self) -> bool:
        """There is nothing to compress."""
        codec = find_codec(self.codec)
        return codec.lossless and codec.linear

    def scatter(self, number: int) -> ReduceScatter:
        return ReduceScatter(self.codec, self.memory, self.parameters, self.seed, number)

    def gather(self, group: Any, number: int) -> AllGather:
        """group: one of FSDP2's parameter groups."""
        shapes = {str(i): tuple(p._orig_size) for i, p in enumerate(group.fsdp_params)}
        exact = {name for rule in self.exclude for name in fits(rule, shapes, {}, "exclude")}
        encoded = [name not in exact for name in shapes]
        return for_parameters(group.fsdp_params, encoded, self.codec, self.parameters, self.seed, number)


@dataclass(frozen=True)
class Configuration:
    """codec: None for State's default, or "off"; arguments: of State; groups: names of mesh dimensions whose
    groups compress, None for the usual ones; min_bytes: smaller tensors pass uncompressed; outside: also
    all-reduces between a backward pass and the optimizer's step are compressed."""

    codec: str | None
    arguments: dict[str, Any]
    groups: tuple[str, ...] | None
    min_bytes: int
    reduce_scatter: Coding | None = None
    all_gather: Coding | None = None
    outside: bool = False

    def state(self, process_group: dist.ProcessGroup | None = None) -> State:
        made = State(self.codec, process_group=process_group, **self.arguments)
        made._finalizer.detach()  # the process group says itself what becomes of it
        made._engine.announced = True
        return made

    def lines(self) -> list[str]:
        """What all ranks must have in common: each line a setting and its value."""
        own = {} if self.codec == "off" else self.state().settings.saved()
        own = {"codec": "off", **own, "groups": sorted(self.groups or ()) or "the usual ones"}
        for name in ("min_bytes", "reduce_scatter", "all_gather", "outside"):
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
    reduce_scatter: str | None = None,
    all_gather: str | None = None,
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
                        "ddp", "dp" and "data_parallel"; reduce-scatters and all-gathers also on "shard",
                        "dp_shard", "dp_shard_cp", "fsdp" and "fsdp_reduce_scatter". (This is not `groups` of
                        a State.)
    min_bytes           [65536] smaller tensors pass uncompressed: of a reduce-scatter the input, of an
                        all-gather the output
    reduce_scatter      [None] a codec for reduce-scatters of gradients, such as "int8", or with parameters,
                        "topk:density=0.1,memory=residual". Without memory= it keeps no residual, because one
                        takes 4 bytes for each element of the whole model on every rank
    all_gather          [None] a dense or quantized codec for FSDP2's all-gathers of parameters in forward and
                        backward passes, such as "int8" or "int8:exclude=1-D"
    outside             [False] compress also what the program all-reduces after backward() and before the
                        optimizer's step, such as gradients that it flattens itself

    reduce_scatter and all_gather are for tensors on the CPU so far, and all_gather needs PyTorch 2.13.

    Raises ArgumentError or ParameterError, which say what to change.
    """
    global _configured
    given: Any = (groups,) if isinstance(groups, str) else groups
    names = tuple(given) if is_list(given) else None
    if given is not None and (names is None or not all(isinstance(name, str) for name in names)):
        raise ArgumentError(f"groups={groups!r}: give a list of names of process groups, such as ['dp']")
    _configured = configuration_of(codec, names, min_bytes, arguments, reduce_scatter, all_gather, outside)


def configuration_of(
    codec: str | None,
    groups: tuple[str, ...] | None,
    min_bytes: int,
    arguments: dict[str, Any],
    reduce_scatter: str | None,
    all_gather: str | None,
    outside: bool,
) -> Configuration:
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 0:
        raise ArgumentError(f"min_bytes={min_bytes!r}: give a number of bytes, at least 0")
    if not isinstance(outside, bool):
        raise ArgumentError(f"outside={outside!r}: give True or False")
    if "process_group" in arguments:
        raise ArgumentError("process_group: the backend compresses on the group that it is; leave it out")
    chosen = Configuration(
        codec,
        arguments,
        groups,
        min_bytes,
        _coding("reduce_scatter", reduce_scatter),
        _coding("all_gather", all_gather),
        outside,
    )
    if codec == "off" and (chosen.reduce_scatter or chosen.all_gather or outside):
        raise ArgumentError(
            "codec 'off' compresses nothing: leave reduce_scatter, all_gather and outside out, or take the "
            "codec 'none', which leaves all-reduces as they are"
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


def _coding(what: str, text: Any) -> Coding | None:
    """Reads reduce_scatter= or all_gather=; in a text that itself has commas, + stands for them."""
    if text in (None, "off"):
        return None
    try:
        if not isinstance(text, str):
            raise ArgumentError("give a text: a codec, and its parameters after a colon")
        codec, arguments = specification.parse(text.replace("+", ","))
        if codec is None:
            raise ArgumentError("name a codec")
        memory = arguments.pop("memory", None) or "none"
        seed = arguments.pop("seed", 0)
        exclude: tuple[Any, ...] = ()
        if what == "all_gather":
            if memory != "none":
                raise ArgumentError("parameters have no memory: leave memory= out")
            memory, exclude = "none", _exclude(arguments.pop("exclude", None))
            parameter_groups.check()
            AllGather(codec, arguments, seed, 0, [], int)
        else:
            ReduceScatter(codec, memory, arguments, seed, 0)
            traits = find_codec(codec).traits
            if memory == "none" and "sparse" in traits and "unbiased" not in traits:
                raise ArgumentError(
                    f"without a memory, what {codec!r} does not send is lost: add memory=residual, which "
                    "takes 4 bytes for each element of the whole model on every rank"
                )
    except (ArgumentError, ParameterError, UnsupportedError) as e:
        raise type(e)(f"{what}={text!r}: {e}") from e
    return Coding(codec, memory, arguments, seed, exclude)


def _exclude(rule: Any) -> tuple[Any, ...]:
    if rule is None:
        return ()
    check_rule(rule, "exclude")
    if rule != "1-D" and not by_size(rule):
        raise ArgumentError(
            f"exclude={rule!r}: the backend knows sizes and shapes of parameters, not names: give '1-D' or "
            "a size, such as '<128KB', or use sidcomp.fsdp.compress_all_gather"
        )
    return (rule,)


def current() -> Configuration:
    if _configured is not None:
        return _configured
    text = os.environ.get(VARIABLE, "")
    try:
        codec, arguments = specification.parse(text)
        groups = tuple(str(arguments.pop("only")).split("+")) if "only" in arguments else None
        min_bytes = _bytes(arguments.pop("min_bytes", "64KB"))
        scatter, gather = (arguments.pop(name, None) for name in ("reduce_scatter", "all_gather"))
        outside = arguments.pop("outside", False)
        return configuration_of(codec, groups, min_bytes, arguments, scatter, gather, outside)
    except (ArgumentError, ParameterError) as e:
        raise type(e)(f"environment variable {VARIABLE}={text!r}: {e}") from e


def _bytes(value: Any) -> Any:
    """A number of bytes, or a text such as 64KB."""
    text = str(value)
    for unit in sorted(UNITS, key=len, reverse=True):
        if text.endswith(unit) and text[: -len(unit)].isdigit():
            return int(text[: -len(unit)]) * UNITS[unit]
    return value
