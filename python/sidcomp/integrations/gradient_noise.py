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

from sidcomp.errors import CheckpointError

SAMPLES = 16  # elements of each parameter
_DECAY = 0.9  # of the running sums, in each exchange


class GradientNoise:
    """Estimates, for each parameter, rho = |mean of the ranks' gradients|^2 / mean of |a rank's gradient|^2.

    The estimate comes from a few elements of each parameter, which the ranks sum in a small all-reduce with
    each exchange. It is used one exchange later, and it is the same on all ranks.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = list(parameters), group
        self._world = dist.get_world_size(group)
        device = self._parameters[0].device
        self._places = [
            torch.linspace(0, p.numel() - 1, min(SAMPLES, p.numel()), device=device).long()
            for p in self._parameters
        ]
        count = len(self._places)
        sizes = torch.tensor([len(x) for x in self._places], device=device)
        self._of = torch.repeat_interleave(torch.arange(count, device=device), sizes)
        self._message = torch.zeros(len(self._of) + count, device=device)
        self._sums = torch.zeros(2, count, device=device)  # of squares: the means', the ranks' own
        self._work: Any = None
        self._find()

    def observe(self) -> None:
        """Does nothing: samples are of the gradients of an exchange."""

    def sample(self) -> None:
        """Starts to exchange samples of the present gradients. Every rank calls it at the same point."""
        self.land()
        n = len(self._of)
        torch.cat(
            [
                torch.zeros(len(i), device=i.device) if p.grad is None else p.grad.reshape(-1)[i].float()
                for p, i in zip(self._parameters, self._places, strict=True)
            ],
            out=self._message[:n],
        )
        self._message[n:] = self._squares(self._message[:n])
        self._work = dist.all_reduce(self._message, group=self._group, async_op=True)

    def land(self) -> None:
        """Waits for the samples that were sent last, and adds them to the estimate."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        n = len(self._of)
        mean = self._message / self._world
        new = torch.stack((self._squares(mean[:n]), mean[n:]))
        # What is not finite does not count, on any rank. The device decides, so that the host need not wait.
        self._sums = torch.where(torch.isfinite(new).all(), self._sums * _DECAY + new, self._sums)
        self._find()

    def _squares(self, samples: torch.Tensor) -> torch.Tensor:
        """The sum of squares of each parameter's samples."""
        return torch.zeros(len(self._places), device=samples.device).index_add_(0, self._of, samples.square())

    def _find(self) -> None:
        means, own = self._sums
        rho = torch.where(own > 0, means / own, torch.ones_like(own)).clamp_(1 / self._world, 1)
        self.factors = list(rho.rsqrt().unbind())  # on the device: 1 / sqrt(rho) of each parameter

    def state_dict(self) -> torch.Tensor:
        """The running sums, (2, parameters) float32."""
        self.land()
        return self._sums.clone()

    def load_state_dict(self, saved: Any, steps: int) -> None:
        """Loads a result of `state_dict`. Raises CheckpointError."""
        _check(saved, self._sums)
        self._work = None
        self._sums.copy_(saved)
        self._find()


def _check(saved: Any, sums: torch.Tensor) -> None:
    if not isinstance(saved, torch.Tensor) or saved.shape != sums.shape:
        raise CheckpointError(
            f"LocalError: 'noise' is no tensor of shape {tuple(sums.shape)}: the dictionary is damaged, of "
            "another model or optimizer, or was saved with another noise_correction"
        )


# Optimizers of torch that keep, in state["exp_avg"], the mean of the gradients so far, m = b1 m + (1 - b1) g.
_WITH_MEAN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)


def keeps_mean(optimizer: torch.optim.Optimizer) -> bool:
    """Whether RowNoise can read the optimizer's mean of gradients."""
    betas = (group.get("betas") or (0.0, 0.0) for group in optimizer.param_groups)
    return isinstance(optimizer, _WITH_MEAN) and all(b1 > 0 for b1, _ in betas)


