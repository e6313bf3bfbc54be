"""Reads the result of `State.state_dict`. It may have been damaged or converted, so every field is checked
before it is used, and the error names the field at fault."""

import reprlib
from collections.abc import Mapping, Sequence
from math import isfinite, prod
from typing import Any, NoReturn

import torch

from sidcomp import core as _core
from sidcomp import files
from sidcomp.config.grouping import DENSE, PLANNED, Order
from sidcomp.config.registry import find_codec, find_memory
from sidcomp.errors import CheckpointError, SidcompError

FORMAT = 1
STATE_HEADER = _core.state_header_bytes  # before the vectors in a state (sid_state)
_MOST = 2**62
_HOLDERS = (Mapping, list, tuple)
_DEPTH, _ENTRIES = 32, 2**22  # of what is read
# The arguments of the saved State, to be compared with those of the one that loads it.
_SETTINGS: dict[str, tuple[type, ...]] = {
    "version": (str,),
    "codec": (str,),
    "parameters": (dict,),
    "seed": (int,),
    "groups": (str, int, list),
    "exclude": (list,),
    "policy": (list,),
    "warmup": (int,),
    "exchange": (dict, type(None)),
    "full_every": (int, list),
}


def read(given: object, where: str = "") -> dict[str, Any]:
    """Returns a checked copy, with residuals in float32 on the CPU. Raises CheckpointError. where: a name of
    the state, with which errors begin."""
    _bound(given, where)
    return _Reader(where).state(_without_wrapper(given))


def _bound(given: object, where: str) -> None:
    """Raises CheckpointError for lists and dictionaries that have too many levels or, where they share parts,
    too many entries to be read."""
    entries, open_ = 0, [(given, 0)] if isinstance(given, _HOLDERS) else []
    while open_:
        x, depth = open_.pop()
        inner = (*x.keys(), *x.values()) if isinstance(x, Mapping) else x
        entries += len(inner)
        if depth > _DEPTH or entries > _ENTRIES:
            raise CheckpointError(
                f"{where}the state has more than {_DEPTH} levels or {_ENTRIES} entries: the checkpoint is "
                "damaged, load another"
            )
        open_ += [(one, depth + 1) for one in inner if isinstance(one, _HOLDERS)]


def without_wrapper(name: str) -> str:
    """Returns a parameter's name without what torch.compile's wrapper adds to it."""
    return name.replace("_orig_mod.", "")


def _without_wrapper(x: Any) -> Any:
    """Returns the state with the names of plain modules, if a compiled one has saved it."""
    if isinstance(x, str):
        return without_wrapper(x)
    if isinstance(x, Mapping):
        return {_without_wrapper(k): _without_wrapper(v) for k, v in x.items()}
    if type(x) in (list, tuple):
        return type(x)(map(_without_wrapper, x))
    return x


def _shown(x: object) -> str:
    if isinstance(x, torch.Tensor):
        return f"a tensor of {str(x.dtype).removeprefix('torch.')}, {list(x.shape)}, on {x.device}"
    return f"{files.shown(x)} ({type(x).__name__})"


def unlike(x: object, like: torch.Tensor) -> str:
    """Returns what a checkpoint has in place of a tensor's values, for messages; "" if they have its shape,
    and its dtype, which is one of floating point, holds each of them."""
    if not isinstance(x, torch.Tensor):
        return reprlib.repr(x)
    if x.shape != like.shape:
        return f"a tensor of shape {tuple(x.shape)}"
    if not (_is_plain_tensor(x) and x.is_floating_point()):
        return f"{_shown(x)} ({str(x.layout)[6:]})"
    if x.dtype != like.dtype and not bool(((x.to(like.dtype).to(x.dtype) == x) | (x != x)).all()):
        return f"{_shown(x)}, and some of its values are not {str(like.dtype)[6:]} values"
    return ""


def _is_plain_tensor(t: torch.Tensor) -> bool:
    return t.layout == torch.strided and t.device.type in ("cpu", "cuda") and not t.is_quantized


