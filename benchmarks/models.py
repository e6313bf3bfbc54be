"""Six models as their public layer shapes, in gradient-ready order, and 48 instances of planning.

Shapes are those of the published architectures. Times are assumed, not measured: a backward pass of a given
length is shared out in proportion to floating-point operations, and the links and codecs are round constants.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

MS = 10**9  # picoseconds


class Tensor(NamedTuple):
    """A parameter: its elements, and the share of the backward pass (in operations) that ends with it."""

    name: str
    elements: int
    work: int


class Model(NamedTuple):
    """Tensors in gradient-ready order, and the assumed backward pass in ms on a V100 and an H200."""

    name: str
    tensors: list[Tensor]
    v100_ms: int
    h200_ms: int

    @property
    def parameters(self) -> int:
        return sum(t.elements for t in self.tensors)


def resnet(depths: tuple[int, ...]) -> list[Tensor]:
    """Bottleneck ResNet at 224 x 224 with 1000 classes, as in the paper that introduced it."""
    forward: list[Tensor] = []

    def conv(name: str, inputs: int, outputs: int, kernel: int, side: int) -> None:
        elements = inputs * outputs * kernel * kernel
        forward.append(Tensor(f"{name}.weight", elements, elements * side * side))
        forward.append(Tensor(f"{name}.norm.weight", outputs, outputs * side * side))
        forward.append(Tensor(f"{name}.norm.bias", outputs, 0))

    conv("stem", 3, 64, 7, 112)
    inputs, side = 64, 56
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for block in range(depth):
            name, halve = f"stage{stage}.{block}", stage > 0 and block == 0
            conv(f"{name}.conv1", inputs, width, 1, side)
            side //= 2 if halve else 1
            conv(f"{name}.conv2", width, width, 3, side)
            conv(f"{name}.conv3", width, 4 * width, 1, side)
            if block == 0:
                conv(f"{name}.shortcut", inputs, 4 * width, 1, side)
            inputs = 4 * width
    forward += linear("fc", inputs, 1000, 1)
    return forward[::-1]


def linear(name: str, inputs: int, outputs: int, tokens: int, bias: bool = True) -> list[Tensor]:
    weight = Tensor(f"{name}.weight", inputs * outputs, inputs * outputs * tokens)
    return [weight, Tensor(f"{name}.bias", outputs, 0)] if bias else [weight]


def norm(name: str, width: int, tokens: int, bias: bool = True) -> list[Tensor]:
    weight = Tensor(f"{name}.weight", width, width * tokens)
    return [weight, Tensor(f"{name}.bias", width, 0)] if bias else [weight]


def extra(tensors: list[Tensor], work: int) -> list[Tensor]:
    """Adds operations that have no weights of their own, such as attention's, to the last tensor's share."""
    return [*tensors[:-1], tensors[-1]._replace(work=tensors[-1].work + work)]


def bert(layers: int = 12, width: int = 768, tokens: int = 512) -> list[Tensor]:
    """BERT-base, uncased, with its pooler and a classifier of two classes."""
    forward = [
        Tensor("embeddings.word", 30522 * width, 0),
        Tensor("embeddings.position", 512 * width, 0),
        Tensor("embeddings.type", 2 * width, 0),
        *norm("embeddings.norm", width, tokens),
    ]
    for i in range(layers):
        for part in ("query", "key"):
            forward += linear(f"layer{i}.{part}", width, width, tokens)
        forward += extra(linear(f"layer{i}.value", width, width, tokens), 2 * tokens * tokens * width)
        forward += linear(f"layer{i}.output", width, width, tokens) + norm(f"layer{i}.norm1", width, tokens)
        forward += linear(f"layer{i}.up", width, 4 * width, tokens)
        forward += linear(f"layer{i}.down", 4 * width, width, tokens) + norm(f"layer{i}.norm2", width, tokens)
    forward += linear("pooler", width, width, 1) + linear("classifier", width, 2, 1)
    return forward[::-1]


def gpt2(layers: int, width: int, tokens: int = 1024) -> list[Tensor]:
    """GPT-2. Its output layer shares the embedding's weight, whose gradient is therefore ready last."""
    vocabulary = 50257
    forward = [Tensor("wte", vocabulary * width, 0), Tensor("wpe", 1024 * width, 0)]
    for i in range(layers):
        forward += norm(f"layer{i}.norm1", width, tokens)
        forward += extra(linear(f"layer{i}.qkv", width, 3 * width, tokens), 2 * tokens * tokens * width)
        forward += linear(f"layer{i}.project", width, width, tokens) + norm(f"layer{i}.norm2", width, tokens)
        forward += linear(f"layer{i}.up", width, 4 * width, tokens)
        forward += linear(f"layer{i}.down", 4 * width, width, tokens)
    return extra(forward + norm("norm", width, tokens), vocabulary * width * tokens)[::-1]


