"""What is compared: NAME[:GROUPS][+EXCHANGE][[KEY=VALUE;...]][@MB], and how each is attached to a model.

dense                   plain DDP, no hook
nothing                 DDP whose hook exchanges nothing: what DDP itself takes, its copies among them
fp16, powersgd          torch's own hooks; PowerSGD of rank 4, in one bucket
bf16-sum32              bf16 on the wire, float32 sums: bf16_wire.py
torch-topk              top-k of 1 % with error feedback by torch's operations: torch_topk.py;
                        torch-topk[density=0.001] another density
topk:GROUPS             a codec of sidcomp with its State(groups=GROUPS); topk alone: 25MB. powersgd:GROUPS is
                        ours, in as many buckets as there are. A density is 1 %
default:GROUPS          what State() has, its density too: auto's candidate beside dense and fp16
layer, even:8, mergecomp, cupcake
                        the default with these groups, as their papers choose them
+EXCHANGE               of a codec of sidcomp: how its payloads travel, as in marsit+ring1, topk:25MB+twoshot;
                        else by all-reduce, or by all-gather where they cannot be summed
auto                    State("auto"): groups, codecs and exchanges chosen
[KEY=VALUE;...]         further arguments of State: redsync[density=0.001], dgc:mergecomp[Y=3]@0; a Schedule
                        is written as dgc[density=0.25@0|0.01@36]
@MB                     DDP's bucket_cap_mb, @0 for a bucket of each tensor; DDP's own default unless given
DOOR/...                another door than DDP's hook, before any of these: pg/topk is DDP over the backend
                        "sidcomp", hsdp/dense plain HSDP on two replicas, hsdp/topk:bucket
                        sidcomp.fsdp.compress, and hsdp-pg/topk HSDP whose replicas average over the backend.
                        local/topk is updates without DDP, local/none the same uncompressed, and
                        hsdp-local/topk updates between the two replicas of HSDP
"""

import re
from typing import Any, NamedTuple

import sidcomp
import torch
import torch.distributed as dist
from sidcomp.config.grouping import PLANNED, parse_groups
from sidcomp.doors.ddp import register
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.netlab.bf16_wire import Bf16Wire
from benchmarks.netlab.torch_topk import TorchTopk

DOORS = ("pg", "hsdp", "hsdp-pg", "local", "hsdp-local")
# whose hooks are not sidcomp's
OF_TORCH = ("dense", "fp16", "powersgd", "bf16-sum32", "torch-topk", "nothing")
PAPERS = ("layer", "even", "mergecomp", "cupcake")
DENSITY = 0.01


