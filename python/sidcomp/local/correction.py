"""Which parameters' steps the noise correction lengthens, and by what."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from sidcomp.errors import UnsupportedError
from sidcomp.local.arguments import check_float32
from sidcomp.local.gradient_noise import GradientNoise, Noise, RowNoise, SketchNoise, second_betas
from sidcomp.local.vectors import Vectors


class Correction:
    """vectors: what is exchanged. whole: the optimizers' tensors, by name. how: the argument
    `noise_correction`. noise: what measures, once `start` was called, if anything is corrected. Raises
    UnsupportedError."""

    def __init__(
        self,
        vectors: Sequence[Vectors],
        whole: Mapping[str, torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        how: bool | str | None,
        in_memory: bool,
    ) -> None:
        self.noise: Noise | None = None
        self._how, self._in_memory = how, in_memory
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._decays: list[float] = []  # how much of the second moment is left after a step
        # of each of `vectors`: the updates that are lengthened, and where their factors are
        self._updates: list[list[tuple[torch.Tensor, int]]] = [[] for _ in vectors]
        if how is False or (in_memory and not how):
            return
        if any(v.update.device != v.parameters[0].device for v in vectors):
            raise UnsupportedError(
                "noise_correction=True with host=True needs parameters on a CPU: leave one out"
            )
        check_float32(
            {name: p for v in vectors for name, p in v.named().items()}, "noise_correction=True measures them"
        )
        decays = second_betas(optimizers, of_all=how is True and not in_memory)
        for v, updates in zip(vectors, self._updates, strict=True):
            for name, update in zip(v.names, v.update_views, strict=True):
                if id(p := whole[name]) in decays:
                    updates.append((update, len(self._names)))
                    self._names.append(name)
                    self._parameters.append(p)
                    self._decays.append(decays[id(p)])

    def __len__(self) -> int:
        """The number of parameters that are corrected."""
        return len(self._names)

    def start(self, every: int, group: dist.ProcessGroup) -> None:
        """Measures from now on, between the ranks of the group, if there are several."""
        if not self._names or dist.get_world_size(group) == 1:
            return
        if self._how == "rows":
            self.noise = RowNoise(self._parameters, [d**every for d in self._decays], group)
        elif every > 1 or self._in_memory:
            self.noise = SketchNoise(self._parameters, self._decays, every, group)
        else:
            self.noise = GradientNoise(self._parameters, group)

    def apply(self, which: Sequence[int], samples: bool) -> int:
        """Lengthens what these of `vectors` exchange. samples: starts to exchange what was measured, first.
        Returns the bytes of this."""
        if self.noise is None:
            return 0
        beside = self.noise.sample() if samples else 0  # which takes in the samples of the exchange before
        pairs = [pair for n in which for pair in self._updates[n]]
        if pairs:
            factors = self.noise.factors
            torch._foreach_mul_([update for update, _ in pairs], [factors[i] for _, i in pairs])
        return beside
