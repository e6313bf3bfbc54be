"""What a hook author would write today with torch's operations: each codec with error feedback.

Plain and careful, not slow on purpose: no Python loop over elements, no copy that is not needed. They stand
beside ours in benchmarks/bench_codec.py; a codec without an entry has no baseline there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, log, sqrt
from typing import Any

import torch

Tensor = torch.Tensor
BLOCK = 256


@dataclass
class Job:
    """What a baseline needs to know: n elements, k of them to be sent where it selects."""

    n: int
    k: int
    pos: int = 0  # counts encodes
    start: Tensor | None = None  # PowerSGD's Q

    @property
    def delta(self) -> float:
        return self.k / self.n


Encode = Callable[[Job, Tensor], tuple[Tensor, ...]]
Decode = Callable[[Job, tuple[Tensor, ...]], Tensor]


def _values(acc: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    return index, acc[index]


def _scatter(job: Job, payload: tuple[Tensor, ...]) -> Tensor:
    index, value = payload
    return value.new_zeros(job.n).index_add_(0, index, value)


def _topk(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    return _values(acc, torch.topk(acc.abs(), job.k, sorted=False).indices)


def _beyond(acc: Tensor, threshold: float | Tensor) -> tuple[Tensor, ...]:
    return _values(acc, (acc.abs() >= threshold).nonzero().flatten())


def _dgc(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    magnitude = acc.abs()
    sample = magnitude[torch.randint(job.n, (max(1000, job.n // 100),), device=acc.device)]
    threshold = torch.topk(sample, max(1, int(len(sample) * job.delta)), sorted=False).values.min()
    index = (magnitude >= threshold).nonzero().flatten()
    if len(index) > job.k:
        index = index[torch.topk(magnitude[index], job.k, sorted=False).indices]
    return _values(acc, index)


def _randk(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    return _values(acc, torch.randperm(job.n, device=acc.device)[: job.k])


def _sidco_e(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    magnitude = acc.abs()
    threshold = magnitude.mean() * log(4)
    tail = magnitude[magnitude >= threshold]
    return _beyond(acc, threshold + (tail.mean() - threshold) * log(0.25 / min(job.delta, 0.25)))


def _pareto(x: Tensor, ratio: float) -> Tensor:
    mean, var = x.mean(), x.var()
    shape = 0.5 * (1 - mean * mean / var)
    scale = 0.5 * mean * (mean * mean / var + 1)
    return scale / shape * (torch.exp(-shape * log(ratio)) - 1)


def _sidco_p(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    magnitude = acc.abs()
    threshold = _pareto(magnitude, 0.25)
    tail = magnitude[magnitude >= threshold] - threshold
    return _beyond(acc, threshold + _pareto(tail, min(job.delta / 0.25, 0.99)))


def _sidco_gp(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    magnitude = acc.abs()
    mean = magnitude.mean()
    s = torch.log(mean) - torch.log(magnitude.clamp_min(1e-38)).mean()
    alpha = (3 - s + torch.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    threshold = -mean / alpha * (log(0.25) + torch.lgamma(alpha))
    tail = magnitude[magnitude >= threshold] - threshold
    return _beyond(acc, threshold + _pareto(tail, min(job.delta / 0.25, 0.99)))


def _gaussiank(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    magnitude = acc.abs()
    threshold = acc.mean().abs() + acc.std() * sqrt(2) * torch.erfinv(torch.tensor(1 - job.delta))
    for _ in range(3):
        chosen = int((magnitude >= threshold).sum())
        if 2 / 3 * job.k <= chosen <= 4 / 3 * job.k:
            break
        threshold *= 0.5 if chosen < job.k else 1.5
    return _beyond(acc, threshold)


def _redsync(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    magnitude = acc.abs()
    mean, top, ratio = magnitude.mean(), magnitude.max(), 0.8
    index = torch.empty(0)
    while len(index) < job.k and ratio > 0:
        index = (magnitude > mean + ratio * (top - mean)).nonzero().flatten()
        ratio -= 0.2
    if len(index) < job.k:
        return _topk(job, acc)
    return _values(acc, index[torch.topk(magnitude[index], job.k, sorted=False).indices])


def _sign(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    return ((acc >= 0).to(torch.uint8),)


def _of_sign(job: Job, payload: tuple[Tensor, ...]) -> Tensor:
    return payload[0].to(torch.float32).mul_(2).sub_(1)


def _efsign(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    return (acc >= 0).to(torch.uint8), acc.abs().mean()


def _of_efsign(job: Job, payload: tuple[Tensor, ...]) -> Tensor:
    return _of_sign(job, payload).mul_(payload[1])


def _onebit(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    mask = acc >= 0
    count = mask.sum()
    above = (acc * mask).sum() / count.clamp_min(1)
    below = (acc * ~mask).sum() / (job.n - count).clamp_min(1)
    return mask.to(torch.uint8), above, below


def _of_onebit(job: Job, payload: tuple[Tensor, ...]) -> Tensor:
    return torch.where(payload[0].bool(), payload[1], payload[2])


def _ssdm(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    norm = acc.norm()
    return (torch.rand_like(acc) < 0.5 + acc / (2 * norm)).to(torch.uint8), norm


def _qsgd(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    norm = acc.norm()
    level = acc.abs() * (127 / norm)
    low = level.floor()
    low += (torch.rand_like(acc) < level - low).to(torch.float32)
    return (low * acc.sign()).to(torch.int8), norm / 127


def _of_int8(job: Job, payload: tuple[Tensor, ...]) -> Tensor:
    return payload[0].to(torch.float32).mul_(payload[1])


def _terngrad(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    bound = 2.5 * acc.std()
    clipped = acc.clamp(-bound, bound)
    scale = clipped.abs().max()
    chosen = torch.rand_like(acc) < clipped.abs() / scale
    return (clipped.sign() * chosen).to(torch.int8), scale


def _blocks(acc: Tensor) -> Tensor:
    return torch.nn.functional.pad(acc, (0, -len(acc) % BLOCK)).view(-1, BLOCK)


def _int(levels: int) -> Encode:
    def encode(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
        x = _blocks(acc)
        scale = x.abs().amax(1, keepdim=True).clamp_min(1e-38) / levels
        return (x / scale).round().to(torch.int8), scale

    return encode


def _of_blocks(job: Job, payload: tuple[Tensor, ...]) -> Tensor:
    return (payload[0].to(torch.float32) * payload[1]).view(-1)[: job.n]


def _int2(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    x = _blocks(acc)
    magnitude = x.abs()
    level = torch.where(magnitude >= 1.2302517 * magnitude.mean(1, keepdim=True), 1.5104176, 0.45278003)
    scale = (magnitude * level).sum(1, keepdim=True) / (level * level).sum(1, keepdim=True)
    return (level > 1).to(torch.uint8) + 2 * (x < 0).to(torch.uint8), scale


def _ternary(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    x = _blocks(acc)
    magnitude = x.abs()
    high = magnitude >= 0.76703224 * magnitude.mean(1, keepdim=True)
    scale = (magnitude * high).sum(1, keepdim=True) / high.sum(1, keepdim=True).clamp_min(1)
    return (x.sign() * high).to(torch.int8), scale


def _of_int2(job: Job, payload: tuple[Tensor, ...]) -> Tensor:
    levels = torch.tensor([0.45278003, 1.5104176, -0.45278003, -1.5104176])
    return (levels[payload[0].int()] * payload[1]).view(-1)[: job.n]


def _fp8(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    x = _blocks(acc)
    scale = x.abs().amax(1, keepdim=True).clamp_min(1e-38) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def _powersgd(job: Job, acc: Tensor) -> tuple[Tensor, ...]:
    """Rank 4, one matrix as square as n elements go, orthonormal columns by QR, Q kept."""
    cols = ceil(job.n**0.5)
    m = torch.nn.functional.pad(acc, (0, -job.n % cols)).view(-1, cols)
    q = acc.new_empty(cols, 4).normal_() if job.start is None else job.start
    p, _ = torch.linalg.qr(m @ q)
    job.start = m.T @ p
    return p, job.start


def _of_factors(job: Job, payload: tuple[Tensor, ...]) -> Tensor:
    return (payload[0] @ payload[1].T).view(-1)[: job.n]


def _half(dtype: torch.dtype) -> Encode:
    return lambda job, acc: (acc.to(dtype),)


def _of_half(job: Job, payload: tuple[Tensor, ...]) -> Tensor:
    return payload[0].to(torch.float32)


BASELINES: dict[str, tuple[Encode, Decode]] = {
    "fp16": (_half(torch.float16), _of_half),
    "bf16": (_half(torch.bfloat16), _of_half),
    "powersgd": (_powersgd, _of_factors),
    "topk": (_topk, _scatter),
    "sidco-e": (_sidco_e, _scatter),
    "sidco-gp": (_sidco_gp, _scatter),
    "sidco-p": (_sidco_p, _scatter),
    "gaussiank": (_gaussiank, _scatter),
    "dgc": (_dgc, _scatter),
    "randk": (_randk, _scatter),
    "redsync": (_redsync, _scatter),
    "signsgd": (_sign, _of_sign),
    "signum": (_sign, _of_sign),
    "efsignsgd": (_efsign, _of_efsign),
    "onebit": (_onebit, _of_onebit),
    "ssdm": (_ssdm, _of_efsign),
    "marsit": (_sign, _of_sign),
    "qsgd": (_qsgd, _of_int8),
    "terngrad": (_terngrad, _of_int8),
    "terngrad-shared": (
        _terngrad,
        _of_int8,
    ),  # a hook would agree on the scale by an all-reduce of one number
    "int8": (_int(127), _of_blocks),
    "int4": (_int(7), _of_blocks),
    "int2": (_int2, _of_int2),
    "ternary": (_ternary, _of_blocks),
    "fp8": (_fp8, _of_blocks),
}


@dataclass
class Baseline:
    """One codec's baseline over a group, with error feedback."""

    name: str
    job: Job
    gradients: list[Tensor]
    residual: Tensor
    ranks: int
    sent: list[Any] = field(default_factory=list)

    def encode(self) -> None:
        encode, decode = BASELINES[self.name]
        acc = self.residual + self.gradients[self.job.pos % len(self.gradients)]
        self.job.pos += 1
        payload = encode(self.job, acc)
        if decode is _scatter:  # what was sent is whole: no need to make a vector of it
            acc[payload[0]] = 0
            self.residual = acc
        else:
            self.residual = acc.sub_(decode(self.job, payload))
        self.sent = [*self.sent[1 - self.ranks :], payload]

    def decode(self) -> Tensor:
        decode = BASELINES[self.name][1]
        out = self.residual.new_zeros(self.job.n)
        for payload in self.sent:
            if decode is _scatter:
                out.index_add_(0, *payload)
            else:
                out += decode(self.job, payload)
        return out.mul_(1 / self.ranks)
