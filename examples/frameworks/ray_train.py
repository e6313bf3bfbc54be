"""Ray Train: compresses what the DDP model that prepare_model returns sends; each worker saves its own state.

python examples/frameworks/ray_train.py

Ray starts the two workers itself. Each worker reports a file with a name of its own, and Ray puts the files
of one report into one checkpoint. So a resumed run has the bits of an uninterrupted one.
"""

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import sidcomp
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

EPOCHS, STEPS = 4, 8


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ddp = prepare_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    rank = ray.train.get_context().get_world_rank()
    with sidcomp.compress(ddp, optimizer, "topk", density=0.05) as run:
        parts = {"model": ddp.module, "optimizer": optimizer, "sidcomp": run}
        first = 0
        if config["resume"] is not None:
            with config["resume"].as_directory() as folder:
                saved = torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True)
            first = saved["epoch"] + 1
            for name, part in parts.items():
                part.load_state_dict(saved[name])
        for epoch in range(first, EPOCHS):
            for step in range(STEPS):
                torch.manual_seed(1000 * epoch + 10 * step + rank)
                x, y = torch.randn(16, 64), torch.randint(10, (16,))
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(ddp(x), y)
                loss.backward()
                optimizer.step()
            with tempfile.TemporaryDirectory() as folder:
                now = {name: part.state_dict() for name, part in parts.items()}
                torch.save({"epoch": epoch, **now}, Path(folder) / f"rank{rank}.pt")
                ray.train.report(
                    {"epoch": epoch, "loss": loss.item(), "ratio": run.stats()["ratio"]},
                    checkpoint=ray.train.Checkpoint.from_directory(folder),
                )


def fit(name: str, storage: str, resume: ray.train.Checkpoint | None = None) -> ray.train.Result:
    trainer = TorchTrainer(
        train,
        train_loop_config={"resume": resume},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name=name, storage_path=storage),
    )
    return trainer.fit()


def end(result: ray.train.Result, rank: int) -> dict[str, torch.Tensor]:
    """Parameters and this rank's residuals at the end of a run."""
    with result.checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True)
    residuals = saved["sidcomp"]["residuals"]
    return {**saved["model"], **{f"residual of {name}": residuals[name] for name in residuals}}


ray.init(num_cpus=2, log_to_driver=False)
same = True
with tempfile.TemporaryDirectory() as storage:
    whole = fit("whole", storage)
    halfway = next(c for c, metrics in whole.best_checkpoints if metrics["epoch"] == 1)
    resumed = fit("resumed", storage, halfway)  # with the residuals of both ranks
    for rank in range(2):
        a, b = end(whole, rank), end(resumed, rank)
        same &= a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
ray.shutdown()
print(f"a rank sent 1/{whole.metrics['ratio']:.0f} of the bytes of plain DDP")
print(f"both ranks: {'the same bits' if same else 'DIFFERENT'} after resuming")
raise SystemExit(not same)