class Hook(NamedTuple):
    name: str  # as given
    kind: str  # one of OF_TORCH, "auto", "default", or a codec of sidcomp
    groups: str
    bucket_mb: float | None
    exchange: str | None = None  # the process group's own
    arguments: tuple[tuple[str, Any], ...] = ()  # of State
    door: str = ""  # one of DOORS, or DDP's hook

    @property
    def ours(self) -> bool:
        return self.kind not in OF_TORCH or ":" in self.name or self.exchange is not None

    @property
    def of_updates(self) -> bool:
        """Whether rank.py calls sidcomp.compress, which needs the optimizer."""
        return self.door in ("local", "hsdp-local")

    @property
    def planned(self) -> bool:
        """Whether a controller measures and chooses during the first steps."""
        return self.kind == "auto" or self.groups in PLANNED

    def _holds_momentum(self, settings: dict[str, Any]) -> bool:
        own = next((c.memory for c in sidcomp.codecs() if c.name == self.kind), "residual")
        memory = settings.get("memory", own)
        parameters = next(m.parameters for m in sidcomp.memories() if m.name == memory)
        return any(p.name == "momentum" for p in parameters)

    def attach(
        self, module: nn.Module, momentum: float
    ) -> "tuple[nn.Module, sidcomp.State | Bf16Wire | TorchTopk | Backend | None]":
        """DDP around `module`, and what must be closed, if there is anything. momentum: the optimizer's,
        which a memory that holds the momentum takes over."""
        if self.door:
            return self._through_the_door(module, momentum)
        cap = 1024 if self.kind == "powersgd" and not self.ours else self.bucket_mb
        # The smallest cap there is still gives each bucket a tensor.
        buckets: dict[str, Any] = {} if cap is None else {"bucket_cap_mb": max(cap, 2**-20)}
        ddp = DistributedDataParallel(module, **buckets)
        if self.ours:
            state = self._state(momentum)
            register(ddp, state)
            return ddp, state
        if self.kind == "nothing":
            ddp.register_comm_hook(None, _nothing)
        elif self.kind == "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.kind == "powersgd":
            # One bucket: its hook waits for a second all-reduce inside a callback, and two buckets then
            # deadlock, or pair with each other's. From step 2 on: after the first, DDP orders it anew.
            kept = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            ddp.register_comm_hook(kept, powerSGD_hook.powerSGD_hook)
        elif self.kind == "bf16-sum32":
            wire = Bf16Wire()
            ddp.register_comm_hook(wire, Bf16Wire.hook)
            return ddp, wire
        elif self.kind == "torch-topk":
            topk = TorchTopk(dict(self.arguments).get("density", DENSITY))
            ddp.register_comm_hook(topk, TorchTopk.hook)
            return ddp, topk
        return ddp, None

    def _settings(self, momentum: float) -> dict[str, Any]:
        settings: dict[str, Any] = {} if self.kind == "auto" else {"groups": self.groups}
        if self.exchange is not None:
            settings["exchange"] = self.exchange
        elif self.kind in (c.name for c in sidcomp.codecs() if not c.linear):
            settings["exchange"] = "allgather"  # as in the papers, whatever the number of ranks
        if any(p.name == "density" for p in _parameters(self.kind)):
            settings["density"] = DENSITY
        settings |= dict(self.arguments)
        if "momentum" not in settings and self._holds_momentum(settings):
            settings["momentum"] = momentum
        return settings

    @property
    def _codec(self) -> str | None:
        return None if self.kind == "default" else self.kind

    def _state(self, momentum: float, group: dist.ProcessGroup | None = None) -> sidcomp.State:
        # warmup changes steps, not what they settle at
        return sidcomp.State(self._codec, warmup=0, process_group=group, **self._settings(momentum))

    def _backend(self, inner: dist.ProcessGroup, momentum: float) -> Any:
        settings = {**self._settings(momentum), "groups": "bucket"}
        return sidcomp.backend.process_group(inner, self._codec, min_bytes=1024, **settings)

    def _through_the_door(
        self, module: nn.Module, momentum: float
    ) -> "tuple[nn.Module, sidcomp.State | Backend | None]":
        if self.door == "pg":
            assert dist.group.WORLD is not None
            group = self._backend(dist.group.WORLD, momentum)
            return DistributedDataParallel(module, process_group=group), Backend(group)
        if self.door == "local":
            return module, self._state(momentum)
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
        group = None
        if self.door == "hsdp-pg":
            group = self._backend(mesh.get_group("replicate"), momentum)
            both = [group, mesh.get_group("shard")]
            mesh = DeviceMesh.from_group(both, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
        others = mesh.get_group("replicate")
        if self.of_updates:
            mesh = mesh["shard"]
        for layer in getattr(module, "blocks", module.children()):
            if any(p.numel() > 1024 for p in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        if group is not None or not self.ours:
            return module, Backend(group) if group is not None else None
        if self.of_updates:
            return module, self._state(momentum, others)
        state = self._state(momentum)
        sidcomp.fsdp.compress(module, state)
        return module, state


class Backend:
    """A process group of the backend "sidcomp", to be closed."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def close(self) -> None:
        for program in self.group.programs:
            if program.state is not None:
                program.state.close()


def _nothing(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _parameters(codec: str) -> Any:
    return next((c.parameters for c in sidcomp.codecs() if c.name == codec), ())


def parse(text: str) -> Hook:
    """Raises ValueError, which says what can be written."""
    door, slash, rest = text.partition("/")
    if slash:
        if door not in DOORS:
            raise ValueError(f"hook {text!r}: before / comes a door: {', '.join(DOORS)}")
        inner = parse(rest)
        if inner.bucket_mb is not None or (
            inner.kind in OF_TORCH and (inner.kind, door) != ("dense", "hsdp")
        ):
            raise ValueError(f"hook {text!r}: {door} takes hsdp/dense or a codec of sidcomp, without @")
        return inner._replace(name=text, door=door)
    found = re.fullmatch(r"([^\[\]@]*)(?:\[([^\[\]]+)\])?(?:(@)(.*))?", text)
    if not found:
        raise ValueError(f"hook {text!r}: write arguments as in dgc:mergecomp[Y=3;alpha=0.02]@0")
    body, arguments, at, cap = found[1], _arguments(text, found[2]), found[3], found[4]
    body, plus, exchange = body.partition("+")
    kind, colon, groups = body.partition(":")
    taken = {"density"} if kind == "torch-topk" else set()
    if kind in OF_TORCH and not colon and (extra := {key for key, _ in arguments} - taken):
        raise ValueError(f"hook {text!r}: {kind} takes no argument {min(extra)}")
    if at:
        try:
            bucket_mb = float(cap)
        except ValueError:
            raise ValueError(f"hook {text!r}: after @ comes a size in MB, as in {body}@4") from None
        torchs = kind == "powersgd" and not colon
        if not 0 <= bucket_mb < 1e6 or torchs:
            raise ValueError(f"hook {text!r}: {'PowerSGD needs one bucket' if torchs else 'no such size'}")
    else:
        bucket_mb = None
    if plus:
        if kind in (*PAPERS, "auto") or exchange not in [e.name for e in sidcomp.exchanges()]:
            known = ", ".join(e.name for e in sidcomp.exchanges())
            raise ValueError(f"hook {text!r}: after + comes an exchange, for a codec of sidcomp: {known}")
        return Hook(text, kind, _groups(text, groups or "25MB"), bucket_mb, exchange, arguments)
    if kind in PAPERS:
        return Hook(text, "default", _groups(text, body), bucket_mb, None, arguments)
    if kind == "auto" and not colon:
        return Hook(text, "auto", "", bucket_mb, None, arguments)
    if kind in OF_TORCH and not colon:
        return Hook(text, kind, "", bucket_mb, None, arguments)
    codecs = [c.name for c in sidcomp.codecs()]
    if kind not in ("default", *codecs):
        known = ", ".join((*OF_TORCH, *PAPERS, "auto", "default"))
        raise ValueError(
            f"hook {text!r}: one of {known}, or CODEC:GROUPS with a codec of {', '.join(codecs)}"
        )
    return Hook(text, kind, _groups(text, groups or "25MB"), bucket_mb, None, arguments)


def _arguments(text: str, given: str | None) -> tuple[tuple[str, Any], ...]:
    """The arguments of State between brackets: numbers where they read as numbers, schedules, else words."""
    out = []
    for item in given.split(";") if given else ():
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            raise ValueError(f"hook {text!r}: {item!r} is not KEY=VALUE")
        marks = [mark.rpartition("@") for mark in value.split("|")] if "@" in value else []
        schedule = sidcomp.Schedule([(int(step), _number(v)) for v, _, step in marks]) if marks else None
        out.append((key, schedule or _number(value)))
    return tuple(out)


def _number(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return value


def _groups(text: str, groups: str) -> str:
    try:
        parse_groups(groups)
    except sidcomp.ArgumentError as e:
        raise ValueError(f"hook {text!r}: {e}") from None
    return groups
