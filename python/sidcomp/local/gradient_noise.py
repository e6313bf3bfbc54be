"""How much larger a rank's own gradient is than the mean of all ranks' gradients.

Adam divides by the root of the gradient's second moment. The second moment of a rank's own gradient is
1 / rho times that of the mean of all ranks, so a rank's own step is sqrt(rho) times as long as it should be.
On W ranks rho lies between 1 / W (the gradients are only noise) and 1 (they are equal).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.config.accuracy import adaptive
from sidcomp.errors import CheckpointError
from sidcomp.local.shards import is_sharded, own_part
from sidcomp.runtime import plain_data
from sidcomp.runtime.checkpoint_reader import unlike
from sidcomp.runtime.communicator import exchanging

SAMPLES = 16  # elements of each parameter
_DECAY = 0.9  # of the running sums of samples, in each exchange
NARROW = 64  # elements: shorter rows are not worth a number each
TURNS = 4  # exchanges in which each row is measured once
SKETCHES = 4  # numbers that a sketch has for each parameter
MEASURED = 16  # steps between two exchanges that are measured, at most
_SHIFTS = 4096  # places in the pool of signs at which a sketch's signs may begin
SHORTEST = 0.8  # the least decay of a running sum: a row is judged by five measurements or more

_WHAT = "summing what the noise correction has measured"

_DAMAGED = (
    'sidcomp.compress: "noise" {}: the dictionary is damaged, of another model or optimizer, or was saved '
    "with another noise_correction or by an earlier version of sidcomp"
)


def second_betas(optimizers: Sequence[torch.optim.Optimizer], of_all: bool = False) -> dict[int, float]:
    """How much of the second moment is left after one step, by the id of the parameter: of the optimizers
    with two betas, such as Adam, or of all. 0 where there is no such beta."""
    return {
        id(p): (group.get("betas") or [0.0])[-1]
        for optimizer in optimizers
        if of_all or adaptive(optimizer)
        for group in optimizer.param_groups
        for p in group["params"]
    }


def _sum(message: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Starts to sum over the ranks."""
    with exchanging(_WHAT):
        return dist.all_reduce(message, group=group, async_op=True)


def _wait(work: Any) -> None:
    with exchanging(_WHAT):
        work.wait()


def _no_squares(saved: object, like: torch.Tensor) -> str:
    """Returns what a checkpoint has in place of running sums of squares; "" if it has them. A sum that is not
    finite would make the factors NaN, and with them the parameters."""
    if found := unlike(saved, like):
        return found
    assert isinstance(saved, torch.Tensor)
    return "" if bool((saved.isfinite() & (saved >= 0)).all()) else "a tensor with NaN, Inf or less than 0"


def _count(saved: dict[str, Any], name: str) -> None:
    try:
        plain_data.count(saved.get(name), name)
    except CheckpointError as e:
        raise CheckpointError(_DAMAGED.format(f"counts no {name!r}")) from e


