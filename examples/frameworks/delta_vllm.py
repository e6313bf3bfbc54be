"""vLLM: a `WeightTransferEngine` whose workers get what has changed in the weights, and not the weights.

    vllm serve MODEL --weight-transfer-config '{"backend": "delta"}'

with a plugin (https://docs.vllm.ai/en/latest/design/plugin_system) that calls `register` in each process.
Each worker keeps the checkpoint's weights in the memory of its host, and loads them into its model after each
message. The test has run with the base classes and the factory of vLLM 0.33.0; a server, and its reloading of
layers, have not been tried.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from sidcomp.delta import Receiver
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class Form(WeightTransferInitInfo):
    """Of the weights, by the checkpoint's names."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class Message(WeightTransferUpdateInfo):
    file: str


class DeltaEngine(WeightTransferEngine[Form, Message]):
    init_info_cls = Form
    update_info_cls = Message
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Form) -> None:
        forms = zip(init_info.names, init_info.dtype_names, init_info.shapes, strict=True)
        self.weights = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            for name, dtype, shape in forms
        }
        self.receiver = Receiver(self.weights, version=None)  # so that the first message must be a full one

    def start_weight_update(self) -> None:
        """Nothing has to be done before a message has been checked."""

    def receive_weights(self, update_info: Message) -> None:
        self.receiver.apply(Path(update_info.file).read_bytes())
        initialize_layerwise_reload(self.model)
        self.model.load_weights(self.weights.items())
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...


def register() -> None:
    WeightTransferEngineFactory.register_engine("delta", DeltaEngine)