class RowNoise:
    """Estimates rho for each row of each parameter, from this rank's own gradients: nothing is exchanged, and
    each rank has an estimate of its own. parameters: float32, of optimizers that `keeps_mean` accepts.

    m, which Adam keeps, is a mean of earlier gradients. Their noise is independent of that of the present
    gradient g, if batches are drawn independently; else rho comes out too large. So over the steps the mean
    of m g is that of mu^2, where mu is the gradient without noise, and the mean of g^2 is that of mu^2 +
    sigma^2. Then

        rho = (mu^2 + sigma^2 / W) / (mu^2 + sigma^2).

    Both are sums over a row, and running means with the optimizer's second beta. A row is what belongs to one
    index of the first dimension, such as the weights of one output; a parameter of one dimension is a row.
    The factors are used in the exchange that follows.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer], world: int
    ) -> None:
        groups = {id(p): (o, group) for o in optimizers for group in o.param_groups for p in group["params"]}
        self._of = [(p, *groups[id(p)]) for p in parameters]
        self._world, self._steps = world, 0
        rows = [p.shape[0] if p.dim() > 1 else 1 for p in parameters]
        device = parameters[0].device
        self._sums = torch.zeros(2, sum(rows), device=device)  # means of m g, and of g g
        self._now = torch.zeros_like(self._sums)  # of the step that was observed last
        self._first, self._second = (torch.zeros(sum(rows), device=device) for _ in range(2))  # the betas
        places = list(pairwise([0, *accumulate(rows)]))
        self._parts = [[x[a:b] for a, b in places] for x in (*self._now, self._first, self._second)]
        self._betas: list[tuple[float, float]] = []
        self._found = torch.ones(sum(rows), device=device)
        self.factors = [
            self._found[a:b].view(-1, *[1] * (p.dim() - 1))
            for (a, b), p in zip(places, parameters, strict=True)
        ]

    @torch.no_grad()
    def observe(self) -> None:
        """Takes in the gradients with which the optimizers have just stepped. Called after each step."""
        self._steps += 1
        if self._steps == 1:
            return  # there was no gradient before
        betas = [group["betas"] for _, _, group in self._of]
        if betas != self._betas:
            self._betas = list(betas)
            for (b1, b2), first, second in zip(betas, *self._parts[2:], strict=True):
                first.fill_(b1)
                second.fill_(b2)
        for (p, optimizer, group), both, own in zip(self._of, *self._parts[:2], strict=True):
            m = optimizer.state[p].get("exp_avg")
            if p.grad is None or m is None:
                own.fill_(torch.nan)  # the row does not count
                continue
            g = p.grad.reshape(own.numel(), -1).float()
            torch.bmm(g.unsqueeze(1), m.reshape_as(g).float().unsqueeze(2), out=both.view(-1, 1, 1))
            if group.get("maximize"):
                both.neg_()
            torch.linalg.vector_norm(g, dim=1, out=own)
        b1, b2 = self._first, self._second
        both, own = self._now
        own.square_()
        # m holds the present gradient already, and began at 0.
        both.sub_((1 - b1) * own).div_(b1 * (1 - b1 ** (self._steps - 1)))
        mean = b2 * self._sums + (1 - b2) * self._now
        self._sums = torch.where(torch.isfinite(self._now).all(0), mean, self._sums)

    def sample(self) -> None:
        """Finds the factors, 1 / sqrt(rho). On the device: the host need not wait."""
        signal, whole = self._sums
        signal = torch.minimum(signal.clamp_min(0), whole)
        rho = torch.where(whole > 0, (signal + (whole - signal) / self._world) / whole, 1.0)
        self._found.copy_(rho.clamp_(1 / self._world, 1).rsqrt_())

    def land(self) -> None:
        """Does nothing: nothing is exchanged."""

    def state_dict(self) -> torch.Tensor:
        """The running means, (2, rows) float32."""
        return self._sums.clone()

    def load_state_dict(self, saved: Any, steps: int) -> None:
        """Loads a result of `state_dict` after so many steps. Raises CheckpointError."""
        _check(saved, self._sums)
        self._sums.copy_(saved)
        self._steps = steps
