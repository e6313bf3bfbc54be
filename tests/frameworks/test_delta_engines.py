"""examples/frameworks/delta_vllm.py and delta_trl.py, one against the other: with the base classes of the
released packages where they are installed, else with stand-ins of the same signatures."""

from __future__ import annotations

import abc
import importlib
import inspect
import json
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from sidcomp.errors import DeltaError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "frameworks"
RELOAD = "vllm.model_executor.model_loader.reload"
I, U = TypeVar("I"), TypeVar("U")  # noqa: E741


def stand_ins() -> dict[str, types.ModuleType]:
    """Of vLLM 0.33.0: what the example imports."""

    class WeightTransferEngine(abc.ABC, Generic[I, U]):
        init_info_cls: Any
        update_info_cls: Any

        def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
            self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
            self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

        def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
            return self.init_info_cls(**init_dict)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.update_info_cls(**update_info))

        @abc.abstractmethod
        def init_transfer_engine(self, init_info: I) -> None: ...

        @abc.abstractmethod
        def start_weight_update(self) -> None: ...

        @abc.abstractmethod
        def finish_weight_update(self) -> None: ...

        @abc.abstractmethod
        def receive_weights(self, update_info: U) -> None: ...

        @abc.abstractmethod
        def shutdown(self) -> None: ...

    class WeightTransferEngineFactory:
        _registry: dict[str, Any] = {}  # noqa: RUF012

        @classmethod
        def register_engine(cls, name: str, module_path_or_cls: Any, class_name: str | None = None) -> None:
            cls._registry[name] = lambda: module_path_or_cls

        @classmethod
        def create_engine(cls, config: Any, vllm_config: Any, device: torch.device, model: Any) -> Any:
            return cls._registry[config.backend]()(config, vllm_config, device, model)

    infos = ("WeightTransferInitInfo", "WeightTransferUpdateInfo")
    base = {"WeightTransferEngine": WeightTransferEngine, **{name: type(name, (), {}) for name in infos}}
    contents: dict[str, dict[str, Any]] = {
        "vllm.distributed.weight_transfer": {"WeightTransferEngineFactory": WeightTransferEngineFactory},
        "vllm.distributed.weight_transfer.base": base,
        RELOAD: {
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, model_config: None,
        },
    }
    modules = {}
    for name, has in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        vars(modules[name]).update(has)
    return modules


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """delta_vllm and delta_trl."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    missing = find_spec("vllm") is None
    for name, module in stand_ins().items():
        if missing or name == RELOAD:  # which has to have a model of vLLM's
            monkeypatch.setitem(sys.modules, name, module)
    if not torch.accelerator.is_available():
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    names = ("delta_vllm", "delta_trl")
    yield tuple(map(importlib.import_module, names))
    for name in names:
        del sys.modules[name]


class Model(torch.nn.Module):
    """Has the checkpoint's two tensors in one, as vLLM has queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.zeros(2, 50, 40, dtype=torch.bfloat16))

    def load_weights(self, weights: Any) -> None:
        for name, x in weights:
            self.both.data[["query", "key"].index(name)].copy_(x)


