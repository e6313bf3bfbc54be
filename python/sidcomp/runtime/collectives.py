"""The transports of groups whose payloads travel by collectives of the process group."""

import weakref

from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.form import InPlaceForm
from sidcomp.runtime.transport import Computation, Exchanged, G, Transport, Works, finish_later


class Collectives(Transport):
    """One all-gather, or one all-reduce after the other, all in the thread that starts them."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def post(self, group: Exchanged, round: int) -> Works:
        form = group.form
        if isinstance(form, InPlaceForm) and form.averaged:
            return [self.exchange.average(form.slices[0])]
        if form.slices:
            return [self.exchange.all_reduce(form.slices[round])]
        return [self.exchange.all_gather(form.incoming.tensor, form.payload.tensor)]


class SingleCollective(Collectives):
    """One all-gather or all-reduce, whose callback reports the end. Nobody waits for it."""

    def start(self, computation: Computation[G], group: G) -> None:
        (work,) = self.post(group, 0)
        finish_later(weakref.ref(computation), group, work)