class GradientNoise:
    """Estimates, for each parameter, rho = |mean of the ranks' gradients|^2 / mean of |a rank's gradient|^2.

    The estimate comes from a few elements of each parameter, which the ranks sum in a small all-reduce with
    each exchange. It is used one exchange later, and it is the same on all ranks.

    parameters  float32, with the gradients that are measured. Of a shard of FSDP2, here and below, what the
                rank holds counts; the ranks of the group hold the same shards
    nbytes      here and below: what the ranks sum in an exchange, on average
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = list(parameters), group
        self._world = dist.get_world_size(group)
        own = list(map(own_part, self._parameters))
        device = own[0].device
        self._places = [_spread(p.numel(), device) for p in own]
        count = len(self._places)
        sizes = torch.tensor([len(x) for x in self._places], dtype=torch.int64, device=device)
        self._of = torch.repeat_interleave(torch.arange(count, dtype=torch.int64, device=device), sizes)
        self._message = torch.zeros(len(self._of) + count, dtype=torch.float32, device=device)
        self.nbytes = self._message.nbytes
        self._slots = torch.split(self._message[: len(self._of)], sizes.tolist())
        # of squares: the means', the ranks' own
        self._sums = torch.zeros(2, count, dtype=torch.float32, device=device)
        self._work: Any = None
        self._find()

    position = 0  # all its all-reduces have the same size

    def sample(self) -> int:
        """Starts to exchange samples of the present gradients. Every rank calls it at the same point. Returns
        the size of this all-reduce, in bytes."""
        self.land()
        n = len(self._of)
        for p, places, slot in zip(self._parameters, self._places, self._slots, strict=True):
            if (gradient := _gradient(p)) is None:
                slot.zero_()
            else:
                torch.take(gradient, places, out=slot)
        self._message[n:] = self._squares(self._message[:n])
        self._work = _sum(self._message, self._group)
        return 4 * (n + len(self._places))

    def stand_in(self, ahead: int) -> Any:
        """Starts to take part, with zeros, in the all-reduce of the next exchange, so many steps ahead.
        Returns its work, None if there is none."""
        return _sum(torch.zeros_like(self._message), self._group)

    def land(self) -> None:
        """Waits for the samples that were sent last, and adds them to the estimate."""
        if self._work is None:
            return
        work, self._work = self._work, None
        _wait(work)
        n = len(self._of)
        mean = self._message / self._world
        new = torch.stack((self._squares(mean[:n]), mean[n:]))
        # Values that are not finite count on no rank. The device decides, so that the host need not wait.
        # In place: it stays a tensor of training under inference_mode(), in which the program may save.
        self._sums.copy_(torch.where(torch.isfinite(new).all(), self._sums * _DECAY + new, self._sums))
        self._find()

    def _squares(self, samples: torch.Tensor) -> torch.Tensor:
        """The sum of squares of each parameter's samples."""
        return samples.new_zeros(len(self._places)).index_add_(0, self._of, samples.square())

    def _find(self) -> None:
        means, own = self._sums
        rho = torch.where(own > 0, means / own, torch.ones_like(own)).clamp_(1 / self._world, 1)
        self.factors = list(rho.rsqrt().unbind())  # on the device: 1 / sqrt(rho) of each parameter

    def state_dict(self) -> torch.Tensor:
        """The running sums, (2, parameters) float32."""
        self.land()
        return self._sums.clone()

    def check(self, saved: Any) -> None:
        """Raises CheckpointError if it cannot be a result of `state_dict`."""
        if found := _no_squares(saved, self._sums):
            raise CheckpointError(_DAMAGED.format(f"is {found}, and not sums of squares"))

    def load_state_dict(self, saved: Any) -> None:
        """Loads a result of `state_dict`. Raises CheckpointError."""
        self.check(saved)
        self._work = None
        self._sums.copy_(saved)
        self._find()