def _is_plain(x: object) -> bool:
    if isinstance(x, Mapping):
        return all(isinstance(k, str) and _is_plain(v) for k, v in x.items())
    if isinstance(x, list | tuple):
        return all(map(_is_plain, x))
    return x is None or isinstance(x, str | int | float)


def _is_int(x: object, least: int, most: int = _MOST) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and least <= x <= most


def _is_number(x: object) -> bool:
    if not isinstance(x, int | float) or isinstance(x, bool):
        return False
    try:
        return isfinite(x)
    except OverflowError:
        return False


class _Reader:
    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, text: str) -> NoReturn:
        text = self.where + text
        raise CheckpointError(
            f"{text}: the checkpoint is damaged, or was converted; load what State.state_dict returned"
        )

    def wrong(self, field: str, value: object, wanted: str) -> NoReturn:
        self.fail(f"{field} is {_shown(value)}, not {wanted}")

    def of(self, where: Mapping[str, Any], key: str, name: str | None = None) -> Any:
        if key not in where:
            self.fail(f"there is no {name or key}")
        return where[key]

    def list_of(self, value: object, field: str, wanted: str) -> list[Any]:
        if not isinstance(value, list | tuple):
            self.wrong(field, value, wanted)
        return list(value)

    # ---- the whole

    def state(self, s: object) -> dict[str, Any]:
        if not isinstance(s, Mapping) or "format" not in s or "residuals" not in s:
            raise CheckpointError(f"{self.where}this is not what State.state_dict returned: pass its result")
        if not _is_int(s["format"], 0):
            self.wrong("format", s["format"], "a number")
        if s["format"] != FORMAT:
            raise CheckpointError(
                f"{self.where}the state has format {s['format']}; this sidcomp {_core.version} reads format "
                f"{FORMAT}"
            )
        out = {str(k): v for k, v in s.items()}
        for key, types in _SETTINGS.items():
            value = s.get(key, types[0]())
            if not isinstance(value, types) or isinstance(value, bool) or not _is_plain(value):
                self.wrong(key, value, f"what State.state_dict writes ({types[0].__name__})")
        world = self.of(s, "world")
        if not _is_int(world, 0, 1 << 32):
            self.wrong("world", world, "a number of ranks")
        if not _is_int(self.of(s, "rank"), 0, max(world - 1, 0)):
            self.wrong("rank", s["rank"], f"a rank of {world}")
        if not _is_int(self.of(s, "step"), 0):
            self.wrong("step", s["step"], "a number of steps")
        if not isinstance(self.of(s, "settled"), bool):
            self.wrong("settled", s["settled"], "True or False")
        if not isinstance(s.get("part", ""), str):
            self.wrong("part", s["part"], "a text")
        scale = self.of(s, "scale")
        if scale is not None and not (_is_number(scale) and scale > 0):
            self.wrong("scale", scale, "None or a finite number greater than 0")
        self.controller(s.get("controller"))
        vectors = self.vectors(self.of(s, "memory"))
        some = (
            (vectors,) if not s.get("policy") else range(1, _core.max_vectors + 1)
        )  # a policy may name another
        out["layout"] = self.layout(self.of(s, "layout"))
        if s.get("exchange") is not None:
            self.of(s, "shared")
        out["shared"] = shared = self.shared(s.get("shared", {}), world)
        out["residuals"] = self.residuals(s["residuals"], shared, some)
        out["rates"] = self.rates(s.get("rates", {}))
        for key in ("shared", "rates"):
            if odd := [n for n in out[key] if n not in out["residuals"]]:
                self.fail(f"{key} has {odd[0]!r}, for which there are no residuals")
        if world == 0 and (out["residuals"] or out["layout"] or s["step"]):
            self.wrong("world", world, "at least 1, although there are groups, residuals or steps")
        self.complete(out, vectors)
        return out

    def vectors(self, memory: object) -> int:
        """Returns how many vectors the memory keeps."""
        if not isinstance(memory, str):
            self.wrong("memory", memory, "a name")
        try:
            find_memory(memory)
        except SidcompError as e:
            self.fail(f"memory is {memory!r}: {e}")
        return _core.Plan("none", memory, 1, "float32", {}, flush=True).vectors

    def controller(self, c: object) -> None:
        if c is None:
            return
        if not (isinstance(c, Mapping) and _is_plain(c)):
            self.wrong("controller", c, "None or a dictionary of plain types")
        if not isinstance(self.of(c, "found", "controller['found']"), bool):
            self.wrong("controller['found']", c["found"], "True or False")
        self.of(c, "version", "controller['version']")
        report = self.of(c, "report", "controller['report']")
        if not isinstance(report, Mapping):
            self.wrong("controller['report']", report, "a dictionary")

    # ---- groups

    def layout(self, groups: object) -> list[dict[str, Any]]:
        out, seen = [], set()
        for i, g in enumerate(self.list_of(groups, "layout", "a list of groups")):
            field = f"layout[{i}]"
            if not isinstance(g, Mapping):
                self.wrong(field, g, "a dictionary")
            group = self.group(g, field)
            for name in group["names"]:
                if name in seen:
                    self.fail(f"{field}['names'] has {name!r}, which is in a group already")
                seen.add(name)
            out.append(group)
        return out

    def group(self, g: Mapping[str, Any], field: str) -> dict[str, Any]:
        names = self.list_of(self.of(g, "names", f"{field}['names']"), f"{field}['names']", "a list of names")
        if not names or not all(isinstance(n, str) for n in names):
            self.wrong(f"{field}['names']", names, "a list of names")
        shapes = []
        for shape in self.list_of(self.of(g, "shapes", f"{field}['shapes']"), f"{field}['shapes']", "a list"):
            sizes = self.list_of(shape, f"{field}['shapes']", "a list of shapes")
            if not all(_is_int(x, 0, 1 << 40) for x in sizes):
                self.wrong(f"{field}['shapes']", shape, "a list of shapes")
            shapes.append(sizes)
        if len(shapes) != len(names):
            self.fail(f"{field} has {len(names)} names and {len(shapes)} shapes")
        if not _is_int(self.of(g, "way", f"{field}['way']"), DENSE, 1 << 31):
            self.wrong(f"{field}['way']", g["way"], f"a whole number, {DENSE} or greater")
        out = {**g, "names": names, "shapes": shapes, "orders": self.orders(g, shapes, f"{field}['orders']")}
        for key, multiple in (("header", STATE_HEADER), ("extra", _core.extra_unit_bytes)):
            where = f"{field}[{key!r}]"
            out[key] = self.bytes_of(self.of(g, key, where), where, multiple)
        return out

    def orders(self, g: Mapping[str, Any], shapes: list[list[int]], field: str) -> list[Order]:
        """Returns the order of each tensor's elements. A group of contiguous ones has none."""
        out: list[Order] = []
        wanted = "a list of pairs, of a dimension and its size, for each tensor"
        for order in self.list_of(g.get("orders", [()] * len(shapes)), field, wanted):
            pairs = [self.list_of(x, field, wanted) for x in self.list_of(order, field, wanted)]
            fine = all(len(x) == 2 and _is_int(x[0], 0, 64) and _is_int(x[1], 2, 1 << 40) for x in pairs)
            if not fine or len({d for d, _ in pairs}) < len(pairs):
                self.wrong(field, order, wanted)
            out.append(tuple((d, size) for d, size in pairs))
        if len(out) != len(shapes) or any(
            order and prod(size for _, size in order) != prod(shape)
            for order, shape in zip(out, shapes, strict=False)
        ):
            self.fail(f"{field} does not have the shapes of the tensors")
        return out

    def bytes_of(self, t: object, field: str, multiple: int) -> torch.Tensor:
        """Returns a contiguous copy on the CPU, or the tensor itself."""
        if not isinstance(t, torch.Tensor) or t.dtype != torch.uint8 or t.dim() != 1 or len(t) % multiple:
            self.wrong(field, t, f"a vector of uint8 whose length is a multiple of {multiple}")
        return self.here(t, field)

    def here(self, t: torch.Tensor, field: str) -> torch.Tensor:
        if not _is_plain_tensor(t):
            self.wrong(field, t, "a plain tensor on the CPU or a GPU")
        return t.detach().cpu().resolve_neg().contiguous()

    # ---- memories

    def residuals(
        self, kept: object, shared: dict[str, list[Any]], vectors: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        if not isinstance(kept, Mapping):
            self.wrong("residuals", kept, "a dictionary of tensors")
        out = {}
        for name, t in kept.items():
            field = f"residuals[{name!r}]"
            if not isinstance(name, str):
                self.fail(f"{field} is not the name of a parameter")
            if not isinstance(t, torch.Tensor):
                self.wrong(field, t, "a tensor")
            if not t.is_floating_point():
                self.wrong(field, t, "float32")
            want = [v + bool(shared.get(name, (1, False))[1]) for v in vectors]
            if t.dim() != 2 or len(t) not in want:
                self.wrong(field, t, f"of shape ({' or '.join(map(str, want))}, elements)")
            out[name] = self.floats(self.here(t, field), field)
        return out

    def floats(self, t: torch.Tensor, field: str) -> torch.Tensor:
        """Returns the values in float32, and fails if that is not exact."""
        values = t.to(torch.float32)
        if not bool(torch.isfinite(values).all()) and not bool(torch.isfinite(t).all()):
            self.fail(f"{field} has NaN or Inf, which no memory keeps")
        if t.dtype.itemsize > 4 and not torch.equal(values.to(t.dtype), t):
            self.wrong(field, t, "float32, and some of its values are not float32 values")
        return values

    def shared(self, kept: object, world: int) -> dict[str, list[Any]]:
        if not isinstance(kept, Mapping):
            self.wrong("shared", kept, "a dictionary")
        out = {}
        for name, pair in kept.items():
            field = f"shared[{name!r}]"
            how = self.list_of(pair, field, "a pair")
            known = len(how) == 2 and _is_int(how[0], 1, max(world, 1)) and isinstance(how[1], int)
            if not known or world % how[0] or how[1] not in (0, 1):
                self.wrong(field, pair, f"[how many of {world} ranks share it, whether it is kept for all]")
            out[name] = [how[0], bool(how[1])]
        return out

    def rates(self, kept: object) -> dict[str, float]:
        if not isinstance(kept, Mapping):
            self.wrong("rates", kept, "a dictionary of numbers")
        for name, rate in kept.items():
            if not _is_number(rate) or rate < 0:
                self.wrong(f"rates[{name!r}]", rate, "a learning rate")
        return {name: float(rate) for name, rate in kept.items()}

    def complete(self, s: dict[str, Any], vectors: int) -> None:
        """Checks that residuals fit the groups, and that each group has all of its residuals or none."""
        sizes = {
            n: prod(shape) for g in s["layout"] for n, shape in zip(g["names"], g["shapes"], strict=True)
        }
        for name, t in s["residuals"].items():
            if name not in sizes:
                self.fail(f"residuals[{name!r}] is of a parameter that is in no group of layout")
            if t.shape[1] != sizes[name]:
                self.wrong(f"residuals[{name!r}]", t, f"of {sizes[name]} elements, as the parameter is")
        keeps = bool(vectors) and s.get("codec") is not None and not _keeps_nothing(s["codec"])
        # With a plan, residuals may be unassigned, waiting for a group that takes them: of a part of a dense
        # group, where the plan sends its other parameters uncompressed. Dense groups may have momenta.
        planned = s.get("controller") is not None or s.get("codec") == "auto" or s.get("groups") in PLANNED
        waits = planned or find_memory(s["memory"]).momentum
        for i, g in enumerate(s["layout"]):
            lack = [n for n in g["names"] if n not in s["residuals"]]
            candidate = g["way"]
            partly = len(lack) < len(g["names"]) and not (waits and candidate == DENSE)
            if lack and ((keeps and candidate == 0) or partly):
                self.fail(f"there is no residuals[{lack[0]!r}], of a parameter of layout[{i}]")
            if not lack and candidate == DENSE and not waits:
                self.fail(
                    f"layout[{i}]['way'] is {candidate} (dense), but there is residuals[{g['names'][0]!r}]"
                )


def _keeps_nothing(codec: str) -> bool:
    """Whether a group of this codec may have no residuals."""
    try:
        return codec != "auto" and find_codec(codec).lossless
    except SidcompError:
        return True
