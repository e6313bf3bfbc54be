"""What train.py trains: data that every machine has, a model, and how to measure it."""

import re
import sysconfig
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Task(Protocol):
    """title: the model in words; metric: what `measure` measures; steps, batch, lr, momentum: good ones;
    data: what there is. adamw: trained by AdamW, which has no momentum to choose, and not by SGD."""

    title: str
    metric: str
    unit: str
    steps: int
    batch: int
    lr: float
    momentum: float
    adamw: bool
    data: str
    device: torch.device

    def model(self) -> nn.Module: ...

    def loss(self, model: nn.Module, step: int, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The loss of this rank's batch of step `step`, and what to hand in at the next one."""
        ...

    def measure(self, model: nn.Module) -> tuple[float, int]:
        """The metric summed over this rank's share of what is held out, and over how many."""
        ...

    def apart(self, dense: float, ours: float) -> str:
        """How far the second run's metric is from the first's, in words."""
        ...


class GRULanguageModel(nn.Module):
    """One GRU layer over bytes: (batch, time) uint8 -> (batch, time, 256) logits, and the hidden state."""

    def __init__(self, embedding: int = 128, hidden: int = 768) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, embedding)
        self.gru = nn.GRU(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 256)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, state = self.gru(self.embedding(x.int()), state)
        return self.head(y), state


class LanguageModel:
    """Predicts the next byte of the source text of Python's own standard library.

    Every tenth file is held out. Each rank reads its own part of the rest as `batch` streams, TIME bytes a
    step, and carries the hidden state along. What a step reads depends on its number alone, so a resumed run
    reads the same.
    """

    title = "GRU language model"
    metric = "validation loss"
    unit = "nats per byte"
    steps = 450
    batch = 32
    # With momentum 0.9 and rate 1 the dense loss is as good, but top-k at 1 % ends 5 % above it, not 0.5 %:
    # what error feedback sends late, momentum carries on for longer.
    lr = 2.5
    momentum = 0.7
    adamw = False

    TIME = 16
    MAX_BYTES = 4 << 20
    HELD_OUT = (48, 256)  # windows and bytes of each

    def __init__(self, rank: int, world: int, batch: int, device: torch.device) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        texts = [f.read_bytes() for f in files]
        train = b"".join(t for i, t in enumerate(texts) if i % 10 != 9)[: self.MAX_BYTES]
        held = b"".join(t for i, t in enumerate(texts) if i % 10 == 9)
        windows, length = self.HELD_OUT
        if len(train) < 1 << 18 or len(held) < windows * (length + 1):
            raise SystemExit(
                f"{len(train)} bytes of Python source are too few: is the standard library zipped?"
            )
        self.data = f"{len(files)} files, {len(train):,} bytes to train on and {len(held):,} held out"
        self.device = device
        symbols, text = self.symbols(train, held)
        shard = symbols.chunk(world)[rank].clone()
        self.streams = shard[: len(shard) // batch * batch].view(batch, -1).to(device)
        starts = torch.arange(windows) * (len(text) // windows)
        self.held = text[starts[:, None] + torch.arange(length + 1)].chunk(world)[rank].to(device)

    def symbols(self, train: bytes, held: bytes) -> tuple[Tensor, Tensor]:
        """What the model reads of both: bytes."""
        one, other = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held))
        return one, other

    def model(self) -> nn.Module:
        return GRULanguageModel().to(self.device)

    def loss(self, model: nn.Module, step: int, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        at = step * self.TIME % (self.streams.shape[1] - self.TIME)
        x = self.streams[:, at : at + self.TIME + 1]
        logits, hidden = model(x[:, :-1], carry)
        return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten().long()), hidden.detach()

    def measure(self, model: nn.Module) -> tuple[float, int]:
        logits, _ = model(self.held[:, :-1])
        target = self.held[:, 1:].flatten().long()
        return F.cross_entropy(logits.flatten(0, 1), target, reduction="sum").item(), len(target)

    def apart(self, dense: float, ours: float) -> str:
        return f"{ours / dense - 1:+.1%}"