class SketchNoise:
    """Estimates the same rho for each parameter from the steps between two exchanges. A sample of the last
    gradient alone says little about the gradients before it, which the update comes from as well.

    Lengthening what the ranks exchange, as after one step, overshoots in the directions in which the steps
    since the last exchange have converged already. Lengthening each step makes the ranks' points more
    different than compression can repair. So `lengthen` makes each step longer by the root of the factor,
    and what is exchanged is lengthened by this root once more.

    In up to 16 steps between two exchanges a rank multiplies each gradient, as a matrix, from both sides by
    vectors of random signs, four times; the signs are the same on all ranks. The square of such a number is
    on average the square of the gradient's norm, and the square of the ranks' mean number that of the mean
    gradient's norm (Alon, Matias and Szegedy 1996, "The space complexity of approximating the frequency
    moments"). With each exchange the ranks sum five numbers for each parameter and measured step in a small
    all-reduce. The squares are running sums, which decay as the optimizer's own second moment does. They are
    used from the end of the exchange on, and they are the same on all ranks. It keeps 4 bytes for each
    element of the parameters.

    parameters  float32, with the gradients that are measured
    decays      of each parameter: how much of a running sum is left after one step, such as Adam's second
                beta; at least 0.9 is used
    every       steps between two exchanges
    factors     the root of 1 / sqrt(rho) of each parameter, on the parameters' device: half of the correction
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        decays: Sequence[float],
        every: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._parameters, self._group = list(parameters), group
        self._world = dist.get_world_size(group)
        self._values = list(map(own_part, self._parameters))
        device, count = self._values[0].device, len(self._values)
        self._before = [torch.empty_like(p) for p in self._values]
        self._stride = -(-every // MEASURED)
        self.nbytes = round(4 * count * (SKETCHES + 1) * every / self._stride)
        self._matrices = [
            (p.shape[0], p.numel() // p.shape[0]) if p.dim() > 1 and p.numel() else (1, p.numel())
            for p in self._values
        ]
        signs = torch.Generator("cpu").manual_seed(0)
        rows, columns = (max(of) + _SHIFTS for of in zip(*self._matrices, strict=True))
        self._left = _signs((SKETCHES, rows), signs).to(device)
        self._right = _signs((columns,), signs).to(device)
        # what is left of a running sum after 0, 1, ... measured steps
        ages = self._stride * torch.arange(MEASURED + 1, dtype=torch.int64, device=device)
        left = torch.tensor([max(d, _DECAY) for d in decays], dtype=torch.float32, device=device)
        self._left_after = left ** ages[:, None]
        self._steps = 0  # of the optimizer
        self._measured = 0  # steps since the last exchange
        # what was measured since the last exchange, and what the last exchange sent
        sizes = MEASURED, count, SKETCHES + 1
        self._window, self._other = torch.zeros(2, *sizes, dtype=torch.float32, device=device)
        # of squares: the means', the ranks' own
        self._sums = torch.zeros(2, count, dtype=torch.float32, device=device)
        self._sent: tuple[torch.Tensor, Any] | None = None  # what is being summed, and the work
        self._find()

    @property
    def position(self) -> int:
        """Counts the steps measured since the last all-reduce. It decides the size of the next one."""
        return self._measured

    def find(self) -> None:
        """Finds shards of FSDP where they are now."""
        if any(map(is_sharded, self._parameters)):
            self._values = list(map(own_part, self._parameters))

    @torch.no_grad()
    def mark(self) -> None:
        """Call it before the optimizer steps."""
        torch._foreach_copy_(self._before, self._values)

    @torch.no_grad()
    def lengthen(self) -> None:
        """Lengthens what the optimizer has done since `mark`. A factor of 1 changes no bit."""
        torch._foreach_lerp_(self._values, self._before, self._weights)

    @torch.no_grad()
    def note(self) -> None:
        """Measures the present gradients. Every rank calls it after each step, before `sample`."""
        self._steps += 1
        if self._steps % self._stride or self._measured == MEASURED:
            return
        sketches = self._window[self._measured, :, :SKETCHES]
        self._measured += 1
        first = self._steps * 1597 % _SHIFTS  # odd, so that consecutive steps have other signs
        for p, (rows, columns), sketch in zip(self._parameters, self._matrices, sketches, strict=True):
            gradient = _gradient(p)
            if gradient is None or not columns:
                sketch.zero_()
                continue
            # With `out`, because autocast, in which the optimizer may step, would make it 16 bits.
            folded = torch.empty(rows, dtype=torch.float32, device=sketch.device)
            torch.mv(gradient.reshape(rows, columns), self._right[first : first + columns], out=folded)
            torch.mv(self._left[:, first : first + rows], folded, out=sketch)

    @torch.no_grad()
    def sample(self) -> int:
        """Starts to exchange what was measured since the last exchange. Every rank calls it at the same
        point. Returns the size of this all-reduce, in bytes."""
        self.land()
        if not self._measured:
            return 0
        message = self._window[: self._measured]
        self._measured = 0
        self._window, self._other = self._other, self._window
        message[..., SKETCHES] = message[..., :SKETCHES].square().sum(-1)
        self._sent = message, _sum(message, self._group)
        return 4 * int(message.numel())

    def stand_in(self, ahead: int) -> Any:
        """As that of GradientNoise."""
        steps = range(self._steps + 1, self._steps + 1 + ahead)
        measured = min(MEASURED, self._measured + sum(step % self._stride == 0 for step in steps))
        return _sum(torch.zeros_like(self._window[:measured]), self._group) if measured else None

    @torch.no_grad()
    def land(self) -> None:
        """Waits for what was sent last, and adds it to the estimate."""
        if self._sent is None:
            return
        message, work = self._sent
        self._sent = None
        if work is not None:
            _wait(work)
        message /= self._world
        squares = torch.stack((message[..., :SKETCHES].square().sum(-1), message[..., SKETCHES]))
        # Values that are not finite count on no rank.
        squares = torch.where(torch.isfinite(squares).all(0), squares, 0.0)
        measured = len(message)
        self._sums *= self._left_after[measured]
        self._sums += (squares * self._left_after[:measured].flip(0)).sum(1)
        self._find()

    def _find(self) -> None:
        means, own = self._sums
        rho = torch.where(own > 0, means / own, 1.0).clamp_(1 / self._world, 1)
        factors = rho.pow_(-0.25)
        self.factors, self._weights = list(factors.unbind()), list((1 - factors).unbind())

    def forget(self) -> None:
        """Drops what was measured and is not part of the estimate yet."""
        self._measured, self._sent = 0, None

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, the running sums, (2, parameters) float32, and what was measured since the
        last exchange, (measured steps, parameters, 4) float32; and what arrived in the last exchange, if it
        is not part of the running sums yet, (measured steps, parameters, 5) float32, else of 0 steps."""
        message, work = self._sent or (self._other[:0], None)
        if work is not None:
            _wait(work)
        return {
            "steps": self._steps,
            "sums": self._sums.clone(),
            "window": self._window[: self._measured, :, :SKETCHES].clone(),
            "sent": message.clone(),
        }

    def check(self, saved: Any) -> None:
        """Raises CheckpointError if it cannot be a result of `state_dict`."""
        saved = saved if isinstance(saved, dict) else {}
        if found := _no_squares(saved.get("sums"), self._sums):
            raise CheckpointError(_DAMAGED.format(f"has no 'sums' of squares, but {found}"))
        for name, like in (("window", self._window[..., :SKETCHES]), ("sent", self._other)):
            values = saved.get(name)
            steps = len(values) if isinstance(values, torch.Tensor) and values.dim() else 0
            if found := unlike(values, like[:steps]):
                size = " x ".join(map(str, like.shape))
                said = f"has no {name!r} of at most {size} numbers, but {found}"
                raise CheckpointError(_DAMAGED.format(said))
        _count(saved, "steps")

    def load_state_dict(self, saved: Any) -> None:
        """Loads a result of `state_dict`. Raises CheckpointError."""
        self.check(saved)
        steps, window, sent = saved["steps"], saved["window"], saved["sent"]
        self._steps, self._measured = steps, len(window)
        self._sums.copy_(saved["sums"])
        self._window[: len(window), :, :SKETCHES].copy_(window)
        self._sent = (self._other[: len(sent)].copy_(sent), None) if len(sent) else None
        self._find()


