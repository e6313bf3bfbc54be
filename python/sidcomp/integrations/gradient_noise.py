"""How much larger a rank's own gradient is than the mean of all ranks' gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.errors import CheckpointError

SAMPLES = 16  # elements of each parameter
_DECAY = 0.9  # of the running sums, in each exchange


class GradientNoise:
    """Estimates, for each parameter, rho = |mean of the ranks' gradients|^2 / mean of |a rank's gradient|^2.

    Adam divides by the root of the gradient's second moment. The second moment of a rank's own gradient is
    1 / rho times that of the mean of all ranks, so a rank's own step is sqrt(rho) times as long as it should
    be. On W ranks rho lies between 1 / W (the gradients are only noise) and 1 (they are equal). The estimate
    comes from a few elements of each parameter, which the ranks sum in a small all-reduce with each exchange.
    It is used one exchange later, and it is the same on all ranks.
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

    def load_state_dict(self, saved: Any) -> None:
        """Loads a result of `state_dict`. Raises CheckpointError."""
        if not isinstance(saved, torch.Tensor) or saved.shape != self._sums.shape:
            raise CheckpointError(
                f"LocalError: 'noise' is no tensor of shape {tuple(self._sums.shape)}: the dictionary is "
                "damaged, of another model, or was saved with noise_correction=False"
            )
        self._work = None
        self._sums.copy_(saved)
        self._find()
