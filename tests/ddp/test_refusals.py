"""What sidcomp cannot serve is refused, by register() or at the first backward(), with what to change."""

from __future__ import annotations

import inspect
from typing import Any

import cases
import numpy as np
import pytest
import sidcomp
import torch
import torch.distributed as dist
from cases import CASES, SKIPPING, UNSUPPORTED, Trainer
from common import CODECS, GATHERED, begin
from harness import on_ranks
from sidcomp.doors.ddp import register, rewrap
from torch.nn.parallel import DistributedDataParallel as DDP

# ---- the model and DDP -------------------------------------------------------------------------------------


# The words that the error of each must have.
WORDS = {
    "sparse": ["words", "sparse=False"],
    "complex": ["phase", "complex", "real"],
    "mixed_precision": ["mixed_precision"],
    "python_reducer": ["python reducer", "optimize_ddp"],
    SKIPPING: [SKIPPING, "find_unused_parameters"],
    "optimizer_in_backward": ["optimizer", "backward"],
    "float64": ["float64", "float32", "convert"],
}
LACKS = SKIPPING not in inspect.signature(DDP.__init__).parameters


@on_ranks(2)
def test_refused_with_words_that_say_what_to_change(rank: int, world: int) -> None:
    assert WORDS.keys() == UNSUPPORTED.keys()
    for what, build in UNSUPPORTED.items():
        if what == SKIPPING and LACKS:
            continue
        ddp: Any = build()
        with pytest.raises(sidcomp.SidcompError) as caught:
            register(ddp, sidcomp.State(codec=GATHERED[0]))
        texts = [str(caught.value)]
        ddp = None
        # mixed_precision: its own hook stands in the way of the plain registration, too
        if what not in ("mixed_precision", "optimizer_in_backward"):
            ddp = build()
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(rank))
            if what == "float64":
                x = x.double()
            if what == "sparse":
                x = x[:, 0] * 10
            with pytest.raises((RuntimeError, sidcomp.SidcompError)) as caught:
                ddp.register_comm_hook(sidcomp.State(codec=GATHERED[0]), sidcomp.hook)
                ddp(x).sum().backward()
            texts.append(str(caught.value))
        for text in texts:
            missing = [w for w in WORDS[what] if w not in text]
            assert not missing, f"{what}: {missing} not in: {text}"


@on_ranks(2)
def test_a_second_registration_is_refused(rank: int, world: int) -> None:
    trainer, first = begin(rank, "default")
    with pytest.raises(sidcomp.SetupError, match="hook already"):
        register(trainer.wrapper, sidcomp.State())
    trainer.step()  # the first one still works
    assert first.stats()["steps"] == 1


@pytest.mark.parametrize("plain", [True, False])
@on_ranks(2)
def test_one_state_on_two_models_is_refused(rank: int, world: int, plain: bool) -> None:
    trainers = [Trainer(CASES["default"], rank), Trainer(CASES["default"], rank, seed=1)]
    state = sidcomp.State()
    with pytest.raises((RuntimeError, sidcomp.SidcompError)) as caught:
        for trainer in trainers:
            if plain:
                trainer.wrapper.register_comm_hook(state, sidcomp.hook)
            else:
                register(trainer.wrapper, state)
        for trainer in trainers:
            trainer.step()
    assert "one DDP model" in str(caught.value), caught.value


@on_ranks(2)
def test_one_state_on_a_second_model_later_is_refused(rank: int, world: int) -> None:
    """Two models, each registered after the other has already made steps."""
    trainers = [Trainer(CASES["default"], rank), Trainer(CASES["default"], rank, seed=1)]
    state = sidcomp.State()
    trainers[0].wrapper.register_comm_hook(state, sidcomp.hook)
    trainers[0].step()
    trainers[1].wrapper.register_comm_hook(state, sidcomp.hook)
    with pytest.raises(RuntimeError, match="State of its own"):
        trainers[1].step()


@on_ranks(2)
def test_wrong_objects(rank: int, world: int) -> None:
    module = cases.Scrambled()
    with pytest.raises(sidcomp.SetupError, match="DistributedDataParallel"):
        register(module, sidcomp.State())  # type: ignore[arg-type]
    ddp = DDP(module)
    for state, codec in (("int4", "int4"), (None, "topk"), (sidcomp.State, "topk")):
        with pytest.raises(sidcomp.ArgumentError) as caught:
            register(ddp, state)  # type: ignore[arg-type]
        assert f'state={state!r}: make a State: register(ddp, sidcomp.State("{codec}"))' in str(caught.value)
        with pytest.raises(sidcomp.ArgumentError, match="give rewrap the State"):
            rewrap(ddp, state)  # type: ignore[arg-type]
    ddp.register_comm_hook(None, sidcomp.hook)
    with pytest.raises(RuntimeError, match=r"sidcomp\.State"):
        ddp(torch.randn(4, 12)).sum().backward()
    del ddp


