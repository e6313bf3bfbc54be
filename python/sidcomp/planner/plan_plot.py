"""Draws the timeline of a plan: backward, encode, exchange and decode in one row each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from sidcomp import files
from sidcomp.planner.fusion import SPANS

COLORS = (("#4c72b0", "#8da9d4"), ("#dd8452", "#f0b795"), ("#55a868", "#98cfa5"), ("#8172b3", "#b5abd6"))
GREY = "#b0b0b0"
TITLE = "One training step: when each group of gradients is computed, compressed, sent and decompressed"
Timeline = Sequence[Mapping[str, Any]]


def draw(rows: Mapping[str, Timeline | None], path: str | Path, title: str) -> None:
    """Draws the timelines in `rows`, such as {"predicted": ..., "measured": ...}, one below the other.

    A timeline is what `plan` returns; None is skipped. The path's suffix chooses the format. The two shades
    of a row alternate from group to group. Compressed groups are hatched: those with a true "compressed" or,
    without that key, those that are encoded. Raises SetupError if matplotlib is missing, and
    ArgumentError, which names file and cause, if it cannot be written.
    """
    drawn = {name: timeline for name, timeline in rows.items() if timeline}
    lines = wrap(title, 120)
    figure = files.blank_picture(11, 1.3 + 0.2 * len(lines) + 1.7 * len(drawn))
    from matplotlib.patches import Patch

    figure.suptitle("\n".join([TITLE, *lines]), fontsize=10, parse_math=False)
    axes = figure.subplots(len(drawn), sharex=True, squeeze=False)[:, 0]
    end = max(group[k][1] for t in drawn.values() for group in t for k in SPANS if group[k])
    for axis, (name, timeline) in zip(axes, drawn.items(), strict=True):
        for row, (kind, colors) in enumerate(zip(SPANS, COLORS, strict=True)):
            for group in timeline:
                if group[kind]:
                    hatch = "////" if group.get("compressed", group["encode"]) else ""
                    _bar(axis, row, group["group"], group[kind], colors[group["group"] % 2], hatch, end)
        axis.set_yticks(range(len(SPANS)), SPANS)
        axis.set_ylim(len(SPANS) - 0.5, -0.5)
        axis.set_ylabel(name, parse_math=False)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    axes[-1].set_xlabel("ms from the start of the iteration; the numbers are those of the groups")
    axes[-1].set_xlim(0, max(end, 1) / 1e9 * 1.01)
    kinds = (Patch(fc=GREY, ec="white", hatch="////", label="compressed"), Patch(fc=GREY, label="sent dense"))
    figure.legend(handles=kinds, loc="outside lower right", ncols=2, frameon=False, fontsize=9)
    files.picture(path, figure)


def _bar(axis: Any, row: int, group: int, span: Sequence[int], color: str, hatch: str, end: int) -> None:
    start, width = span[0] / 1e9, (span[1] - span[0]) / 1e9
    axis.barh(row, width, left=start, height=0.8, color=color, hatch=hatch, edgecolor="white", linewidth=0)
    if span[1] - span[0] > end / 50:  # otherwise the number would not fit
        behind = {"facecolor": color, "edgecolor": "none", "pad": 1.5}
        axis.text(start + width / 2, row, str(group), ha="center", va="center", fontsize=8, bbox=behind)
