"""Profiles: the measurements of a model, its network and the codecs, from which planners work. Needs no
torch."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sidcomp import core as _core
from sidcomp import files
from sidcomp.errors import ArgumentError
from sidcomp.planner import fusion
from sidcomp.planner.cost_curve import Curve

FORMAT = 1
_DRIFT = 0.25  # a larger change of plain DDP's step makes a profile stale
_STEPS = ("forward_ps", "compute_ps", "dense_ps")
_MOST = 2**53  # ps (2.5 hours) or bytes: planners add and multiply within 2^60
_OPTIONAL = {"contention", "measured_s"}
_TENSOR = {"name", "bytes", "bucket", "ready_ps", "kind"}
_STAGES = ("encode", "exchange_curve", "decode", "contended")
MOST_SLOWDOWN = 800  # per mille
MOST_CORRECTION = 16  # times: the largest correction of a cost by what is observed later


@dataclass(frozen=True)
class Method:
    """The costs of one candidate. `exchange_curve` is isolated; `contended` is overlapped with computation,
    None if that was not measured.

    Dense has no encode. Its decode is the copy back into the buckets, for a group that is not a DDP bucket.
    """

    name: str
    codec: str
    exchange: str  # a name in sidcomp.exchanges()
    encode: Curve | None
    exchange_curve: Curve
    decode: Curve | None
    contended: Curve | None = None


@dataclass
class Profile:
    """The measurements on this machine and network. Times are integer picoseconds, the slowest rank's except
    for dense_ps; sizes are bytes of gradient.

    tensors     in gradient-ready order: {"name", "bytes", "bucket", "ready_ps", "kind"}. ready_ps counts from
                the start of the iteration, without communication; kind is dtype and device type, which no
                group mixes
    compute_ps  an iteration without communication: forward and backward
    dense_ps    an iteration of plain DDP, the mean over the ranks
    methods     the candidates, dense first
    contention  overlapped time in per mille of isolated time, of computation ("compute_permille");
                speed that an exchange takes ("slowdown_permille")
    measured_s  how long measuring took, in seconds
    model       a digest of the parameters' names, shapes and dtypes. A profile applies only to the same
                model, world size, device type, backend, number of threads of the rank that has most, and
                version of sidcomp.
    """

    model: str  # model_digest
    world: int
    device: str
    backend: str
    threads: int
    tensors: list[dict[str, Any]]
    forward_ps: int
    compute_ps: int
    dense_ps: int
    methods: list[Method]
    contention: dict[str, int] = field(default_factory=dict)
    measured_s: float = 0.0
    version: str = _core.version
    format: int = FORMAT

    # ---- as a file

    def save(self, path: str | Path) -> None:
        """Writes the profile to a JSON file, which `load` reads. Raises ArgumentError, which names file and
        cause; the file is then as it was before."""
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in self.plain().items())
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        files.write(path, lambda file: file.write(text.encode()))

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Loads a profile from a file. Raises ArgumentError, which names the file and the field at fault."""
        if not isinstance(path, str | Path):
            raise ArgumentError(f"profile {path!r}: give the path of a file that Profile.save has written")
        try:
            text = files.read(path, "the profile")
        except ArgumentError as e:
            raise ArgumentError(
                f"{e}; give a file that state.profile.save() or `sidcomp bench --save` has written"
            ) from None
        try:
            data = files.parse_json(text, "it")
            if isinstance(data, dict) and "format" in data and data["format"] != FORMAT:
                found = data["format"]
                raise ArgumentError(f"it has format {found!r}, this sidcomp reads {FORMAT}")
            return cls.of(data)
        except ArgumentError as e:
            raise ArgumentError(f"{path} is not a complete profile ({e}): delete it and measure again") from e

    def plain(self) -> dict[str, Any]:
        """The profile in plain types, as `of` takes it."""
        return asdict(self)

    @classmethod
    def of(cls, data: object) -> "Profile":
        """The profile from which `asdict` made `data`, with every field checked. Raises ArgumentError, which
        names the field at fault. The result can be planned with, printed and saved."""
        needed = {f.name for f in fields(cls)} - _OPTIONAL
        fusion._fields("the profile", data, needed, _OPTIONAL)
        assert isinstance(data, Mapping)
        methods = fusion._list("methods", data["methods"])
        made = [parse_method(m, f"methods[{i}]") for i, m in enumerate(methods)]
        profile = cls(**{**data, "methods": made})
        profile._check()
        return profile

    def _check(self) -> None:
        for name in ("model", "device", "backend", "version"):
            fusion._string(name, getattr(self, name))
        for name, least in (("world", 2), ("threads", 0), *((step, 0) for step in _STEPS)):
            fusion._within(name, getattr(self, name), least, _MOST)
        fusion._within("format", self.format, FORMAT, FORMAT)
        _finite("measured_s", self.measured_s)
        if not isinstance(self.contention, Mapping):
            raise ArgumentError(f"contention must be a dictionary, not {files.shown(self.contention)}")
        for name, permille in self.contention.items():
            fusion._string("a name of contention", name)
            least, most = (0, 999) if name == "slowdown_permille" else (0, _MOST)
            fusion._within(f"contention[{name!r}]", permille, least, most)
        for i, t in enumerate(fusion._list("tensors", self.tensors)):
            fusion._fields(f"tensors[{i}]", t, _TENSOR)
            fusion._string(f"tensors[{i}].name", t["name"])
            fusion._string(f"tensors[{i}].kind", t["kind"])
            for name in ("bytes", "bucket", "ready_ps"):
                fusion._within(f"tensors[{i}].{name}", t[name], 0, _MOST)
        _unlike("tensors", [t["name"] for t in self.tensors])
        _unlike("methods", [m.name for m in self.methods])
        if self.methods[0].encode is not None:
            raise ArgumentError("methods[0] has an encode: the first method must be dense, which has none")
        # The planners decide: they must accept every instance that is made from the profile, and corrected.
        for buckets in (True, False):
            made = self.instance(buckets)
            for method in made["methods"]:
                for of in ("encode", "exchange", "decode"):
                    method[of] = method[of] and [[x, MOST_CORRECTION * y] for x, y in method[of]]
            for i in range(len(self.methods)):
                fusion.evaluate(made, {"ends": [len(self.tensors)], "methods": [i]})

    # ---- against the present

    def stale(
        self, *, model: str, world: int, device: str, backend: str, threads: int, dense_ps: int | None = None
    ) -> str | None:
        """The reason why this profile does not apply now, or None. dense_ps: plain DDP's step, now."""
        if model != self.model:
            return "the profile is of another model: the names, shapes or dtypes of its parameters differ"
        now = {"world": world, "device": device, "backend": backend, "threads": threads}
        for name, value in {**now, "version": _core.version}.items():
            if (then := getattr(self, name)) != value:
                return f"the profile was measured with {name} {then}, now it is {value}"
        if dense_ps is None or abs(dense_ps - self.dense_ps) <= _DRIFT * self.dense_ps:
            return None
        return (
            f"a step of plain DDP took {_ms(self.dense_ps)} ms when the profile was measured, and takes "
            f"{_ms(dense_ps)} ms now: another network, or other work on the machine"
        )

    # ---- for the planners

    def instance(
        self,
        buckets: bool = True,
        methods: Sequence[str] | None = None,
        copied: bool = True,
    ) -> dict[str, Any]:
        """Makes an instance for `sidcomp.planner.plan`. No group mixes two kinds of tensors. Raises
        ArgumentError.

        buckets     True: a tensor is ready when its bucket is; False: when it is ready itself (after rewrap)
        methods     the names of the candidates to choose from, in the order that the instance has; None: all
        copied      True: dense groups include the copy back, which all but DDP's own buckets need: their
                    decode; False: dense has no decode
        """
        known = {m.name: m for m in self.methods}
        chosen = list(known if methods is None else methods)
        for name in chosen:
            if name not in known:
                raise ArgumentError(f"no method {name!r} in the profile; it has: {', '.join(known)}")
        last: dict[int, int] = {}
        for t in self.tensors:
            key = t["bucket"] if buckets else len(last)
            last[key] = max(last.get(key, 0), t["ready_ps"])
        tensors, now = [], self.forward_ps
        for i, t in enumerate(self.tensors):
            ready = max(now, last[t["bucket"] if buckets else i])
            tensors.append({"name": t["name"], "backward_ps": ready - now, "bytes": t["bytes"]})
            now = ready
        costs = [_costs(known[name]) for name in chosen]
        if not copied:
            costs = [{**c, "decode": None} if c["encode"] is None else c for c in costs]
        kinds = [t["kind"] for t in self.tensors]
        return {
            "forward_ps": self.forward_ps,
            "tensors": tensors,
            "methods": costs,
            "cut_before": [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]],
            "slowdown_permille": self.contention.get("slowdown_permille", 0),
            "decode": "side",
        }

    def plain_ps(self) -> int:
        """The time of an iteration of plain DDP by the planner's model."""
        ends, dense = self.bucket_ends(), self.methods[0].name
        made = self.instance(True, [dense], copied=False)
        return int(fusion.evaluate(made, {"ends": ends, "methods": [0] * len(ends)})["time_ps"])

    def bucket_ends(self) -> list[int]:
        """The `ends` of a plan whose groups are DDP's buckets."""
        at = [t["bucket"] for t in self.tensors]
        return [*(i for i in range(1, len(at)) if at[i] != at[i - 1]), len(at)]


