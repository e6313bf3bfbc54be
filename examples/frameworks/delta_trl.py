"""TRL: `AsyncGRPOTrainer` sends what has changed in the weights, and not the weights.

    trainer = AsyncGRPOTrainer(..., weight_transfer=DeltaTransfer(VLLMClient(url), "/shared"))

This is a `WeightTransferProtocol`, as `trl.experimental.async_grpo` of TRL 1.16.0 has it. The server is a
vLLM with the engine of delta_vllm.py. A message is a file in a folder that both see, and the server gets its
name.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from sidcomp.delta import Sender


class DeltaTransfer:
    """client: a `VLLMClient` of TRL's. folder: the trainer writes to it, and the server reads."""

    def __init__(self, client: Any, folder: str) -> None:
        self.client, self.file = client, Path(folder) / "delta"
        self.weights: dict[str, torch.Tensor] = {}
        self.sender: Sender | None = None
        self.messages, self.full = 0, True

    def init_weight_transfer(self) -> None:
        self.client.wait_for_server_ready()

    def pause(self) -> None:
        self.client.pause()

    def resume(self) -> None:
        self.client.resume()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, x in iterator:
            if self.sender is None:
                self.weights[name] = x.to("cpu", copy=True)
            else:
                self.weights[name].copy_(x)
        if self.sender is None:
            self.sender = Sender(self.weights)
            self.client.init_weight_transfer_engine(form(self.weights))
        # After a failure some workers may have the message and others not, so the next one must be full.
        full, self.full = self.full, True
        self.file.write_bytes(self.sender.message(full=full))
        self.messages += 1
        self.client.start_weight_update()
        try:
            self.client.update_weights({"file": str(self.file)})  # returns once all workers have applied it
        except Exception:
            with suppress(Exception):
                self.client.finish_weight_update()  # of the workers that have
            raise
        self.client.finish_weight_update()
        self.sender.confirm(self.messages)
        self.full = False

    def destroy(self) -> None:
        self.file.unlink(missing_ok=True)


def form(weights: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {
        "names": list(weights),
        "dtype_names": [str(x.dtype).removeprefix("torch.") for x in weights.values()],
        "shapes": [list(x.shape) for x in weights.values()],
    }
