"""MLS-Bench's gradient compression task: test accuracy at a hundredth of the elements, one worker.

    python -m benchmarks.mls_bench                    # in small: digits, ResNet-20 and VGG-11-BN, 10 epochs
    python -m benchmarks.mls_bench --data FOLDER      # as the task says: CIFAR, 200 epochs, three networks

The task (mls-bench.com, "optimization-gradient-compression") trains ResNet-20 and ResNet-56 on CIFAR-10 and
VGG-11-BN on CIFAR-100 by SGD with momentum under a cosine schedule for 200 epochs. Each gradient goes tensor
by tensor through compress(tensor, name) and decompress() at compress_ratio=0.01. The metric is the best test
accuracy. The task's page does not give rate, decay, batch and augmentation; here they are 0.1, 5e-4, 128,
random crops and flips. FOLDER holds cifar-10-batches-py and cifar-100-python as their authors publish them.

`topk_ef` is the task's own baseline: exact top-k for each tensor with error feedback. Bits an element count
what compress() returns: 32 for each value and 32 for each index there, whole payloads with their headers for
sidcomp. Tensors of less than 1024 elements are sent uncompressed by sidcomp's rows.
"""

import json
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import sidcomp
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from benchmarks.common import RESULTS, command, report

SEEDS = 42, 123, 456  # of the task's leaderboard
SMALL = 1024  # elements: a smaller tensor costs more as a payload than as it is


class Data(NamedTuple):
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    pad: int  # pixels, of random crops


# ---- networks --------------------------------------------------------------------------------------------


class Basic(nn.Module):
    """Two convolutions and a shortcut, which pads the channels with zeros (He et al. 2016, option A)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.stride, self.more = stride, width - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_b(self.b(F.relu(self.norm_a(self.a(x)))))
        x = x[:, :, :: self.stride, :: self.stride]
        return F.relu(y + F.pad(x, (0, 0, 0, 0, self.more // 2, self.more - self.more // 2)))


def resnet(depth: int, classes: int) -> nn.Module:
    """He et al. 2016, section 4.2: 6 n + 2 layers of 16, 32 and 64 channels."""
    blocks: list[nn.Module] = []
    inputs = 16
    for width in (16, 32, 64):
        for i in range((depth - 2) // 6):
            blocks.append(Basic(inputs, width, 2 if i == 0 and width > 16 else 1))
            inputs = width
    first = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def vgg11(classes: int) -> nn.Module:
    """Simonyan and Zisserman 2015, column A, with batch normalization and one linear layer."""
    layers: list[nn.Module] = []
    inputs = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width:
            layers += [nn.Conv2d(inputs, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


# ---- data ------------------------------------------------------------------------------------------------


def digits(scale: int) -> Data:
    """scikit-learn's 1797 digits of 8 x 8 pixels, enlarged by `scale`, in three equal channels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[order]).float().reshape(-1, 1, 8, 8) / 16
    x = F.interpolate((x - x.mean()) / x.std(), scale_factor=scale).expand(-1, 3, -1, -1).contiguous()
    y = torch.from_numpy(labels[order]).long()
    cut = len(y) * 4 // 5
    return Data(x[:cut], y[:cut], x[cut:], y[cut:], 10, scale // 2)


def cifar(folder: Path, classes: int) -> Data:
    names = [f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)] + ["cifar-10-batches-py/test_batch"]
    if classes == 100:
        names = ["cifar-100-python/train", "cifar-100-python/test"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise SystemExit(f"--data {folder}: there is no {missing[0]}; unpack the CIFAR archives there")
    parts = [pickle.loads((folder / name).read_bytes(), encoding="latin1") for name in names]
    x = [torch.from_numpy(p["data"]).reshape(-1, 3, 32, 32).float() / 255 for p in parts]
    y = [torch.tensor(p["labels" if classes == 10 else "fine_labels"]) for p in parts]
    train = torch.cat(x[:-1])
    middle, spread = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    return Data((train - middle) / spread, torch.cat(y[:-1]), (x[-1] - middle) / spread, y[-1], classes, 4)


def batches(data: Data, size: int, draw: torch.Generator, flip: bool) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(data.y), generator=draw)
    side = data.x.shape[-1]
    place = torch.arange(side)
    for rows in order.split(size):
        padded, image = F.pad(data.x[rows], [data.pad] * 4), torch.arange(len(rows))
        top, left = torch.randint(2 * data.pad + 1, (2, len(rows), 1), generator=draw)
        x = padded[image[:, None, None], :, (top + place)[:, :, None], (left + place)[:, None]]
        x = x.permute(0, 3, 1, 2)  # the channels last, after this indexing
        if flip:
            turned = torch.rand(len(rows), generator=draw) < 0.5
            x = torch.where(turned[:, None, None, None], x.flip(3), x)
        yield x.contiguous(), data.y[rows]


# ---- compressors, with the task's interface --------------------------------------------------------------


class Compressor:
    """Sends all. `compress` returns the tensors that would be sent, and what the rank itself knows."""

    def __init__(self, compress_ratio: float = 0.01) -> None:
        self.ratio = compress_ratio

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        return [tensor.clone()], None

    def decompress(self, compressed_tensors: list[Tensor], ctx: Any) -> Tensor:
        return compressed_tensors[0]


