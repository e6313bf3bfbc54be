"""Finds out whether the optimizer took a step, or a GradScaler skipped it (State.follow), and whether an
optimizer steps that should be followed and is not."""

import gc
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sidcomp import notices
from sidcomp.config.accuracy import adaptive
from sidcomp.errors import ArgumentError

_MOST_PASSES = 100  # backward passes in one step; after more than these the optimizer is the wrong one
_MOST_STEPS = 100  # steps without a backward pass of this model; from these on its hook is not in force


def scaler_in_use() -> bool:
    """Whether the program has a GradScaler that has scaled a loss. It asks the garbage collector, which takes
    some ten milliseconds: not for every step."""
    return any(
        issubclass(type(o), torch.amp.GradScaler)
        and getattr(o, "_enabled", False)
        and getattr(o, "_scale", None) is not None
        for o in gc.get_objects()
    )


class _Stepped:
    """Set by the optimizer's hook, which must not keep a State alive. Once that is collected, it does
    nothing: it cannot be removed then, because torch may be iterating over the hooks."""

    def __init__(self, watch: "Watch") -> None:
        self._watch = weakref.ref(watch)
        self.unseen = 0  # steps since the last backward pass that sidcomp has seen
        self.ran = False
        self.found: torch.Tensor | None = None  # not 0 if a fused optimizer skipped its own step
        self.each: dict[int, torch.Tensor | None] = {}  # the same of each optimizer that ran, by id
        self.copied: torch.cuda.Event | None = None

    def __call__(self, optimizer: Any, *_: Any) -> None:
        if self._watch() is None:
            return
        self.ran = True
        self.unseen += 1
        if self.unseen == _MOST_STEPS:
            notices.warn(
                f"the optimizer has taken {_MOST_STEPS} steps, and no gradient has reached sidcomp: a "
                "framework may have wrapped the model in another DDP or replaced the hook, or every backward "
                "pass runs under no_sync()",
                dist.get_rank() if dist.is_initialized() else 0,
            )
        found = getattr(optimizer, "found_inf", None)  # a scaler sets it during the step of a fused optimizer
        if isinstance(found, torch.Tensor) and found.is_cuda:
            home = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
            found = home.copy_(found, non_blocking=True)
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()
        self.found = self.each[id(optimizer)] = found


class _Blind:
    """A Watch in a copy of the model whose forward passes it is called before."""

    scaler = None

    def forward(self, *_: Any) -> None: ...