def slowdown_permille(contention: Mapping[str, int]) -> int:
    """The speed, in per mille, that computation loses beside an exchange. contention: that of a Profile."""
    slower = contention.get("compute_permille", 1000)
    return max(0, min(MOST_SLOWDOWN, 1000 - 1_000_000 // max(slower, 1)))


def model_digest(parameters: Iterable[tuple[str, Sequence[int], str]]) -> str:
    """A digest of (name, shape, dtype) of each parameter, whatever their order."""
    text = "\n".join(sorted(f"{name} {list(shape)} {dtype}" for name, shape, dtype in parameters))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _costs(m: Method) -> dict[str, Any]:
    curves = {"encode": m.encode, "exchange": m.exchange_curve, "decode": m.decode}
    tables = {of: curve and [list(knot) for knot in curve.knots] for of, curve in curves.items()}
    return {"name": m.name, **tables, "delay": _delay(m)}


def _delay(m: Method) -> list[list[int]] | None:
    """By how much longer an exchange takes beside computation, in ps by bytes."""
    if m.contended is None:
        return None
    alone, beside = m.exchange_curve, m.contended
    at = sorted({x for curve in (alone, beside) for x, _ in curve.knots})
    longer = [[x, max(0, beside.at(x) - alone.at(x))] for x in at]
    longer[-1][1] = max(y for _, y in longer[-2:])  # the slope beyond must not fall below 0
    return longer


def parse_method(data: Any, where: str = "the method") -> Method:
    """A method from plain types, with every field checked."""
    fusion._fields(where, data, {f.name for f in fields(Method)} - {"contended"}, {"contended"})
    for name in ("name", "codec", "exchange"):
        fusion._string(f"{where}.{name}", data[name])
    curves = {s: _curve(f"{where}.{s}", data.get(s), s == "exchange_curve") for s in _STAGES}
    return Method(**{**data, **curves})


def _curve(where: str, data: Any, needed: bool) -> Curve | None:
    if data is None and not needed:
        return None
    fusion._fields(where, data, {"knots"})
    for i, knot in enumerate(fusion._list(f"{where}.knots", data["knots"])):
        _row(f"{where}.knots[{i}]", knot)
    try:
        return Curve(**data)
    except ArgumentError as e:
        raise ArgumentError(f"{where}: {e}") from None


def _row(where: str, row: Any) -> None:
    if len(fusion._list(where, row)) != 2:
        raise ArgumentError(f"{where} must be 2 numbers, not {files.shown(row)}")
    for number in row:
        fusion._within(where, number, 0, _MOST)


def _finite(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ArgumentError(f"{where} must be a finite number, 0 or greater, not {files.shown(value)}")


def _unlike(where: str, names: list[str]) -> None:
    if not names:
        raise ArgumentError(f"{where} is empty")
    if (name := files.twice(names)) is not None:
        raise ArgumentError(f"{where} has {name!r} twice")


def _ms(ps: int) -> str:
    return f"{ps / 1e9:.{4 if ps < 10**9 else 2}f}"


def format_bytes(nbytes: int) -> str:
    for unit, name in ((2**20, "MB"), (2**10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"