class TopKWithFeedback(Compressor):
    """The task's baseline `topk_ef`, by torch's operations."""

    def __init__(self, compress_ratio: float = 0.01) -> None:
        super().__init__(compress_ratio)
        self.residual: dict[str, Tensor] = {}

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        x = tensor.flatten() + self.residual.get(name, 0)
        index = x.abs().topk(max(1, int(self.ratio * x.numel()))).indices
        value = x[index]
        self.residual[name] = x.index_fill(0, index, 0)
        return [value, index.int()], tensor.shape

    def decompress(self, compressed_tensors: list[Tensor], ctx: Any) -> Tensor:
        value, index = compressed_tensors
        return torch.zeros(ctx.numel()).index_copy(0, index.long(), value).reshape(ctx)


class Sidcomp(Compressor):
    """A sidcomp.Compressor for each tensor."""

    def __init__(self, codec: str, **parameters: Any) -> None:
        super().__init__()
        self.codec, self.parameters = codec, parameters
        self.of: dict[str, sidcomp.Compressor] = {}

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        if tensor.numel() < SMALL:
            return [tensor.clone()], None
        if name not in self.of:
            self.of[name] = sidcomp.Compressor(
                self.codec, tensor.numel(), group=len(self.of), shapes=[tensor.shape], **self.parameters
            )
        return [self.of[name].encode(tensor.contiguous())], (name, tensor.shape)

    def decompress(self, compressed_tensors: list[Tensor], ctx: Any) -> Tensor:
        if ctx is None:
            return compressed_tensors[0]
        name, shape = ctx
        out: Tensor = self.of[name].decode(compressed_tensors[0]).reshape(shape)
        return out


FEW_BITS = {"values": "log4", "indices": "packed"}
WAYS: dict[str, Callable[[], Compressor]] = {
    "dense": Compressor,
    "topk_ef, the task's baseline": TopKWithFeedback,
    "topk, 1 % of the elements": lambda: Sidcomp("topk", density=0.01),
    "topk, 1 %, 4 bits, packed indices": lambda: Sidcomp("topk", density=0.01, **FEW_BITS),
    "topk, 3 %, 4 bits, packed indices": lambda: Sidcomp("topk", density=0.03, **FEW_BITS),
    "deadzone, 0.32 bits": lambda: Sidcomp("deadzone", bits=0.32),
    "powersgd, rank 1": lambda: Sidcomp("powersgd", r=1),
}


# ---- training --------------------------------------------------------------------------------------------


def train(
    make: Callable[[], nn.Module], way: str, data: Data, epochs: int, seed: int, flip: bool
) -> tuple[float, float]:
    """The best test accuracy, and the bits an element that were sent."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model, compressor, size = make(), WAYS[way](), 128 if flip else 64
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = epochs * math.ceil(len(data.y) / size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best, sent, elements = 0.0, 0, 0
    for _ in track(range(epochs), f"{way}, seed {seed}"):
        model.train()
        for x, y in batches(data, size, draw, flip):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                tensors, ctx = compressor.compress(p.grad, name)
                sent += sum(t.numel() * t.element_size() for t in tensors)
                elements += p.numel()
                p.grad.copy_(compressor.decompress(tensors, ctx))
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            parts = zip(data.test_x.split(500), data.test_y.split(500), strict=True)
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
        best = max(best, right / len(data.test_y))
    return best, 8 * sent / elements


def main(argv: list[str] | None = None) -> None:
    parser = command("mls_bench", __doc__)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with CIFAR-10 and CIFAR-100")
    parser.add_argument("--epochs", type=int, help="200 with --data, else 10")
    parser.add_argument("--seeds", type=int, default=3, help="of 42, 123, 456 (default 3)")
    parser.add_argument("--only", help="the rows that begin with this")
    parser.add_argument("--task", default="", help="the tasks that begin with this")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/mls-bench; rows stay until run again"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(torch.get_num_threads() if args.data else 1)
    epochs = args.epochs or (200 if args.data else 10)
    tasks: dict[str, tuple[Callable[[], nn.Module], Callable[[], Data]]] = {
        "ResNet-20, digits": (lambda: resnet(20, 10), lambda: digits(2)),
        "VGG-11-BN, digits": (lambda: vgg11(10), lambda: digits(4)),  # its five poolings need 32 pixels
    }
    if args.data:
        tasks = {
            "ResNet-20, CIFAR-10": (lambda: resnet(20, 10), lambda: cifar(args.data, 10)),
            "VGG-11-BN, CIFAR-100": (lambda: vgg11(100), lambda: cifar(args.data, 100)),
            "ResNet-56, CIFAR-10": (lambda: resnet(56, 10), lambda: cifar(args.data, 10)),
        }
    file = RESULTS / "mls-bench.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if args.save and file.exists() else []
    for task, (make, load) in tasks.items():
        if not task.startswith(args.task):
            continue
        data = load()
        for way in WAYS:
            if args.only and not way.startswith(args.only):
                continue
            found = [train(make, way, data, epochs, seed, bool(args.data)) for seed in SEEDS[: args.seeds]]
            row = {
                "task": task,
                "epochs": str(epochs),
                "compressor": way,
                "bits an element": f"{found[0][1]:.2f}",
                "best test accuracy": f"{100 * mean(best for best, _ in found):.2f} %",
                "each seed": " ".join(f"{100 * best:.2f}" for best, _ in found),
            }
            rows = [r for r in rows if (r["task"], r["compressor"]) != (task, way)] + [row]
    note = (
        "MLS-Bench's task of gradient compression; the module's text says what is the task's and what ours. "
        "Best test accuracy of all epochs, mean of the seeds 42, 123, 456."
    )
    report("mls-bench", "MLS-Bench: gradient compression", rows, note, RESULTS if args.save else None)


if __name__ == "__main__":
    main()
