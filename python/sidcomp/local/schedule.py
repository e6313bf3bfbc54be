"""Which vectors are exchanged together, and in which steps."""

from collections.abc import Sequence

from sidcomp.errors import SetupError
from sidcomp.runtime.layout import Layout


class Schedule:
    """sizes: how many vectors each part has, in order. Part p is exchanged after steps s with
    s % every == p * every // parts."""

    def __init__(self, sizes: Sequence[int], every: int) -> None:
        self._of = [part for part, size in enumerate(sizes) for _ in range(size)]  # the part of each vector
        self._at = [part * every // len(sizes) for part in range(len(sizes))]
        self._every = every
        self.all = list(range(len(sizes)))

    def due(self, steps: int) -> list[int]:
        """The parts whose exchange begins after so many steps."""
        return [part for part, at in enumerate(self._at) if steps % self._every == at]

    def since(self, part: int, steps: int) -> int:
        """Steps since the exchange of this part has begun, modulo `every`."""
        return (steps - self._at[part]) % self._every

    def indices(self, parts: Sequence[int]) -> list[int]:
        """The vectors of these parts."""
        return [n for part in parts for n, of in enumerate(self._of) if of == part]

    def next(self, steps: int) -> tuple[int, list[int]]:
        """Behind which step the next exchange begins after so many steps, and the parts that it is of."""
        ahead = range(steps + 1, steps + 1 + self._every)
        return next((step, due) for step in ahead if (due := self.due(step)))

    def coming(self, steps: int) -> list[int]:
        """The vectors that are exchanged next after so many steps."""
        return self.indices(self.next(steps)[1])

    def refuse(self, layout: Layout) -> None:
        """Raises SetupError if a group is in several parts, which travel at different times."""
        for g in layout.groups:
            if len({self._of[bucket] for bucket, _, _ in g.runs}) > 1:
                raise SetupError(
                    f"parts={len(self._at)}: a group has parameters of several parts: give the State "
                    'groups="bucket" or "layer"'
                )
