"""The timeline of a plan as a picture: backward, encode, exchange and decode, one row each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sidcomp.errors import SetupError
from sidcomp.planner.fusion import SPANS

COLORS = (("#4c72b0", "#8da9d4"), ("#dd8452", "#f0b795"), ("#55a868", "#98cfa5"), ("#8172b3", "#b5abd6"))
Timeline = Sequence[Mapping[str, Any]]


def draw(rows: Mapping[str, Timeline | None], path: str | Path, title: str) -> None:
    """Draws the timelines of `rows`, such as {"predicted": ..., "measured": ...}, below each other.

    A timeline is what sidcomp.plan() returns; None is left out. The format follows the path's suffix. The two
    shades of a row take turns, group by group. Raises SetupError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SetupError("a picture needs matplotlib: pip install matplotlib") from None
    drawn = {name: timeline for name, timeline in rows.items() if timeline}
    figure = Figure(figsize=(11, 0.8 + 1.7 * len(drawn)), layout="constrained")
    figure.suptitle(title, parse_math=False)
    axes = figure.subplots(len(drawn), sharex=True, squeeze=False)[:, 0]
    end = max(group[k][1] for t in drawn.values() for group in t for k in SPANS if group[k])
    for axis, (name, timeline) in zip(axes, drawn.items(), strict=True):
        for row, (kind, colors) in enumerate(zip(SPANS, COLORS, strict=True)):
            for group in timeline:
                if group[kind]:
                    _bar(axis, row, group["group"], group[kind], colors[group["group"] % 2], end)
        axis.set_yticks(range(len(SPANS)), SPANS)
        axis.invert_yaxis()
        axis.set_ylabel(name, parse_math=False)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    axes[-1].set_xlabel("ms from the start of the iteration")
    axes[-1].set_xlim(0, max(end, 1) / 1e9 * 1.01)
    figure.savefig(path, dpi=150)


def _bar(axis: Any, row: int, group: int, span: Sequence[int], color: str, end: int) -> None:
    start, width = span[0] / 1e9, (span[1] - span[0]) / 1e9
    axis.barh(row, width, left=start, height=0.8, color=color)
    if span[1] - span[0] > end / 50:  # else the number would not fit
        axis.text(start + width / 2, row, str(group), ha="center", va="center", fontsize=8, color="white")
