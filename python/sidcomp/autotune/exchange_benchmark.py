"""Times message exchanges with the runtime's own calls. Allocates memory for one size at a time."""

from collections.abc import Callable
from itertools import pairwise

import torch

from sidcomp import core as _core
from sidcomp.autotune.codec_benchmark import Candidate, Gradients, filled_state
from sidcomp.autotune.collective_benchmark import Exchanging, Samples, Wait, clock, collective, in_thread
from sidcomp.config.exchange_choice import MessagePlan
from sidcomp.runtime.block import Block
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.cuda_executor import CudaMessageCalls
from sidcomp.runtime.form import Form, MessageForm, Moment
from sidcomp.runtime.point_to_point import BatchedMessages, Messages


class Travelling:
    """A group of synthetic gradients that is exchanged by messages, step after step, over the runtime's
    transport and with its calls."""

    index = 0

    def __init__(self, message_plan: MessagePlan, source: Gradients, exchange: Exchange) -> None:
        self.message_plan, self.source = message_plan, source
        device = source.values.device
        self.form: Form = MessageForm(message_plan, self._work_bytes(), device)
        self.state = filled_state(message_plan, source, device)
        memory = Block(message_plan.n * source.dtype.itemsize, device)
        self.vector = memory.tensor.view(source.dtype)
        self.segments = _core.Segments([memory.ptr], [message_plan.n])
        self.at = Moment(0, 0, 0, exchange.rank, exchange.world)
        self.transport = self._transport(exchange)
        self.transport.connect(self.form)
        self._prepare()

    def _work_bytes(self) -> int:
        return self.message_plan.work_bytes

    def _transport(self, exchange: Exchange) -> Messages:
        return Messages(exchange)

    def _prepare(self) -> None:
        self.buffers = self.form.buffers(self.segments, self.state.ptr)

    def load(self) -> None:
        self.vector.copy_(self.source.gradient(self.message_plan.n, self.at.step))
        self.at = self.at._replace(step=self.at.step + 1)

    def depart(self) -> None:
        self._compute(0)

    def travel(self) -> None:
        self.transport.start(self, self)

    def arrive(self) -> None:
        self._compute(self.form.rounds)

    def _compute(self, round: int) -> None:
        self.form.advance(round, self.buffers, self.at)

    # The transport calls these while the payload travels.

    def meanwhile(self, group: "Travelling", round: int) -> None:
        if self.form.busy:
            self.form.meanwhile(round, self.buffers, self.at)

    def advance(self, group: "Travelling", round: int) -> None:
        self._compute(round)

    def finish(self, group: "Travelling", failure: Exception | None) -> None:
        if failure is not None:
            raise failure


class DeviceTravelling(Travelling):
    """A Travelling group on a GPU, enqueued on the current stream."""

    def _work_bytes(self) -> int:
        return int(self.message_plan.core.cuda_work_bytes())

    def _transport(self, exchange: Exchange) -> Messages:
        return BatchedMessages(exchange)

    def _prepare(self) -> None:
        device = self.vector.device
        self.report = Block(64, device)  # nobody reads it
        self.table = Block.of(self.segments.table(), device)
        self.on_device = _core.DeviceBuffers(
            self.table.ptr, 1, self.state.ptr, self.form.scratch.ptr, self.form.payload.ptr
        )
        self.calls = CudaMessageCalls(self.form, 0, self.report.ptr, self._place())

    def _place(self) -> dict[str, int]:
        device = self.vector.device
        return {"device": device.index or 0, "stream": torch.cuda.current_stream(device).cuda_stream}

    def _compute(self, round: int) -> None:
        self.calls.advance(round, self.on_device, self.at)

    def meanwhile(self, group: Travelling, round: int) -> None:
        if self.form.busy:
            self.calls.meanwhile(round, self.on_device, self.at)


class MessageExchanges(Exchanging):
    """Samples of a rank's part before the first message, from there to the last one, and after it. Bytes are
    those of the gradient."""

    which = 1
    fixed, single = 4, 5  # as for codecs

    def __init__(
        self, candidate: Candidate, sizes: list[int], exchange: Exchange, gradients: Gradients,
        isa: str | None, call_s: float,
    ) -> None:  # fmt: skip
        super().__init__(candidate.name, sizes, call_s)
        self.candidate, self.exchange, self.gradients, self.isa = candidate, exchange, gradients, isa
        self.tick = torch.zeros(1, dtype=torch.float32, device=exchange.device)

    def measure(self, nbytes: int, repeats: int) -> Samples:
        group, samples, device = self.message(nbytes), [], self.gradients.values.device
        for _ in range(self.fixed + repeats):
            self._gather(group)
            with collective():
                times = [clock(device)]
                for stage in (group.depart, group.travel, group.arrive):
                    stage()
                    times.append(clock(device))
            samples.append([b - a for a, b in pairwise(times)])
        return [list(column) for column in zip(*samples[-repeats:], strict=True)]

    def message(self, nbytes: int) -> Travelling:
        place = self.exchange.rank, self.exchange.world
        message_plan = self.candidate.message_plan(nbytes, self.gradients.dtype, place, self.isa)
        kind = DeviceTravelling if self.gradients.values.is_cuda else Travelling
        return kind(message_plan, self.gradients, self.exchange)

    def _gather(self, group: Travelling) -> None:
        group.load()
        with collective():
            self.exchange.all_reduce(self.tick).wait()

    def meet(self, group: Travelling) -> None:
        """Waits until all ranks have their first messages ready."""
        self._gather(group)
        group.depart()

    def begin(self, group: Travelling, done: Callable[[], None]) -> Wait:
        travelled = in_thread(group.travel, done)

        def wait() -> None:
            travelled()
            group.arrive()

        return wait
