"""What one run has kept must not reach another one: under frameworks, on two ranks."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from launched import (
    ARGUMENTS,
    as_torchrun,
    optimizer_of,
    run_frameworks,
    same,
    snapshot,
)


def needed(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"needs {name}: pip install '.[frameworks]'")


# ---- Transformers


def train(folder: Path, compression: Any) -> dict[str, Any]:
    """Returns the parameters and residuals at the end."""
    import transformers
    from with_transformers import Model, trainer

    class Last(transformers.TrainerCallback):
        seen: dict[str, Any]

        def on_epoch_end(self, *_: Any, model: Any, **__: Any) -> None:
            self.seen = snapshot(model, compression.run.state.state_dict())

    last = Last()
    made = trainer(folder, Model(), optimizer_of, [last, compression])
    made.train()
    return last.seen


def trains_after_a_failure(rank: int, world: int, room: str) -> dict[str, Any]:
    as_torchrun(rank, world, room)
    warnings.simplefilter("ignore")
    import transformers
    from sidcomp.frameworks.transformers import Compression
    from with_transformers import Model, trainer

    class Fails(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("planted")

    compression = Compression(**ARGUMENTS)
    failed = trainer(Path(room) / "failed", Model(), optimizer_of, [compression, Fails()])
    with pytest.raises(RuntimeError, match="planted"):
        failed.train()
    assert failed.is_in_train, "the Trainer that failed still says that it trains"
    after = train(Path(room) / "after", compression)
    return {"after": after, "fresh": train(Path(room) / "fresh", Compression(**ARGUMENTS))}


def test_a_new_trainer_may_have_the_compression_of_one_that_failed(tmp_path: Path) -> None:
    needed("transformers")
    for r in run_frameworks(trains_after_a_failure, str(tmp_path)):
        same(r["after"], r["fresh"])