class Server:
    """What TRL's client reaches: each call goes to all workers, which keep order as vLLM's do, and what is
    said is JSON."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines = engines
        self.calls: list[str] = []
        self.sizes: list[int] = []
        self.active, self.fails = [False] * len(engines), False

    def _tell(self, what: str, told: Any = None) -> Any:
        self.calls.append(what)
        return json.loads(json.dumps(told))

    def wait_for_server_ready(self, poll_interval_s: float = 2.0) -> None:
        self._tell("wait")

    def pause(self, timeout: int = 1800) -> None:
        self._tell("pause")

    def resume(self, timeout: int = 1800) -> None:
        self._tell("resume")

    def init_weight_transfer_engine(self, init_info: dict[str, Any], timeout: int = 1800) -> None:
        told = self._tell("init", init_info)
        for engine in self.engines:
            engine.init_transfer_engine(engine.parse_init_info(told))

    def start_weight_update(self, timeout: int = 1800) -> None:
        self._tell("start")
        assert not any(self.active)
        for i, engine in enumerate(self.engines):
            engine.start_weight_update()
            self.active[i] = True

    def update_weights(self, update_info: dict[str, Any], timeout: int = 1800) -> None:
        told = self._tell("update", update_info)
        self.sizes.append(Path(told["file"]).stat().st_size)
        for i, engine in enumerate(self.engines):
            if self.fails and i == 1:
                self.active[i] = False
                raise RuntimeError("the second worker fails")
            engine.update_weights(told)

    def finish_weight_update(self, timeout: int = 1800) -> None:
        self._tell("finish")
        for i, engine in enumerate(self.engines):
            if not self.active[i]:
                raise RuntimeError("nothing to finish")
            engine.finish_weight_update()
            self.active[i] = False


@pytest.fixture
def server(examples: tuple[Any, Any]) -> Server:
    factory = sys.modules["vllm.distributed.weight_transfer"].WeightTransferEngineFactory
    factory._registry.pop("delta", None)
    examples[0].register()
    config = types.SimpleNamespace(parallel_config=None, model_config=None)
    backend = types.SimpleNamespace(backend="delta")
    cpu = torch.device("cpu")
    return Server([factory.create_engine(backend, config, cpu, Model()) for _ in range(2)])


def check(server: Server, weights: dict[str, torch.Tensor]) -> None:
    for engine in server.engines:
        assert torch.equal(engine.model.both, torch.stack([*weights.values()]))


def test_the_workers_follow_the_trainer(examples: tuple[Any, Any], server: Server, tmp_path: Path) -> None:
    transfer = examples[1].DeltaTransfer(server, str(tmp_path))
    weights = {name: torch.randn(50, 40).bfloat16() for name in ("query", "key")}
    transfer.init_weight_transfer()
    for _ in range(4):
        transfer.pause()
        transfer.send_weights(iter(weights.items()))
        transfer.resume()
        check(server, weights)
        weights["key"][3] += 1
    assert (
        server.calls
        == ["wait", "pause", "init", *(["start", "update", "finish", "resume", "pause"] * 4)][:-1]
    )
    assert server.sizes[0] > 8000 and max(server.sizes[1:]) < 1000
    transfer.destroy()
    assert not any(tmp_path.iterdir())


def test_after_a_failure_all_weights_are_sent(
    examples: tuple[Any, Any], server: Server, tmp_path: Path
) -> None:
    transfer = examples[1].DeltaTransfer(server, str(tmp_path))
    weights = {name: torch.randn(50, 40).bfloat16() for name in ("query", "key")}
    transfer.send_weights(iter(weights.items()))
    weights["key"][3] += 1
    server.fails = True
    with pytest.raises(RuntimeError, match="second worker fails"):
        transfer.send_weights(iter(weights.items()))
    server.fails = False
    weights["query"][5] += 1
    transfer.send_weights(iter(weights.items()))
    check(server, weights)
    assert server.sizes[2] > 8000
    transfer.file.write_bytes(transfer.file.read_bytes()[:-1])
    with pytest.raises(DeltaError, match="damaged"):
        server.update_weights({"file": str(transfer.file)})
    check(server, weights)


def test_the_transfer_has_the_methods_of_trls_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="TRL is not installed; the other tests call what its trainer calls")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    ours = importlib.import_module("delta_trl").DeltaTransfer
    trainer = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    client = importlib.import_module("trl.experimental.async_grpo.vllm_client").VLLMClient
    named = [(trainer.WeightTransferProtocol, ours, name) for name in vars(ours) if not name.startswith("_")]
    assert len(named) == 5
    named += [(client, Server, name) for name in vars(Server) if not name.startswith("_")]
    for theirs, mine, name in named:
        wanted = inspect.signature(getattr(theirs, name)).parameters
        assert list(inspect.signature(getattr(mine, name)).parameters) == list(wanted), name
