"""Which codecs keep the loss with which kind of optimizer, as measured in DDP's hook (docs/accuracy.md)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sidcomp.errors import ArgumentError

if TYPE_CHECKING:
    from torch.optim import Optimizer

CodecSpec = tuple[str, Mapping[str, Any]]  # a codec and its parameters


class Measured(NamedTuple):
    """A codec with its parameters, and its loss on the example language model. over: by how many percent the
    loss is above that of uncompressed training. within: whether the loss is no worse than that of the worst
    seed of uncompressed training."""

    spec: CodecSpec
    over: float | None
    within: bool


# At a fortieth of the uncompressed bytes it preserves accuracy best.
FORTIETH: CodecSpec = ("topk", {"density": 0.084, "values": "log4", "indices": "packed"})
INT4: CodecSpec = ("int4", {})
FP16: CodecSpec = ("fp16", {})
EXACT: CodecSpec = ("lossless", {})  # rounds nothing

# The fewest bytes first. fp16 was not measured on these runs (None): its rounding is far finer than int4's.
# The figure of int4 with Adam is one seed.
PLAIN = (Measured(FORTIETH, 0.7, True), Measured(FP16, None, True))
ADAPTIVE = (Measured(FORTIETH, 3.5, False), Measured(INT4, -0.2, True), Measured(FP16, None, True))

LEVELS = ("exact", "dense", "close", "any")
_CLOSE = 1.0  # percent


def check(accuracy: object) -> None:
    if accuracy not in LEVELS:
        raise ArgumentError(
            f"accuracy={accuracy!r}: choose one of {', '.join(LEVELS)}: nothing rounded, no worse than the "
            f"seeds of uncompressed training, at most {_CLOSE:g} % more loss, or no limit"
        )


def adaptive(optimizer: "Optimizer") -> bool:
    """Whether the optimizer is Adam or a relative of it: those have two betas. RMSprop and Adagrad, which
    divide by the size of gradients without momentum, were not measured and do not count."""
    return any(len(group.get("betas") or ()) == 2 for group in optimizer.param_groups)


def allowed(accuracy: str, of_adaptive: bool) -> list[CodecSpec]:
    """The codecs that this level of accuracy allows, with the fewest bytes first. EXACT sends more bytes than
    every other, and takes longer, so it is left out where one of them is allowed."""
    if accuracy == "exact":
        return [EXACT]
    return [
        m.spec
        for m in (ADAPTIVE if of_adaptive else PLAIN)
        if accuracy == "any" or m.within or (accuracy == "close" and m.over is not None and m.over <= _CLOSE)
    ]


def candidates(accuracy: str, of_adaptive: bool) -> list[CodecSpec]:
    """What codec="auto" chooses from, besides uncompressed: the codec with the fewest bytes, and one that
    changes almost nothing."""
    found = allowed(accuracy, of_adaptive)
    return [found[0], found[-1]] if len(found) > 1 else found


def costly(accuracy: str, of_auto: bool) -> Measured | None:
    """What sidcomp chooses by itself where it knows no optimizer, or may choose (of_auto), and beside Adam
    costs more than this level of accuracy allows. None: nothing does."""
    chosen = candidates(accuracy, False) if of_auto else allowed(accuracy, False)[:1]
    suited = allowed(accuracy, True)
    return next((m for m in ADAPTIVE if m.spec in chosen and m.spec not in suited), None)


def warning(optimizer: "Optimizer", who: str, uses: str, costs: Measured, instead: str) -> str:
    """What to say of a codec that nobody named, beside Adam. who: uses it; instead: what to do."""
    return (
        f"this model is trained with {type(optimizer).__name__}, and {who} {uses}, which raised the loss of "
        f"a language model by {costs.over:g} % with Adam: {instead}; or accept the loss with "
        'accuracy="any" (docs/accuracy.md, With Adam)'
    )
