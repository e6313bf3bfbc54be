"""The journal holds the measurements of the search for a plan, in plain types, for checkpoints.

After a resume the controller's script makes the same measurements in the same order. It takes those that the
journal has, and measures only the rest. This module also checks everything that a checkpoint holds of a
controller. It does not import torch.
"""

import hashlib
import json
from typing import Any

from sidcomp.config.grouping import DENSE
from sidcomp.errors import ArgumentError, CheckpointError
from sidcomp.planner.fusion import VERSION
from sidcomp.planner.profile import Profile
from sidcomp.planner.significance import PAIRS, WORTH, is_faster
from sidcomp.runtime.plain_data import (
    Check,
    count,
    either,
    flag,
    listing,
    number,
    positive,
    record,
    text,
    whole,
    wrong,
)

Entry = dict[str, Any]

# An entry holds these besides "kind", "of" (what was measured) and "done" (whether it is complete).
#   turns    about the buckets: see measurement.turn; this rank's own
#   profile  about the buckets: the whole profile, in place of the turns
#   times    about groups: step times in ns; this rank's own until done, then means over the ranks
#   window   about a plan: times as above; rows: see measurement.took, this rank's own until done; took: what
#            all ranks make of them, once done
#   pairs    about a plan: pairs of windows in ns, means over the ranks; waiting: the elements that the plan
#            kept back on one rank, at most; counted only for accuracy="exact"
_EMPTY: dict[str, dict[str, Any]] = {
    "turns": {"turns": []},
    "profile": {"profile": None},
    "times": {"times": []},
    "window": {"times": [], "rows": [], "took": []},
    "pairs": {"pairs": [], "waiting": 0},
}
_LONGEST = 32  # steps of a window; those of Search._turns have 22 at most


class Journal:
    def __init__(self, entries: list[Entry] | None = None) -> None:
        self.entries: list[Entry] = [] if entries is None else entries
        self._at = 0

    def kind(self) -> str | None:
        """The kind of the next entry, or None if there is none."""
        return self.entries[self._at]["kind"] if self._at < len(self.entries) else None

    def next(self, kind: str, of: str) -> tuple[Entry, bool]:
        """The next entry, which may be complete, begun or new, and whether it replaced an entry about
        something else. All entries after a replaced one are dropped, too."""
        left = self.entries[self._at :]
        known = bool(left) and (left[0]["kind"], left[0]["of"]) == (kind, of)
        if not known:
            fresh = {name: [] if value == [] else value for name, value in _EMPTY[kind].items()}
            self.entries[self._at :] = [{"kind": kind, "of": of, "done": False, **fresh}]
        self._at += 1
        return self.entries[self._at - 1], bool(left) and not known

    def turn_into(self, entry: Entry) -> None:
        """Replaces the entries up to the last one that `next` returned by `entry`."""
        self.entries[: self._at] = [entry]
        self._at = 1

    def digests(self) -> list[str]:
        """A digest of each entry: of the part that all ranks must have in common before they use it."""
        return [digest(_common(e)) for e in self.entries]


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _common(e: Entry) -> Entry:
    """The entry with the values that differ from rank to rank replaced by their number."""
    if e["kind"] == "turns":
        return {**e, "turns": [[len(t["buckets"]), len(t["ready"])] for t in e["turns"]]}
    if e["kind"] in ("times", "window") and not e["done"]:
        rows = {"rows": [len(row) for row in e["rows"]]} if e["kind"] == "window" else {}
        return {**e, "times": len(e["times"]), **rows}
    if e["kind"] == "profile":
        return {**e, "profile": {**e["profile"], "measured_s": 0}}
    return e


# ---- what a checkpoint holds -------------------------------------------------------------------------------


def _profile(value: object, where: str) -> None:
    try:
        Profile.of(value)
    except ArgumentError as e:
        raise CheckpointError(f"{where}: {e}") from e


window = listing(positive, least=1, most=_LONGEST)
pairs = listing(listing(window, least=2, most=2), most=PAIRS)
_HOLDS: dict[str, dict[str, Check]] = {
    "turns": {
        "turns": listing(
            record(
                {
                    **dict.fromkeys(("dense", "dense_span", "alone_span"), count),
                    "compute": whole,
                    "buckets": listing(count),
                    "ready": listing(whole),
                }
            )
        )
    },
    "profile": {"profile": _profile},
    "times": {"times": listing(count)},
    "window": {"times": listing(count), "rows": listing(listing(whole)), "took": listing(whole)},
    "pairs": {"pairs": pairs, "waiting": count},
}


