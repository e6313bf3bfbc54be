"""Files that an earlier version wrote still load, and training goes on as it did.

saved/RANK.pt was written by `write` below while all modules were in one folder: a checkpoint, and a pickled
State whose arguments hold a Schedule. SIDCo had other defaults then; FORMER names them. To write such files
anew: `python test_saved_before.py`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import sidcomp
import torch
from cases import CASES, Trainer, assert_same
from harness import run
from sidcomp.doors.ddp import register

HERE = Path(__file__).parent / "saved"
WORLD, BEFORE, AFTER = 2, 4, 3


FORMER = {"ratios": "repeated", "adapt": "printed", "floor": 0.0}


def make() -> sidcomp.State:
    return sidcomp.State(
        "sidco-e",
        **FORMER,
        density=sidcomp.Schedule({0: 0.5, 5: 0.1}),
        groups="bucket",
        policy=[("last.*", {"codec": "int8", "memory": "residual"})],
        seed=3,
    )


def steps(trainer: Trainer, count: int) -> dict[str, Any]:
    for _ in range(count):
        trainer.step()
    return trainer.snapshot()


def write(rank: int, world: int) -> None:
    trainer, state = Trainer(CASES["cap-small"], rank), make()
    register(trainer.wrapper, state)
    steps(trainer, BEFORE)
    saved = {
        "model": trainer.module.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "sidcomp": state.state_dict(),
        "pickled": pickle.dumps(state),
    }
    saved = pickle.loads(pickle.dumps(saved))  # apart from what goes on
    torch.save({**saved, "then": steps(trainer, AFTER)}, HERE / f"{rank}.pt")
    trainer.close()
    state.close()


def read(rank: int, world: int, pickled: bool) -> None:
    saved = torch.load(HERE / f"{rank}.pt", weights_only=False)
    trainer = Trainer(CASES["cap-small"], rank)
    trainer.module.load_state_dict(saved["model"])
    trainer.optimizer.load_state_dict(saved["optimizer"])
    trainer.steps = BEFORE
    state = pickle.loads(saved["pickled"]) if pickled else make()
    if not pickled:
        state.load_state_dict(saved["sidcomp"])
    register(trainer.wrapper, state)
    kept, source = state.state_dict(), saved["sidcomp"]
    assert_same(kept["residuals"], source["residuals"], "residuals")
    assert kept["step"] == source["step"] == BEFORE
    for a, b in zip(kept["layout"], source["layout"], strict=True):
        assert a["names"] == b["names"]
        assert_same({"header": a["header"]}, {"header": b["header"]}, "headers")
    # On another processor torch's gradients differ by roundings. The pickled State takes today's defaults.
    for name, x in steps(trainer, AFTER).items():
        assert x.isfinite().all()
        if not pickled:
            torch.testing.assert_close(x, saved["then"][name], rtol=1e-3, atol=1e-4)
    trainer.close()
    state.close()


def test_a_checkpoint() -> None:
    run(read, WORLD, False)


def test_a_pickled_state() -> None:
    run(read, WORLD, True)


if __name__ == "__main__":
    run(write, WORLD)
