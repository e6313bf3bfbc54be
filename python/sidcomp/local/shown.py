"""The common parameters in the module, for a while."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from sidcomp.errors import SetupError
from sidcomp.local.vectors import Vectors


class Shown:
    """Puts the point into the module, and this rank's own parameters back.

    find    finds where the parameters are now
    """

    def __init__(self, vectors: Sequence[Vectors], find: Callable[[], None]) -> None:
        self._vectors, self._find = vectors, find
        self._own: list[list[torch.Tensor]] = []  # this rank's, while the point is in the module

    def __bool__(self) -> bool:
        """Whether the point is in the module."""
        return bool(self._own)

    @torch.no_grad()
    def show(self) -> None:
        self._find()
        self._own = [[p.detach().clone() for p in v.parameters] for v in self._vectors]
        for v in self._vectors:
            v.put(v.point_views)

    @torch.no_grad()
    def hide(self) -> None:
        self._find()
        own, self._own = self._own, []
        for v, kept in zip(self._vectors, own, strict=True):
            torch._foreach_copy_(v.parameters, kept)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """This rank's own parameters are in the module, for a while."""
        inside = bool(self)
        if inside:
            self.hide()
        try:
            yield
        finally:
            if inside:
                self.show()

    def refuse(self, what: str) -> None:
        """Raises SetupError if the point is in the module, because `what` would be undone by `hide`."""
        if self._own:
            raise SetupError(
                f"{what} inside run.common(), whose parameters are replaced by this rank's own afterwards: "
                "leave it first"
            )