@on_ranks(3)
def test_a_process_group_of_other_ranks_than_ddps(rank: int, world: int) -> None:
    pair = dist.new_group([0, 1])
    trainer = Trainer(CASES["default"], rank)
    if rank < 2:
        with pytest.raises(sidcomp.SetupError, match="process_group"):
            register(trainer.wrapper, sidcomp.State(process_group=pair))


@on_ranks(2)
def test_a_closed_state(rank: int, world: int) -> None:
    trainer = Trainer(CASES["default"], rank)
    with sidcomp.State() as state:
        register(trainer.wrapper, state)
        trainer.step()
    state.close()  # once more
    with pytest.raises(RuntimeError, match="closed"):
        trainer.step()
    with pytest.raises(sidcomp.SetupError, match="closed"):
        state.state_dict()
    assert state.stats()["steps"] == 1
    trainer.close()


# ---- the arguments of State --------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"codec": "topkk"}, ["topkk", *CODECS]),
    ({"memory": "elephant"}, ["elephant", "residual"]),
    ({"codec": GATHERED[0], "densty": 0.1}, ["densty", "density"]),
    ({"codec": "none", "density": 0.1}, ["density"]),
    ({"groups": "layers"}, ["layers", "bucket", "model"]),
    ({"groups": 0}, ["0", "byte"]),
    ({"groups": -5}, ["-5", "byte"]),
    ({"groups": [["a"], ["b", "a"]]}, ["'a'", "twice"]),
    ({"groups": [["a"], []]}, ["list 1", "empty"]),
    ({"groups": ["a", "b"]}, ["lists of parameter names"]),
    ({"groups": [[3]]}, ["3", "name"]),
    ({"exclude": [1.5]}, ["1.5"]),
    ({"seed": -1}, ["seed", "-1"]),
    ({"checksum_every": -1}, ["checksum_every", "-1"]),
    ({"isa": "mmx"}, ["mmx"]),
    ({"isa": 3}, ["isa=3: give the name", "avx2"]),
    ({"codec": "auto", "warmup": True}, ["warmup=True: give a number of steps"]),
    ({"codec": "auto", "warmup": "x"}, ["warmup='x': give a number of steps"]),
    *(
        ({"seed": wrong}, [f"seed={wrong!r}: give a whole number from 0"])
        for wrong in ("x", 1.5, True, 2**64)
    ),
    *(
        ({name: wrong}, [f"{name}={wrong!r}: give a number of steps"])
        for name in ("checksum_every", "full_every")
        for wrong in ("x", 1.5, True, None)
    ),
]
for _codec in CODECS.values():
    for _p in _codec.parameters:
        if _p.kind != "choice":
            for _value in (_p.min - 1, _p.max + 1, float("nan")):
                if _p.kind == "real" or _value == _value:
                    WRONG.append(({"codec": _codec.name, _p.name: _value}, [_p.name]))
            WRONG.append(({"codec": _codec.name, _p.name: "much"}, [_p.name]))
        else:
            WRONG.append(({"codec": _codec.name, _p.name: "none-such"}, [_p.name, *_p.choices]))


@pytest.mark.parametrize("arguments, words", WRONG, ids=lambda v: str(v)[:60])
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(sidcomp.SidcompError) as caught:
        sidcomp.State(**arguments)
    assert isinstance(caught.value, ValueError | NotImplementedError)
    missing = [w for w in words if w not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize("codec", CODECS)
def test_the_limits_of_every_parameter_are_accepted(codec: str) -> None:
    for p in CODECS[codec].parameters:
        for value in p.choices or (p.min, p.max, p.default):
            sidcomp.State(codec=codec, **{p.name: int(value) if p.kind == "int" else value})  # type: ignore[arg-type]


EVERY = ["last.weight", "last.bias", "first.weight", "first.bias", "third.weight", "norm.weight", "norm.bias"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"groups": [[*EVERY, "second.weight", "second.bias"], ["fourth.weight"]]}, ["fourth.weight"]),
        ({"groups": [EVERY, ["second.bias"]]}, ["second.weight"]),
        ({"groups": [EVERY], "exclude": ["second.*", "last.bias"]}, ["last.bias", "exclude"]),
        ({"exclude": "lost.*"}, ["lost.*"]),
        ({"exclude": ["first.weight", "lost"]}, ["lost"]),
    ],
)
@on_ranks(2)
def test_names_that_do_not_fit_the_model(
    rank: int, world: int, arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises((RuntimeError, sidcomp.SidcompError)) as caught:
        begin(rank, "default", **arguments)[0].step()
    missing = [w for w in words if w not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@on_ranks(2)
def test_an_explicit_group_has_one_dtype(rank: int, world: int) -> None:
    names = [name for name, _ in cases.Mixed().named_parameters()]
    with pytest.raises((RuntimeError, sidcomp.SidcompError), match=r"(?s)(?=.*dtype)(?=.*bfloat16)"):
        begin(rank, "mixed", [names])[0].step()


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    sidcomp.State(seed=np.int64(3), checksum_every=np.int32(2), full_every=np.int64(4)).close()