def _spread(n: int, device: torch.device) -> torch.Tensor:
    """The places of a few of n elements: the first, the last, and those at equal distances between them. They
    are computed in whole numbers, because a float32 would round the last one of a large tensor up to n."""
    count = min(SAMPLES, n)
    return torch.arange(count, dtype=torch.int64, device=device) * (n - 1) // max(count - 1, 1)


def _gradient(p: torch.Tensor) -> torch.Tensor | None:
    """Returns the part of the gradient that this rank holds. An embedding's gradient may be sparse."""
    if p.grad is None:
        return None
    return p.grad.to_dense() if p.grad.is_sparse else own_part(p.grad)


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int64, device=generator.device)
    return signs.float().mul_(2).sub_(1)


class RowNoise:
    """Estimates rho = |mean of the ranks' gradients|^2 / mean of |a rank's own gradient|^2 for each row of
    each parameter. It is the same on all ranks. A row is what belongs to one index of the first dimension,
    such as the weights of one output or the vector of one token. A parameter whose rows would be shorter than
    64 elements, or that has one dimension, is a row. So the ranks exchange at most 1/128 of the gradients,
    apart from tiny parameters.

    In each exchange a fourth of the rows have their turn. With the same random signs on all ranks, a rank
    adds up the elements of its gradient's row, each times a sign, and their squares. The ranks sum these two
    numbers of each row in a small all-reduce. The square of the first sum is on average the square of the
    summed gradients' norm (Alon, Matias and Szegedy 1996, "The space complexity of approximating the
    frequency moments"). Both are running sums, which decay as the optimizer's own second moment does. They
    are used one exchange later.

    parameters  float32, with the gradients that are measured
    decays      of each parameter: how much of a running sum is left after one exchange, such as Adam's second
                beta to the power of the steps between two exchanges
    factors     1 / sqrt(rho), on the parameters' device: for each parameter a tensor of as many dimensions,
                (rows, 1, ...)
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], decays: Sequence[float], group: dist.ProcessGroup
    ) -> None:
        self._parameters, self._group = list(parameters), group
        self._world = dist.get_world_size(group)
        own = list(map(own_part, self._parameters))
        device = own[0].device
        rows = [p.shape[0] if p.dim() > 1 and p.numel() >= NARROW * p.shape[0] > 0 else 1 for p in own]
        self._rows = rows
        ends = list(accumulate(rows, initial=0))
        widths = [p.numel() // k for p, k in zip(own, rows, strict=True)]
        # of squares: the means', the ranks' own
        self._sums = torch.zeros(2, ends[-1], dtype=torch.float32, device=device)
        self._found = torch.ones(ends[-1], dtype=torch.float32, device=device)
        self.factors = [
            self._found[a:b].view([b - a, *[1] * (p.dim() - 1)][: p.dim()])
            for (a, b), p in zip(pairwise(ends), own, strict=True)
        ]
        left = [max(d**TURNS, SHORTEST) for d in decays]
        decay = torch.tensor(left, dtype=torch.float32, device=device)
        self._turns = [_Turn(rows, widths, decay, turn, device) for turn in range(TURNS)]
        self.nbytes = round(sum(turn.bytes for turn in self._turns) / TURNS)
        self._signs = torch.Generator(device)
        self._exchanges = 0
        self._work: Any = None

    @property
    def position(self) -> int:
        """Counts the exchanges so far. It decides the size of the next all-reduce."""
        return self._exchanges

    @torch.no_grad()
    def sample(self) -> int:
        """Starts to exchange what the present gradients show. Every rank calls it at the same point. Returns
        the size of this all-reduce, in bytes."""
        self.land()
        self._exchanges += 1
        turn = self._turns[self._exchanges % TURNS]
        self._signs.manual_seed(self._exchanges)
        signs = _signs((turn.width,), self._signs)
        for p, rows, projected, own in zip(self._parameters, self._rows, *turn.parts, strict=True):
            gradient = _gradient(p)
            if gradient is None or not len(own):
                projected.zero_()
                own.zero_()
                continue
            mine = gradient.reshape(rows, -1)[turn.number :: TURNS].float()
            torch.mv(mine, signs[: mine.shape[1]], out=projected)
            torch.linalg.vector_norm(mine, dim=1, out=own)
        turn.own.square_()
        if turn.width:
            self._work = _sum(turn.message, self._group)
        return turn.bytes

    def stand_in(self, ahead: int) -> Any:
        """As that of GradientNoise."""
        turn = self._turns[(self._exchanges + 1) % TURNS]
        return _sum(torch.zeros_like(turn.message), self._group) if turn.width else None

    @torch.no_grad()
    def land(self) -> None:
        """Waits for what was sent last, and adds it to the estimate."""
        if self._work is None:
            return
        work, self._work = self._work, None
        _wait(work)
        turn = self._turns[self._exchanges % TURNS]
        new = turn.message / self._world
        new[0].square_()
        before = self._sums[:, turn.places]
        # Values that are not finite count on no rank. The device decides, so that the host need not wait.
        sums = torch.where(torch.isfinite(new).all(0), before * turn.decay + new, before)
        self._sums[:, turn.places] = sums
        self._found[turn.places] = self._factors(sums)

    def _factors(self, sums: torch.Tensor) -> torch.Tensor:
        mean, own = sums
        rho = torch.where(own > 0, mean / own, 1.0)
        return rho.clamp_(1 / self._world, 1).rsqrt_()

    def state_dict(self) -> dict[str, Any]:
        """The number of exchanges, and the running sums, (2, rows) float32."""
        self.land()
        return {"exchanges": self._exchanges, "sums": self._sums.clone()}

    def check(self, saved: Any) -> None:
        """Raises CheckpointError if it cannot be a result of `state_dict`."""
        saved = saved if isinstance(saved, dict) else {}
        if found := _no_squares(saved.get("sums"), self._sums):
            raise CheckpointError(_DAMAGED.format(f"has no 'sums' of squares, but {found}"))
        _count(saved, "exchanges")

    def load_state_dict(self, saved: Any) -> None:
        """Loads a result of `state_dict`. Raises CheckpointError."""
        self.check(saved)
        sums, exchanges = saved["sums"], saved["exchanges"]
        self._work = None
        self._sums.copy_(sums)
        self._exchanges = exchanges
        self._found.copy_(self._factors(self._sums))


class _Turn:
    """The rows that are measured in the same exchange: every fourth of each parameter."""

    def __init__(
        self,
        rows: Sequence[int],
        widths: Sequence[int],
        decay: torch.Tensor,
        number: int,
        device: torch.device,
    ) -> None:
        self.number = number
        counts = [len(range(number, k, TURNS)) for k in rows]
        self.width = max((w for w, n in zip(widths, counts, strict=True) if n), default=0)
        ends = accumulate(rows, initial=0)
        of_all = torch.arange(sum(rows), dtype=torch.int64, device=device)
        self.places = torch.cat([of_all[a:b][number::TURNS] for a, b in pairwise(ends)])
        self.decay = decay.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device=device))
        self.message = torch.zeros(2, sum(counts), dtype=torch.float32, device=device)
        self.bytes = 4 * 2 * sum(counts)
        projected, self.own = self.message
        self.parts = projected.split(counts), self.own.split(counts)


Noise = GradientNoise | SketchNoise | RowNoise