def entries(value: object, where: str) -> None:
    listing(record({"kind": text, "of": text, "done": flag}))(value, where)
    assert isinstance(value, list | tuple)
    for i, e in enumerate(value):
        if e["kind"] not in _HOLDS:
            raise wrong(f"{where}[{i}]['kind']", e["kind"], f"one of {', '.join(_HOLDS)}")
        record(_HOLDS[e["kind"]])(e, f"{where}[{i}]")
        if e["kind"] == "window":
            if len({len(row) for row in (*e["rows"], *([e["took"]] if e["took"] else []))}) > 1:
                raise wrong(f"{where}[{i}]['rows']", e["rows"], "rows of the same length")
            if e["done"] and not e["times"]:
                raise wrong(f"{where}[{i}]['times']", e["times"], "the times of some steps")
        if e["kind"] == "pairs" and e["done"] and is_faster(e["pairs"], WORTH) is None:
            raise wrong(f"{where}[{i}]['pairs']", e["pairs"], "enough pairs to decide")
        if i + 1 < len(value) and not e["done"]:
            raise wrong(f"{where}[{i}]['done']", False, "True, as in all entries but the last")


_SPAN = either(listing(whole, 2, 2))
_ROW = record({"backward": listing(whole, 2, 2), "encode": _SPAN, "exchange": _SPAN, "decode": _SPAN})
_TRIED = {"measured_ps": count, "against_ps": count, "pairs": count, "kept": flag}
_REPORT: dict[str, Check] = {
    "stage": text,
    **dict.fromkeys(("dense_ps", "compute_ps", "baseline_ps", "predicted_ps", "measured_ps"), count),
    **dict.fromkeys(("steps", "since"), count),
    "seconds": number,
    "why": text,
    "floors": listing(listing(number, 2, 2)),
    "log": listing(text),
    "tried": listing(record({**_TRIED, "groups": count, "predicted_ps": count})),
    "competed": listing(
        record(
            {
                **dict.fromkeys(("groups", "predicted_ps", "measured_ps", "steps"), count),
                "ways": listing(text),
                "chosen": flag,
            }
        )
    ),
    "compared": listing(record({**_TRIED, "step": count, "steps": count})),
    "plan": either(
        record(
            {"ends": listing(count), "methods": listing(count), "time_ps": count, "timeline": listing(_ROW)}
        )
    ),
}
_WATCH: dict[str, Check] = {
    **dict.fromkeys(("reference", "calm", "base", "strikes", "steps", "pause", "taken"), count),
    "times": listing(count),
    "comparing": flag,
    "pairs": pairs,
}
_IDENTITY: dict[str, Check] = {
    **dict.fromkeys(("model", "device", "backend", "version"), text),
    **dict.fromkeys(("world", "threads"), count),
}


def _rule(value: object, where: str) -> None:
    if value != "bucket":
        listing(listing(text, 1), 1)(value, where)


def check(saved: object) -> None:
    """Raises CheckpointError, which names the field at fault, unless a checkpoint's "controller" is as
    Controller.saved returns it. Accepts None, and everything that another version saved."""
    if saved is None:
        return
    record({"version": whole})(saved, "controller")
    assert isinstance(saved, dict)
    if saved["version"] != VERSION:
        return  # such a checkpoint is not used
    record(
        {"found": flag, "report": record({}, _REPORT)},
        {
            "identity": either(record(_IDENTITY)),
            "journal": entries,
            "spent": listing(count, 2, 2),
            "regime": either(record({"rule": _rule, "ways": listing(whole, 1)})),
            "watch": either(record({}, _WATCH)),
        },
    )(saved, "controller")
    regime, candidates = saved.get("regime"), "controller['regime']['ways']"
    if regime is not None:
        if isinstance(regime["rule"], list) and len(regime["ways"]) != len(regime["rule"]):
            raise wrong(candidates, regime["ways"], f"one number for each of {len(regime['rule'])} groups")
        if min(regime["ways"]) < DENSE:
            raise wrong(candidates, regime["ways"], f"numbers, {DENSE} or greater")
    if saved["found"] and regime is None and (saved.get("watch") or {}).get("comparing"):
        raise wrong("controller['regime']", None, "the groups of the plan that is being compared")