class Watch:
    """The optimizers, and the GradScaler that guards them, if one does. A step counts as skipped if the
    scaler has skipped all of them; of several it may skip some.

    Whether an optimizer has stepped is known from its hook or, if it has no hooks, from its parameters'
    versions. Whether the scaler has been asked for the step is known from the stage that it keeps for each
    optimizer. The host knows all of it without waiting for a device, except whether a fused optimizer skipped
    its step, which only the device knows.
    """

    def __init__(self, chains: Sequence[Sequence[Any]], scaler: Any = None) -> None:
        """chains: of each optimizer, as `optimizers.chain` returns it."""
        self.scaler = scaler
        # of the optimizers: the program may have the scaler step a wrapper, or what is inside
        self._keys = [id(o) for links in chains for o in links]
        self._numbers = [i for i, links in enumerate(chains) for _ in links]  # whose keys they are
        optimizers = [links[-1] for links in chains]
        self._ids = list(map(id, optimizers))
        if scaler is not None and not (
            hasattr(scaler, "_per_optimizer_states") and hasattr(scaler, "get_scale")
        ):
            raise ArgumentError(f"follow(scaler={type(scaler).__name__}): give a torch.amp.GradScaler")
        self._stepped = _Stepped(self)
        self._scaler_states: list[dict[str, Any]] = []
        self._home: torch.Tensor | None = None  # the scale, copied to the host
        self._copied: torch.cuda.Event | None = None
        self._passes = 0  # since the optimizer's last step
        self._some = [g["params"][0] for o in optimizers for g in o.param_groups if g["params"]]
        self._versions: list[int] = []
        # empty: objects with an optimizer's interface, but no hooks
        known = [getattr(o, "register_step_post_hook", None) for o in optimizers]
        self._hooks = [register(self._stepped) for register in known if register is not None]

    def __reduce__(self) -> tuple[type[_Blind], tuple[()]]:
        return _Blind, ()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def on_device(self) -> bool:
        """Whether the loss scale is on a device."""
        return getattr(self.scaler, "_device", "cpu") != "cpu"

    def begin(self) -> None:
        """A backward pass begins."""
        self._passes = 1 if self._dealt else self._passes + 1
        if self._passes == _MOST_PASSES + 1:
            notices.log(
                f"follow: the optimizer has not stepped in the last {_MOST_PASSES} backward passes; follow "
                "the one that steps on this model's gradients. Until then each pass counts as a step"
            )
        self._versions = [p._version for p in self._some]
        self._stepped.unseen = 0
        self._stepped.ran, self._stepped.found, self._stepped.copied = False, None, None
        self._stepped.each = {}
        if self.scaler is not None:
            # update() replaces the table; these entries then stay as step() has left them
            self._scaler_states = [self.scaler._per_optimizer_states[key] for key in self._keys]

    @property
    def _offered(self) -> bool:
        """Whether scaler.step(optimizer) has been called."""
        return any(map(_asked, self._scaler_states))

    @property
    def _dealt(self) -> bool:
        """Whether the optimizer has stepped, or the scaler has skipped its step, since `begin`."""
        changed = any(p._version != v for p, v in zip(self._some, self._versions, strict=False))
        return changed or self._stepped.ran or self._offered

    @property
    def over(self) -> bool:
        """Whether the step that the last backward pass belongs to has ended."""
        return self._dealt or self._passes > _MOST_PASSES

    @property
    def within(self) -> bool:
        """Whether the next backward pass belongs to the same step of the optimizer as the last one. It is the
        same on all ranks, whatever has failed on one of them."""
        return self._passes > 0 and not self.over

    @property
    def skipped(self) -> bool:
        """Whether the scaler has skipped the step."""
        if not self._offered:
            return False
        if not self._hooks:
            devices = [s["found_inf_per_device"] for s in self._scaler_states]
            return any(bool(found.item()) for of_one in devices for found in of_one.values())
        if not self._stepped.ran:
            return True
        if self._stepped.copied is not None:
            self._stepped.copied.synchronize()
        return self._stepped.found is not None and bool(self._stepped.found.item())

    def skipped_each(self) -> list[bool | None]:
        """Whether the scaler has skipped the step of each optimizer; None: it has not been asked for it."""
        if self._stepped.copied is not None:
            self._stepped.copied.synchronize()
        return [self._skipped(i, at) for i, at in enumerate(self._ids)]

    def _skipped(self, number: int, at: int) -> bool | None:
        own = [s for s, i in zip(self._scaler_states, self._numbers, strict=False) if i == number]
        if not any(map(_asked, own)):
            return None
        if len(self._hooks) < len(self._ids):
            return any(bool(x.item()) for s in own for x in s["found_inf_per_device"].values())
        found = self._stepped.each.get(at)
        return at not in self._stepped.each or (found is not None and bool(found.item()))

    # ---- loss scale

    def forward(self, *_: Any) -> None:
        """Called before a forward pass: starts to copy a scale on a device to the host. So the host, when
        backward() begins, waits only for what was enqueued before the forward pass."""
        scale = getattr(self.scaler, "_scale", None)
        if not isinstance(scale, torch.Tensor) or not scale.is_cuda:
            return
        if self._home is None:
            self._home = torch.empty(scale.shape, dtype=scale.dtype, device="cpu", pin_memory=True)
        self._home.copy_(scale, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def scale(self) -> float | None:
        """The loss scale of the next gradients; None: there is no scaler."""
        if self.scaler is None:
            return None
        if self._home is not None and self._copied is not None:
            self._copied.synchronize()
            return float(self._home.item())
        return float(self.scaler.get_scale())


def _asked(state: dict[str, Any]) -> bool:
    """Whether scaler.step(optimizer) has been called. state: what the scaler keeps for the optimizer."""
    return getattr(state.get("stage"), "name", "") == "STEPPED"


class Looking:
    """Watches for the first step of an optimizer on a model's parameters.

    It is a hook before the step of every optimizer, and looks at the parameters of each only once. A hook
    must not remove itself, because torch iterates over its hooks: call `remove` when `over`.
    """

    waits: ClassVar[bool] = False  # until a step of the engine has begun
    _all: ClassVar["weakref.WeakSet[Looking]"] = weakref.WeakSet()

    def __init__(self, tell: Callable[[Any], object], parameters: Collection[int]) -> None:
        """tell: a method, whose object is not kept alive. It is called once, with the optimizer, before the
        parameters move. parameters: their ids."""
        for other in [x for x in self._all if x.over]:  # whose States were collected
            other.remove()
        self._tell, self._parameters = weakref.WeakMethod(tell), parameters
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._told = False
        self.begun = False  # a step of the engine has begun
        self._hook = register_optimizer_step_pre_hook(self)
        self._all.add(self)

    def wants(self, optimizer: Any) -> bool:
        return True

    def __call__(self, optimizer: Any, *_: Any) -> None:
        if self._told or (self.waits and not self.begun) or torch.compiler.is_compiling():
            return
        seen = self._seen.get(id(optimizer))
        if (seen is None or seen() is not optimizer) and not self.look(optimizer):
            self._seen[id(optimizer)] = weakref.ref(optimizer)

    def look(self, optimizer: Any) -> bool:
        """Looks at an optimizer's step. Returns whether to look at its next one, too."""
        tell = self._tell()
        if tell is None or not self.wants(optimizer):
            return False
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self._told = True
            tell(optimizer)
        return False

    @property
    def over(self) -> bool:
        return self._told or self._tell() is None

    def remove(self) -> None:
        self._hook.remove()
        self._all.discard(self)


class Unfollowed(Looking):
    """Watches for Adam, or a relative of it, that steps on a model's parameters and is not followed."""

    def wants(self, optimizer: Any) -> bool:
        return adaptive(optimizer)


class Resumed(Looking):
    """Watches for the optimizer that steps after the first backward pass, which may have been loaded. Before
    it, torch.distributed.checkpoint may take a step of rate 0, so that there is a state to load."""

    waits = True