def llama(layers: int = 22, width: int = 2048, tokens: int = 2048) -> list[Tensor]:
    """A Llama of 1.1 billion parameters: grouped keys and values (256 wide), gated MLP, untied output."""
    forward = [Tensor("embedding", 32000 * width, 0)]
    for i in range(layers):
        forward += norm(f"layer{i}.norm1", width, tokens, bias=False)
        forward += linear(f"layer{i}.query", width, width, tokens, bias=False)
        forward += linear(f"layer{i}.key", width, 256, tokens, bias=False)
        value = linear(f"layer{i}.value", width, 256, tokens, bias=False)
        forward += extra(value, 2 * tokens * tokens * width)
        forward += linear(f"layer{i}.output", width, width, tokens, bias=False)
        forward += norm(f"layer{i}.norm2", width, tokens, bias=False)
        for part in ("gate", "up", "down"):
            forward += linear(f"layer{i}.{part}", width, 5632, tokens, bias=False)
    forward += norm("norm", width, tokens, bias=False)
    return (forward + linear("output", width, 32000, tokens, bias=False))[::-1]


MODELS = [
    Model("ResNet50", resnet((3, 4, 6, 3)), 32, 26),
    Model("ResNet101", resnet((3, 4, 23, 3)), 80, 45),
    Model("BERT-base", bert(), 90, 24),
    Model("GPT-2 small", gpt2(12, 768), 70, 14),
    Model("GPT-2 medium", gpt2(24, 1024), 190, 34),
    Model("Llama 1.1 B", llama(), 560, 95),
]


class Network(NamedTuple):
    """Ranks, bandwidth, latency of a collective; and the codecs' encode and decode rates on its GPU, GB/s."""

    name: str
    ranks: int
    gigabytes: float
    latency_us: int
    h200: bool
    encode: dict[str, int]


V100 = {"DGC": 30, "1-bit": 80}
H200 = {"DGC": 150, "1-bit": 400}
NETWORKS = [
    Network("V100 PCIe", 8, 3.0, 100, False, V100),
    Network("V100 25 Gb", 8, 2.8, 150, False, V100),
    Network("H200 100 Gb", 16, 11.0, 50, True, H200),
    Network("H200 25 Gb", 8, 2.8, 80, True, H200),
]
PAYLOAD = {"DGC": 0.02, "1-bit": 1 / 32}  # of the gradient's bytes: 1 % of values with their indices; one bit
ENCODE_LATENCY_US = 250
LONG = 1 << 40  # a knot beyond every group: it gives the last slope


def line(latency_us: float, bytes_per_second: float) -> list[list[int]]:
    """The affine cost: a latency and a rate."""
    latency = round(latency_us * 1e6)
    return [[0, latency], [LONG, latency + round(LONG / bytes_per_second * 1e12)]]


def methods(network: Network, codec: str) -> list[dict[str, Any]]:
    """Dense (ring all-reduce) and `codec` (all-gather), in the papers' affine model, which leaves decode
    out."""
    rate, others = network.gigabytes * 1e9, network.ranks - 1
    return [
        {
            "name": "dense",
            "encode": None,
            "exchange": line(network.latency_us, rate * network.ranks / (2 * others)),
            "decode": None,
        },
        {
            "name": codec,
            "encode": line(ENCODE_LATENCY_US, network.encode[codec] * 1e9),
            "exchange": line(network.latency_us, rate / (others * PAYLOAD[codec])),
            "decode": None,
        },
    ]


def instance(model: Model, network: Network, codec: str) -> dict[str, Any]:
    """One instance as sidcomp.planner.plan() takes it; forward takes half as long as backward."""
    backward = (model.h200_ms if network.h200 else model.v100_ms) * MS
    total = sum(t.work for t in model.tensors)
    tensors, done, before = [], 0, 0
    for t in model.tensors:  # differences of a rounded running sum, so that they add up
        done += t.work
        now = backward * done // total
        tensors.append({"name": t.name, "backward_ps": now - before, "bytes": 4 * t.elements})
        before = now
    return {
        "forward_ps": backward // 2,
        "tensors": tensors,
        "methods": methods(network, codec),
    }


def instances() -> Iterator[tuple[str, dict[str, Any]]]:
    """The 48: each model, network and codec."""
    for network in NETWORKS:
        for codec in PAYLOAD:
            for model in MODELS:
                name = f"{model.name}, {network.name}, {codec}"
                yield name, instance(model, network, codec)
