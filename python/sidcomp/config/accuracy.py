"""What codecs cost in loss with which kind of optimizer, as measured (docs/results.md)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sidcomp.errors import ArgumentError

if TYPE_CHECKING:
    from torch.optim import Optimizer

CodecSpec = tuple[str, Mapping[str, Any]]  # a codec and its parameters


Run = tuple[str, int]  # a language model of the examples, and the number of ranks
Percents = Mapping[Run, float]


class Loss(NamedTuple):
    """percent: above that of uncompressed training; ranks: of the measurement."""

    percent: float
    ranks: int


class Measured(NamedTuple):
    """A codec with its parameters. over: by how many percent the loss ends above that of uncompressed
    training with the same seeds; {}: not measured. seeds: by how many percent the worst seed of uncompressed
    training is above the best one; a run that is missing has one seed. every: steps between two exchanges of
    updates; 0: gradients."""

    spec: CodecSpec
    over: Percents
    seeds: Percents
    every: int = 0

    @property
    def worst(self) -> float | None:
        return max(self.over.values(), default=None)

    def near(self, ranks: int) -> "Loss | None":
        """The worst loss of any model on the number of ranks that was measured and is nearest to this one."""
        if not self.over:
            return None
        nearest = min((r for _, r in self.over), key=lambda r: (max(r / ranks, ranks / r), -r))
        return Loss(max(percent for (_, r), percent in self.over.items() if r == nearest), nearest)

    @property
    def within(self) -> bool:
        """Whether no model and no number of ranks shows more than seeds do."""
        return all(percent <= self.seeds.get(run, 0.0) for run, percent in self.over.items())

    @property
    def close(self) -> bool:
        return self.worst is not None and self.worst <= _CLOSE


# At a fortieth of the uncompressed bytes it preserves accuracy best.
FORTIETH: CodecSpec = ("topk", {"density": 0.084, "values": "log4", "indices": "packed"})
INT4: CodecSpec = ("int4", {})
FP16: CodecSpec = ("fp16", {})
# With which updates keep the loss: beside Adam 2 bits a value suffice, and more elements are worth more.
# Beside SGD an LSTM lost 11 % so, and 0.2 % with 4 bits (benchmarks/results/sgd-lstm-2.json).
HUNDREDTH: CodecSpec = ("topk", {"ratio": 100, "values": "log2", "indices": "packed"})
TWO_HUNDREDTH: CodecSpec = ("topk", {**HUNDREDTH[1], "ratio": 200})
HUNDREDTH_OF_SGD: CodecSpec = ("topk", {**HUNDREDTH[1], "values": "log4"})
# What SparseLoCo sends (docs/updates.md).
OUTER: CodecSpec = ("topk", {"density": 1 / 64, "values": "log4", "indices": "packed", "beta": 0.95})
EXACT: CodecSpec = ("lossless", {})  # rounds nothing


def _runs(percents: Mapping[str, Mapping[int, float]]) -> Percents:
    """percents: by model, and then by the number of ranks."""
    return {(model, ranks): percent for model, of in percents.items() for ranks, percent in of.items()}


# docs/results.md has both tables. With SGD only the GRU was measured.
_SGD = _runs({"GRU": {2: 1.6}})
_ADAMW = _runs({"GRU": {2: 0.2, 4: 0.7, 8: 1.0}, "transformer": {2: 1.6, 4: 7.9, 8: 3.2}})

# The fewest bytes first. fp16 was not measured on these runs: its rounding is far finer than int4's.
PLAIN = (Measured(FORTIETH, _runs({"GRU": {2: 0.7}}), _SGD), Measured(FP16, {}, _SGD))
ADAPTIVE = (
    Measured(
        FORTIETH,
        _runs({"GRU": {2: 3.7, 4: 6.3}, "transformer": {2: -2.6, 4: 1.8, 8: 4.5}}),
        _ADAMW,
    ),
    Measured(("ternary", {}), _runs({"GRU": {2: 2.0}}), _ADAMW),
    Measured(("deadzone", {"bits": 2}), _runs({"GRU": {2: 2.5}, "transformer": {2: -1.9}}), _ADAMW),
    Measured(
        ("int2", {}),
        _runs({"GRU": {2: 0.9, 4: 2.0}, "transformer": {2: 0.3, 4: 5.7}}),
        _ADAMW,
    ),
    Measured(
        INT4,
        _runs({"GRU": {2: 0.1, 4: 0.3, 8: 0.2}, "transformer": {2: -0.7, 4: -2.4, 8: -2.1}}),
        _ADAMW,
    ),
    Measured(FP16, {}, _ADAMW),
)

# Updates, with Adam clipped as docs/updates.md recommends, and with SGD. docs/low-communication.md has the
# byte transformer, with three seeds.
PLAIN_UPDATES = (
    Measured(HUNDREDTH_OF_SGD, _runs({"LSTM": {2: 0.2}}), _runs({"LSTM": {2: 1.1}}), 1),
    Measured(HUNDREDTH, _runs({"LSTM": {2: 11.1}}), _runs({"LSTM": {2: 1.1}}), 1),
)
ADAPTIVE_UPDATES = (
    Measured(
        ("deadzone", {"bits": 1.0}),
        _runs({"GRU": {4: -0.5}, "transformer": {4: 1.2}, "byte transformer": {4: 5.3}}),
        _ADAMW,
        32,
    ),
    Measured(
        ("deadzone", {"bits": 0.5}), _runs({"GRU": {2: 0.2, 4: 3.9}, "transformer": {2: 0.7}}), _ADAMW, 16
    ),
    Measured(TWO_HUNDREDTH, _runs({"GRU": {2: 0.0}, "transformer": {2: -0.3}}), _ADAMW, 1),
    Measured(
        HUNDREDTH,
        _runs(
            {
                "GRU": {2: -0.6, 4: -0.5, 8: -0.6},
                "transformer": {2: -0.7, 4: -1.6, 8: 1.3},
                "byte transformer": {4: 2.2},
            }
        ),
        _ADAMW,
        1,
    ),
    Measured(("deadzone", {"bits": 1.0}), _runs({"byte transformer": {4: 1.9}}), {}, 3),
    Measured(INT4, _runs({"byte transformer": {4: 1.5}}), {}, 4),
    Measured(
        FORTIETH,
        _runs({"GRU": {2: -0.7, 4: -1.1, 8: -1.7}, "transformer": {2: -1.8, 4: -2.2, 8: 1.3}}),
        _ADAMW,
        1,
    ),
    Measured(("int2", {}), _runs({"GRU": {2: -0.3}, "transformer": {2: -0.8}}), _ADAMW, 1),
    Measured(INT4, _runs({"GRU": {2: -0.3}, "transformer": {2: -0.4}}), _ADAMW, 1),
)

LEVELS = ("exact", "dense", "close", "any")
_CLOSE = 1.0  # percent


def measured(of_adaptive: bool, updates: bool) -> tuple[Measured, ...]:
    if updates:
        return ADAPTIVE_UPDATES if of_adaptive else PLAIN_UPDATES
    return ADAPTIVE if of_adaptive else PLAIN


def check(accuracy: object) -> None:
    if accuracy not in LEVELS:
        raise ArgumentError(
            f"accuracy={accuracy!r}: choose one of {', '.join(LEVELS)}: nothing rounded, no more loss than "
            f"seeds of uncompressed training differ by, at most {_CLOSE:g} % more, or no limit"
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
        for m in measured(of_adaptive, updates=False)
        if accuracy == "any" or m.within or (accuracy == "close" and m.close)
    ]


def candidates(accuracy: str, of_adaptive: bool) -> list[CodecSpec]:
    """Returns the candidates of codec="auto", besides uncompressed: the codec with the fewest bytes, and one
    that changes almost nothing."""
    found = allowed(accuracy, of_adaptive)
    return [found[0], found[-1]] if len(found) > 1 else found


def costly(accuracy: str, of_auto: bool) -> Measured | None:
    """Returns a codec that costs more with Adam than this level of accuracy allows, and that sidcomp chooses
    by itself when it knows no optimizer, or may choose (of_auto). None: there is no such codec."""
    chosen = candidates(accuracy, False) if of_auto else allowed(accuracy, False)[:1]
    suited = allowed(accuracy, True)
    return next((m for m in ADAPTIVE if m.spec in chosen and m.spec not in suited), None)


def warning(optimizer: "Optimizer", who: str, uses: str, costs: Measured, instead: str) -> str:
    """Returns the warning about a codec that nobody named, with Adam. who: uses it; instead: what to do."""
    return (
        f"this model is trained with {type(optimizer).__name__}, and {who} {uses}, which raised the loss of "
        f"a language model by up to {costs.worst:g} % with AdamW: {instead}; or accept the loss with "
        'accuracy="any" (docs/results.md)'
    )