class Digits:
    """scikit-learn's 1797 handwritten digits of 8 x 8 pixels, by a perceptron with two wide hidden layers."""

    title = "digits by a perceptron"
    metric = "accuracy"
    unit = "of the held-out digits"
    steps = 300
    batch = 32
    lr = 0.05
    momentum = 0.9
    adamw = False

    def __init__(self, rank: int, world: int, batch: int, device: torch.device) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise SystemExit("--task digits needs scikit-learn: pip install scikit-learn") from None
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        x = torch.from_numpy(images).float()[order] / 16
        y = torch.from_numpy(labels).long()[order]
        cut = len(y) * 4 // 5
        self.data = f"{cut} digits to train on and {len(y) - cut} held out"
        self.device, self.batch, self.rank = device, batch, rank
        self.x, self.y = x[:cut].chunk(world)[rank].to(device), y[:cut].chunk(world)[rank].to(device)
        self.held = x[cut:].chunk(world)[rank].to(device), y[cut:].chunk(world)[rank].to(device)

    def model(self) -> nn.Module:
        width = 1024
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        return nn.Sequential(*layers).to(self.device)

    def loss(self, model: nn.Module, step: int, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        draw = torch.Generator().manual_seed(1000 * step + self.rank)
        rows = torch.randint(len(self.y), (self.batch,), generator=draw).to(self.device)
        return F.cross_entropy(model(self.x[rows]), self.y[rows]), None

    def measure(self, model: nn.Module) -> tuple[float, int]:
        x, y = self.held
        return float((model(x).argmax(1) == y).sum()), len(y)

    def apart(self, dense: float, ours: float) -> str:
        return f"{100 * (ours - dense):+.1f} points"


class DigitsByPerceptron(Digits):
    """The same digits by a deeper perceptron of 6.4 million parameters: six square layers of one size."""

    title = "digits by a deep perceptron"
    steps = 100
    batch = 256
    lr = 0.02

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in [(64, 1024), *[(1024, 1024)] * 6]:
            linear = nn.Linear(before, after)
            nn.init.kaiming_normal_(linear.weight)  # the default shrinks seven layers' signal to nothing
            layers += [linear, nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(1024, 10)).to(self.device)


class DigitsByConvolution(Digits):
    """The same digits by a convolutional network of 6 million parameters, most of them in the last layers."""

    title = "digits by a CNN"
    steps = 150
    batch = 64

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
        channels = (1, 64, 128, 256, 512)
        for i, (before, after) in enumerate(pairwise(channels)):
            # Normed, or the layers after it learn nothing for the first epochs.
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if i in (1, 2) else []
        layers += [nn.Flatten(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)]
        return nn.Sequential(*layers).to(self.device)


class Bottleneck(nn.Module):
    """A ResNet's block: three convolutions, each with batch normalization, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *self._normed(inputs, width, 1, 1), nn.ReLU(),
            *self._normed(width, width, 3, stride), nn.ReLU(),
            *self._normed(width, 4 * width, 1, 1),
        )  # fmt: skip
        alike = inputs == 4 * width and stride == 1
        self.shortcut = nn.Identity() if alike else nn.Sequential(*self._normed(inputs, 4 * width, 1, stride))

    @staticmethod
    def _normed(inputs: int, outputs: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        return conv, nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


class DigitsByResNet50(Digits):
    """The same digits by a ResNet-50 with a quarter of its channels: 161 tensors, 1.5 million parameters.

    The sizes of the tensors are distributed as those of the original, at a sixteenth. Its first convolution
    and its pooling are left out of the strides, because the images have 8 x 8 pixels.
    """

    title = "digits by a small ResNet-50"
    steps = 150
    depths: tuple[int, ...] = (3, 4, 6, 3)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(16), nn.ReLU()]
        inputs = 16
        for stage, depth in enumerate(self.depths):
            width = 16 << stage
            for block in range(depth):
                layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
                inputs = 4 * width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
        return nn.Sequential(*layers).to(self.device)


class DigitsByResNet101(DigitsByResNet50):
    """The same with ResNet-101's blocks: 314 tensors, 2.7 million parameters."""

    title = "digits by a small ResNet-101"
    depths = (3, 4, 23, 3)


class TransformerBlock(nn.Module):
    """BERT's layer with the norms before attention and MLP, causal: 16 tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        parts = (f(y).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(*(p.transpose(1, 2) for p in parts), is_causal=True)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TransformerLanguageModel(nn.Module):
    """Twelve layers over bytes, as many tensors as BERT-base has but one: (batch, time) uint8 -> logits."""

    def __init__(self, width: int = 96, layers: int = 12, heads: int = 4, time: int = 64) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(256, width), nn.Embedding(time, width)
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 256)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        place = torch.arange(x.shape[1], device=x.device)
        y = self.norm(self.blocks(self.word(x.int()) + self.position(place)))
        return self.head(torch.tanh(self.pool(y))), y[:0]


class BertSized(LanguageModel):
    """Predicts the next byte by a transformer with the tensors of BERT-base at an eighth of its width: 200
    tensors, 1.4 million parameters."""

    title = "transformer language model"
    batch = 16
    lr = 0.15
    momentum = 0.9
    TIME = 32
    HELD_OUT = (192, 32)

    def model(self) -> nn.Module:
        return TransformerLanguageModel().to(self.device)


class GPTBlock(nn.Module):
    """A layer of a causal transformer: RMSNorm, rotary positions, squared ReLU, no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.output = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        def turned(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

        parts = self.attention(self.norm1(x)).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        # With so short a context, the backward pass of scaled_dot_product_attention is slower on a CPU.
        scores = turned(query) @ turned(key).transpose(2, 3) * query.shape[-1] ** -0.5 + mask
        y = scores.softmax(-1).to(value.dtype) @ value
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class GPTModel(nn.Module):
    """A transformer over bytes: (batch, time) uint8 -> (batch, time, 256) logits."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, time: int = 64) -> None:
        super().__init__()
        self.word = nn.Embedding(256, width)
        self.blocks = nn.ModuleList([GPTBlock(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        half = width // heads // 2
        angles = torch.arange(time)[:, None] / 100 ** (torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if name.endswith(("output.weight", "down.weight", "head.weight")):
                nn.init.zeros_(p)  # every layer begins as the identity
            elif name.endswith(("attention.weight", "up.weight")):
                nn.init.normal_(p, std=width**-0.5)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, n = self.word(x.int()), x.shape[1]
        mask = torch.full((n, n), -torch.inf, device=x.device).triu(1)
        for block in self.blocks:
            y = block(y, self.cos[:n], self.sin[:n], mask)
        return self.head(self.norm(y)), y[:0].clone()  # FSDP warns of views


class GPT(LanguageModel):
    """Predicts the next byte by a transformer that AdamW trains, as most language models are: four layers of
    width 256, 3.3 million parameters."""

    title = "transformer language model, AdamW"
    steps = 450
    batch = 8
    lr = 0.003
    adamw = True
    TIME = 64
    HELD_OUT = (192, 64)

    def model(self) -> nn.Module:
        return GPTModel(time=self.TIME).to(self.device)


class LSTMLanguageModel(nn.Module):
    """Two LSTM layers over bytes: (batch, time) uint8 -> logits, and hidden state and cell in one tensor."""

    def __init__(self, embedding: int = 128, hidden: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, 256)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, (h, c) = self.lstm(self.embedding(x.int()), None if state is None else (state[0], state[1]))
        return self.head(y), torch.stack((h, c))


class LSTMSized(LanguageModel):
    """Predicts the next byte by two LSTM layers, which SIDCo and RedSync train: 3.6 million parameters."""

    title = "LSTM language model"

    def model(self) -> nn.Module:
        return LSTMLanguageModel().to(self.device)


class WordModel(nn.Module):
    """An LSTM layer over words: (batch, time) int16 -> logits, and hidden state and cell in one tensor."""

    def __init__(self, words: int, embedding: int = 192, hidden: int = 384) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, words)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, (h, c) = self.lstm(self.embedding(x.int()), None if state is None else (state[0], state[1]))
        return self.head(y), torch.stack((h, c))


class Words(LanguageModel):
    """Predicts the next of 4,096 words by an LSTM: of its 3.3 million parameters seven in ten are in the
    embedding and in the head."""

    title = "word-level LSTM, AdamW"
    unit = "nats per word"
    batch = 8
    lr = 0.003
    adamw = True
    TIME = 32
    HELD_OUT = (96, 128)
    WORDS = 4096  # the most frequent ones; 0 is any other

    def symbols(self, train: bytes, held: bytes) -> tuple[Tensor, Tensor]:
        one, other = (re.findall(rb"[A-Za-z_]+|\d|\n *|[^\w\s]", text) for text in (train, held))
        known = {word: i for i, (word, _) in enumerate(Counter(one).most_common(self.WORDS - 1), start=1)}
        read, kept = (torch.tensor([known.get(w, 0) for w in x], dtype=torch.int16) for x in (one, other))
        return read, kept

    def model(self) -> nn.Module:
        return WordModel(self.WORDS).to(self.device)


TASKS: dict[str, type[LanguageModel] | type[Digits]] = {
    "lm": LanguageModel,
    "digits": Digits,
    "mlp": DigitsByPerceptron,
    "cnn": DigitsByConvolution,
    "resnet50": DigitsByResNet50,
    "resnet101": DigitsByResNet101,
    "transformer": BertSized,
    "gpt": GPT,
    "lstm": LSTMSized,
    "words": Words,
}
