"""The exchange that a State was given, and the message plan of one group on this rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sidcomp import core as _core
from sidcomp import notices
from sidcomp.config.kinds import from_environment
from sidcomp.config.registry import Codec, find_exchange
from sidcomp.config.schedule import Setting
from sidcomp.errors import ArgumentError, ParameterError


@dataclass(frozen=True)
class ExchangeChoice:
    """An exchange and its parameters. `native`: it is one of the process group's own collectives."""

    exchange: Codec
    parameters: Mapping[str, Setting] = field(default_factory=dict)

    @classmethod
    def parse(cls, names: Sequence[str], parameters: "dict[str, Any]") -> "list[ExchangeChoice]":
        """The choices for `names`. Removes the exchanges' parameters from `parameters`."""
        choices = [cls._parse(name, parameters) for name in names]
        if len(set(names)) < len(names):
            raise ArgumentError(f"exchange={list(names)}: one is named twice; name each once")
        for name in {p.name for choice in choices for p in choice.exchange.parameters}:
            parameters.pop(name, None)
        return choices

    @classmethod
    def _parse(cls, name: str, parameters: "Mapping[str, Any]") -> "ExchangeChoice":
        exchange = find_exchange(name)
        own = {p.name: parameters[p.name] for p in exchange.parameters if p.name in parameters}
        for key, value in own.items():
            if hasattr(value, "mesh"):
                own[key] = _ranks_per_node(value)
            elif not isinstance(value, int | float | str):
                raise ParameterError(
                    f"{name}: {key}={value!r}: give a number or a name, because it cannot change"
                )
        if any(p.name == "ranks_per_node" for p in exchange.parameters) and "ranks_per_node" not in own:
            own["ranks_per_node"] = from_environment("LOCAL_WORLD_SIZE", 1)
        return cls(exchange, own)

    @property
    def native(self) -> bool:
        return self.exchange.family == "collective"

    @property
    def local(self) -> int:
        """How many ranks share the memory of an element: those of a node, or one."""
        return int(self.parameters.get("ranks_per_node", 1))

    @property
    def label(self) -> str:
        return " ".join([self.exchange.name, *(f"{k}={v}" for k, v in self.parameters.items())])

    def saved(self) -> dict[str, Any]:
        return {"exchange": self.exchange.name, "parameters": dict(self.parameters)}

    def warn(self, world: int) -> None:
        """Logs a warning if this number of ranks makes a torus a ring."""
        rows = any(p.name == "rows" for p in self.exchange.parameters)
        if rows and world > 3 and all(world % i for i in range(2, world)):
            notices.log(f"{self.exchange.name} over {world} ranks is a ring, because this number is prime")


def _ranks_per_node(mesh: Any) -> int:
    """The ranks per node of a DeviceMesh whose last dimension is the node."""
    flat = mesh.mesh.flatten().tolist()
    if flat != list(range(len(flat))):
        raise ArgumentError(
            f"the mesh has the ranks {flat}: number them 0, 1, 2, ... node after node, as torchrun does"
        )
    return int(mesh.size(-1))


class MessagePlan:
    """This rank's part in the exchange of one group. It has the attributes of a `_core.Plan`."""

    linear = False
    lossless = False
    reductions = 1
    extra_bytes = 0

    def __init__(
        self,
        choice: ExchangeChoice,
        codec: str,
        memory: str,
        n: int,
        dtype: str,
        settings: Mapping[str, Setting],
        place: tuple[int, int],
        isa: str | None,
    ) -> None:
        name = choice.exchange.name
        if both := set(settings) & set(choice.parameters):
            raise ArgumentError(f"{codec} and {name} both have {', '.join(sorted(both))}: choose another one")
        rank, world = self.place = place
        self.choice = choice
        self.codec, self.memory, self.n, self.dtype = codec, memory, n, dtype
        values = {**settings, **choice.parameters}
        x = self.core = _core.Exchange(name, codec, memory, n, dtype, rank, world, values, isa)
        self.rounds, self.vectors, self.k = x.rounds, x.vectors, x.k
        self.state_bytes, self.work_bytes, self.wire_bytes = x.state_bytes, x.work_bytes, x.wire_bytes
        self.payload_bytes = x.sent_bytes
        self.shares = x.shares
        self.busy = x.has_meanwhile  # core.meanwhile has work to do while messages travel
        self.residual_out, self.residual_in = x.residual_out, x.residual_in
        self.unsend, self.forget, self.rescale = x.unsend, x.forget, x.rescale
        self.cuda_settle, self.cuda_unsend, self.cuda_checksum = x.cuda_settle, x.cuda_unsend, x.cuda_checksum

    def leaving(self, local: int) -> int:
        """The bytes that this rank sends to other nodes. A node has `local` ranks."""
        node = self.place[0] // local
        rounds = (self.core.messages(i, False) for i in range(self.rounds))
        return sum(size for sent in rounds for peer, _, size in sent if peer // local != node)

    @property
    def whole(self) -> bool:
        """Whether the state is that of one plan over all elements."""
        return [(at, start, n) for at, start, n, _ in self.shares] == [(0, 0, self.n)]

    @property
    def common(self) -> bool:
        """Whether the last vector of the memory is one that this rank keeps for all ranks."""
        return self.vectors > 0 and any(c for *_, c in self.shares)
