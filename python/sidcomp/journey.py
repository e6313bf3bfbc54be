"""Times of exchanges of messages, as the pipeline does them. Memory is taken for one size at a time."""

from collections.abc import Callable
from itertools import pairwise
from threading import Thread
from time import perf_counter_ns

import torch

from sidcomp import _core
from sidcomp.coding import Candidate, Gradients
from sidcomp.exchange import Exchange
from sidcomp.layout import Block
from sidcomp.route import Trip
from sidcomp.timing import Exchanging, Samples, Wait, collective
from sidcomp.trips import ends_of, post


class Journey:
    """A group of synthetic gradients on its way through an exchange of messages, step after step."""

    def __init__(self, trip: Trip, source: Gradients, exchange: Exchange) -> None:
        self.trip, self.source, self.group = trip, source, exchange.group
        self.state, self.work, self.wire = map(Block, (trip.state_bytes, trip.work_bytes, trip.wire_bytes))
        self.vector = Block(trip.n * source.dtype.itemsize).tensor.view(source.dtype)
        self.segments = _core.Segments([self.vector.data_ptr()], [trip.n])
        self.ends = ends_of(trip, self.wire.tensor, exchange)
        self.steps = 0
        if trip.vectors:
            trip.residual_in(self.state.ptr, source.residual.data_ptr())

    def load(self) -> None:
        self.vector.copy_(self.source.gradient(self.trip.n, self.steps))
        self.steps += 1

    def _advance(self, round: int) -> None:
        self.trip.advance(
            round, self.segments, self.state.ptr, self.work.ptr, self.wire.ptr,
            step=self.steps, seed=0, group=0,
        )  # fmt: skip

    def depart(self) -> None:
        self._advance(0)

    def travel(self) -> None:
        for i in range(self.trip.rounds):
            for work in post(self.ends, i, self.group, i):
                work.wait()
            if i + 1 < self.trip.rounds:
                self._advance(i + 1)

    def arrive(self) -> None:
        self._advance(self.trip.rounds)


class Journeys(Exchanging):
    """Samples: a rank's part before the first message of an exchange, from there to the last, and after it.
    Bytes: of gradient."""

    which = 1
    fixed, single = 4, 5  # as those of codecs

    def __init__(
        self, candidate: Candidate, sizes: list[int], exchange: Exchange, gradients: Gradients,
        isa: str | None, call_s: float,
    ) -> None:  # fmt: skip
        super().__init__(candidate.name, sizes, call_s)
        self.candidate, self.exchange, self.gradients, self.isa = candidate, exchange, gradients, isa
        self.tick = torch.zeros(1, device=exchange.device)

    def measure(self, nbytes: int, repeats: int) -> Samples:
        journey, samples = self.message(nbytes), []
        for _ in range(self.fixed + repeats):
            self._gather(journey)
            with collective():
                times = [perf_counter_ns()]
                for stage in (journey.depart, journey.travel, journey.arrive):
                    stage()
                    times.append(perf_counter_ns())
            samples.append([b - a for a, b in pairwise(times)])
        return [list(column) for column in zip(*samples[-repeats:], strict=True)]

    def message(self, nbytes: int) -> Journey:
        place = self.exchange.rank, self.exchange.world
        trip = self.candidate.trip(nbytes, self.gradients.dtype, place, self.isa)
        return Journey(trip, self.gradients, self.exchange)

    def _gather(self, journey: Journey) -> None:
        journey.load()
        with collective():
            self.exchange.all_reduce(self.tick).wait()

    def meet(self, journey: Journey) -> None:
        """All ranks come together, with their first messages ready."""
        self._gather(journey)
        journey.depart()

    def begin(self, journey: Journey, done: Callable[[], None]) -> Wait:
        failures: list[Exception] = []

        def travel() -> None:
            try:
                journey.travel()
            except Exception as e:
                failures.append(e)
            done()

        thread = Thread(target=travel, name="sidcomp probe")
        thread.start()

        def wait() -> None:
            thread.join()
            if failures:
                raise failures[0]
            journey.arrive()

        return wait
