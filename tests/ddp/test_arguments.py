"""An argument of the wrong kind is named in an error of sidcomp's own, by every public function."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks
from sidcomp.config.kinds import from_environment
from sidcomp.doors.ddp import register, rewrap
from sidcomp.local.steps import Updates
from sidcomp.runtime.cuda_executor import CudaExecutor
from sidcomp.simulation import Loopback
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Stranger:
    """An object that no parameter takes."""


WRONG = (3, -1, "x", None, 3.5, float("nan"), [3], ["x"], [Stranger()], (1, 2), {}, b"x", Stranger())

# What holds for any object: whether it is true, or what it is not.
TAKES_ANY = {
    ("State", "process_group"),  # register() checks it, which knows the model's
    ("strict", "on"),
    ("State.log", "norms"),
    ("Compressor.residual", "like"),
}
# Results, not to be made by a program; errors; and the hook, which DDP calls.
NOT_CALLED = {"Options", "Run", "hook"}  # what Options holds is checked where it is used

FOR_DOORS = {"attach", "check_open", "meet", "prepare"}  # methods of State that programs do not call

INSTANCE = {
    "forward_ps": 1,
    "tensors": [{"name": "a", "backward_ps": 1, "bytes": 4}],
    "methods": [{"name": "m", "encode": [[0, 0]], "exchange": [[0, 1]], "decode": [[0, 0]]}],
}

Case = tuple[Callable[..., Any], dict[str, Any]]


def methods(of: type, instance: Any, arguments: dict[str, dict[str, Any]]) -> dict[str, Case]:
    """Those that have arguments; arguments: the ones without a default."""
    own = vars(of).keys() - FOR_DOORS
    names = [n for n in own if not n.startswith("_") and callable(getattr(of, n))]
    return {f"{of.__name__}.{n}": (getattr(instance, n), arguments.get(n, {})) for n in names}


def cases() -> dict[str, Case]:
    """Every public function, with sound arguments where one has no default."""
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = sidcomp.State("topk", density=0.5)
    trained, plain = DDP(nn.Linear(4, 4)), nn.Linear(4, 4)
    register(trained, state)
    trained(torch.ones(2, 4)).sum().backward()
    x = np.ones(100, np.float32)
    compressor, loopback = (
        sidcomp.Compressor("topk", 100),
        Loopback(2, "allgather", "topk", 100),
    )
    summed = sidcomp.Compressor("powersgd", 100, world=2)
    simulated = sidcomp.simulation.simulate(1000, worlds=[2])
    own = {"module": module, "optimizers": optimizer}
    found: dict[str, Case] = {
        "Compressor": (sidcomp.Compressor, {"codec": "topk", "n": 100}),
        "Loopback": (Loopback, {"world": 2, "exchange": "allgather", "codec": "topk", "n": 100}),
        "Updates": (Updates, {**own, "state": sidcomp.State("topk")}),
        "Profile": (sidcomp.planner.Profile.load, {}),
        "Profile.of": (sidcomp.planner.Profile.of, {}),
        "compress": (sidcomp.compress, {
            "model": DDP(plain), "optimizer": torch.optim.SGD(plain.parameters(), lr=0.1), "codec": "int8",
        }),
        "compress updates": (sidcomp.compress, {"model": module, "optimizer": optimizer, "codec": "int8"}),
        "State auto": (sidcomp.State, {"codec": "auto"}),
        "State mergecomp": (sidcomp.State, {"codec": "topk", "groups": "mergecomp"}),
        "preset": (sidcomp.preset, {"name": "redsync"}),
        "evaluate": (sidcomp.planner.evaluate, {"instance": INSTANCE, "plan": {"ends": [1], "methods": [0]}}),
        "marsit_step_sizes": (sidcomp.simulation.marsit_step_sizes, {"ranks": 2, "steps": 3, "elements": 4}),
        "plan": (sidcomp.planner.plan, {"instance": INSTANCE}),
        "process_group": (sidcomp.backend.process_group, {"inner": dist.group.WORLD}),
        "register": (register, {"ddp": DDP(nn.Linear(4, 4)), "state": state}),
        "rewrap": (rewrap, {"ddp": trained, "state": state}),
        "simulate": (sidcomp.simulation.simulate, {"n": 1000, "worlds": [2]}),
        **methods(
            sidcomp.Compressor,
            compressor,
            {
                "encode": {"x": x},
                "decode": {"payloads": compressor.encode(x)},
                "finish": {"payloads": compressor.encode(x), "gradient": x},
            },
        ),
        "next_reduction": (summed.next_reduction, {"reduction": 1, "payload": summed.encode(x), "x": x}),
        **methods(
            Loopback,
            loopback,
            {
                "step": {"gradients": [x, x]},
                "residual": {"rank": 0},
                "set_residual": {"rank": 0, "values": x},
            },
        ),
        **methods(
            sidcomp.simulation.Simulation, simulated, {"row": {"exchange": "dense", "world": 2}}
        ),
        **methods(sidcomp.State, state, {
            "follow": {"optimizer": torch.optim.SGD(trained.parameters(), lr=0.1)},
            "load_state_dict": {"state": state.state_dict()},
        }),
        **{f"fsdp.{n}": (f, {"module": module}) for n, f in vars(sidcomp.fsdp).items()
           if n.startswith("compress_")},
        "fsdp.compress": (sidcomp.fsdp.compress, {"module": module, "state": sidcomp.State("topk")}),
        "fsdp.reshard": (sidcomp.fsdp.reshard, {"states": [], "module": module}),
        "Schedule": (sidcomp.Schedule, {"values": {0: 1}}),
        "Schedule.at": (sidcomp.Schedule({0: 1}).at, {}),
    }  # fmt: skip
    for writes in ("State.timeline", "State.plot", "Simulation.plot", "Compressor.next_reduction",
                   "State.close"):  # fmt: skip
        del found[writes]  # files; and what is a case of its own, or would end the State
    for name in sidcomp.__all__:
        value = getattr(sidcomp, name)
        if callable(value) and name not in NOT_CALLED:
            found.setdefault(name, (value, {}))
    return found


@on_ranks(1)
def test_wrong_kinds_are_named(rank: int, world: int) -> None:
    warnings.simplefilter("ignore")
    tried, wrong = 0, []
    for name, (function, sound) in cases().items():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if parameter.name == "agree":  # which compress gives
                continue
            for value in WRONG:
                tried += 1
                what = f"{name}({parameter.name}={value!r})"
                try:
                    made = function(**{**sound, parameter.name: value})
                    if isinstance(made, sidcomp.Run):
                        made.close()  # else the next one would be refused for it
                except sidcomp.SidcompError:
                    continue
                except Exception as e:
                    wrong.append(f"{what}: {e!r}")
                else:
                    if isinstance(value, Stranger) and (name.split(" ")[0], parameter.name) not in TAKES_ANY:
                        wrong.append(f"{what} was accepted")
    sidcomp.strict(False)
    assert tried > 1000
    assert not wrong, "\n".join(wrong)


def enter_the_side_stream() -> None:
    executor = CudaExecutor.__new__(CudaExecutor)
    executor.device = torch.device("cuda", 0)
    executor._enter()


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("SIDCOMP_STREAM_PRIORITY", enter_the_side_stream),
        ("LOCAL_WORLD_SIZE", lambda: sidcomp.State("topk", exchange="hierarchical")),
    ],
)
def test_environment_variables(
    name: str, read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(sidcomp.ArgumentError, match=f"environment variable {name}='x': give a whole number"):
        read()
    for text, number in ((" -1 ", -1), ("", 7)):
        monkeypatch.setenv(name, text)
        assert from_environment(name, 7) == number


def test_fsdp_takes_a_state_and_not_a_codec() -> None:
    with pytest.raises(sidcomp.ArgumentError, match=r"state='topk': give a sidcomp\.State"):
        sidcomp.fsdp.compress(nn.Linear(4, 4), "topk")  # type: ignore[arg-type]
