"""The papers' claims beside what benchmarks/results holds: the table `claims` of benchmarks/tables.py.

An outcome compares one number. "as large": at least 0.9 of the paper's gain. "smaller": in the paper's
direction. "not here": the other way, or nothing to see. "upper limit": the paper trained, and here nothing
was computed between the exchanges. Rows that trained decide where there are some.
"""

import json
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from benchmarks.compact_json import RESULTS

Row = dict[str, Any]


class Found(NamedTuple):
    text: str
    outcome: str


class Claim(NamedTuple):
    """file: of benchmarks/results, without papers- and .json; empty: it cannot be shown here. why: not."""

    paper: str
    says: str
    file: str = ""
    found: Callable[[list[Row]], Found] | None = None
    why: str = ""


def compare(ours: float, papers: float, neutral: float = 1.0) -> str:
    """Both are larger than `neutral` where the claim holds."""
    return outcome(ours >= neutral + 0.9 * (papers - neutral), ours > neutral + 0.02)


def outcome(whole: bool, part: bool) -> str:
    """Whether the claim holds as the paper has it, or in part."""
    return "as large" if whole else "smaller" if part else "not here"


UPPER = "upper limit"


def trained(row: Row) -> bool:
    """Whether the ranks computed gradients, or waited as long, and did not only replay them
    (benchmarks/netlab/replay.py)."""
    return not row["task"].endswith(("-replay", "-sizes"))


def place(row: Row) -> str:
    return f"{row['task']}, {row['hosts']} ranks, {row['link']}"


def largest(column: str, papers: float, only: str = "") -> Callable[[list[Row]], Found]:
    """The largest ratio in a column, where it was, and the median. only: of these codecs."""

    def found(rows: list[Row]) -> Found:
        chosen = [row for row in rows if row[column] and (not only or row["codec"] in only.split(","))]
        return best_of([(float(row[column]), row["codec"], row) for row in chosen], papers)

    return found


def best_of(ratios: list[tuple[float, str, Row]], papers: float, by_median: bool = False) -> Found:
    """The largest ratio of those that trained, and of the others. by_median: where the median is below 1, the
    largest one is luck, and the outcome is the median's."""
    texts, found = [], UPPER
    for computed in (True, False):
        some = [x for x in ratios if trained(x[2]) is computed]
        if not some:
            continue
        top, name, row = max(some, key=lambda x: x[0])
        middle = median(x for x, _, _ in some)
        what = "" if computed else "without computing "
        texts.append(f"{what}up to {top:.2f} times ({name}, {place(row)}), median {middle:.2f}")
        if computed:
            found = compare(middle if by_median and middle < 1 else top, papers)
    return Found("; ".join(texts), found)


def ratio(over: str, under: str, papers: float, only: str = "") -> Callable[[list[Row]], Found]:
    """The same of two columns of scaling factors."""

    def found(rows: list[Row]) -> Found:
        name = f"{over} / {under}"
        more = [{**row, name: float(row[over]) / float(row[under])} for row in rows if row[over]]
        return largest(name, papers, only)(more)

    return found


def layer_wise_is_slower(rows: list[Row]) -> Found:
    rows = [row for row in rows if row["layer"]]
    slower = [row for row in rows if float(row["layer"]) < float(row["plain DDP by layer"])]
    buckets = [row for row in rows if float(row["layer"]) < float(row["plain DDP in buckets"])]
    equal = [row for row in rows if float(row["layer"]) == float(row["plain DDP by layer"])]
    n = len(rows)
    return Found(
        f"slower than an all-reduce of each tensor in {len(slower)} of {n} cases, as fast to two digits in "
        f"{len(equal)}, slower than DDP's buckets in {len(buckets)}",
        outcome(len(slower) > n / 2, bool(slower) or len(buckets) > n / 2),
    )


def scaling(papers: float) -> Callable[[list[Row]], Found]:
    """The best scaling factor of merged compression."""

    def found(rows: list[Row]) -> Found:
        factor, row = max(((float(r["mergecomp"]), r) for r in rows if r["mergecomp"]), key=lambda x: x[0])
        return Found(
            f"at most {100 * factor:.0f} % ({row['codec']}, {place(row)})", compare(factor, papers, 0.5)
        )

    return found


def soon(hook: str, rows: list[Row]) -> tuple[float, Row]:
    """How many times as soon as plain DDP a hook has plain DDP's loss at half the steps; 0: never."""
    row = next(row for row in rows if row["hook"].startswith(hook))
    return float(row["times as soon"] or 0), row


def sooner(hook: str, papers: float) -> Callable[[list[Row]], Found]:
    """hook: what its name begins with."""

    def found(rows: list[Row]) -> Found:
        gain, row = soon(hook, rows)
        if not gain:
            return Found(f"not within the run ({place(row)})", "not here")
        return Found(f"{gain:.2f} times as soon ({place(row)})", compare(gain, papers))

    return found


def sooner_than(hook: str, other: str, papers: float) -> Callable[[list[Row]], Found]:
    """The same, as a ratio of two hooks; where the other one has not got there, the direction counts."""

    def found(rows: list[Row]) -> Found:
        (gain, row), (behind, _) = soon(hook, rows), soon(other, rows)
        if not gain:
            return Found(f"not within the run ({place(row)})", "not here")
        if not behind:
            return Found(f"only merged within the run ({place(row)})", "yes")
        return Found(f"{gain / behind:.2f} times as soon ({place(row)})", compare(gain / behind, papers))

    return found


def less_time(hook: str, papers: float) -> Callable[[list[Row]], Found]:
    """The share of plain DDP's time that a hook saves until it has plain DDP's loss."""

    def found(rows: list[Row]) -> Found:
        gain, row = soon(hook, rows)
        saved = 1 - 1 / gain if gain else 0.0
        text = f"{100 * saved:.0f} % less" if gain else "not within the run"
        return Found(f"{text} ({place(row)})", compare(saved, papers, 0.0))

    return found


def gains_nothing(rows: list[Row]) -> Found:
    """Whether RGC trains a ResNet-50 no faster than plain DDP."""
    row = next(r for r in rows if r["task"] == "resnet50" and r["hook"].startswith("redsync:layer"))
    gain = float(row["speed / plain DDP"])
    return Found(
        f"{gain:.2f} times as fast as plain DDP ({place(row)})", "yes" if gain <= 1.02 else "not here"
    )


def searched(most: int) -> Callable[[list[Row]], Found]:
    """The steps that MergeComp's search took, of every hook that planned."""

    def found(rows: list[Row]) -> Found:
        steps = [int(row["steps of the search"]) for row in rows if row["steps of the search"]]
        outcome = "yes" if max(steps) < most else "not here" if min(steps) >= most else "in part"
        return Found(f"{' and '.join(map(str, sorted(steps)))} steps", outcome)

    return found


def as_accurate(rows: list[Row]) -> Found:
    """Marsit beside uncompressed training, table 2: is it behind by more than the paper's 1.3 points?"""
    ranks = [name for name in rows[0] if name.endswith(" ranks")]
    by_name = {row["way"]: row for row in rows}
    texts, behind = [], []
    for n in ranks:
        dense, ours = (float(by_name[name][n].split(", ")[0]) for name in ("PSGD", "Marsit-100"))
        behind.append(100 * (dense - ours))
        texts.append(f"{n}: {ours:.4f}, uncompressed {dense:.4f}")
    return Found("; ".join(texts), "yes" if max(behind) <= 1.3 else "not here")


def hooks_over(over: Callable[[str], bool], under: Callable[[str, Row], str | None], papers: float,
               ) -> Callable[[list[Row]], Found]:  # fmt: skip
    """The largest ratio of times of hooks that stand in one table."""

    def found(rows: list[Row]) -> Found:
        times = {(place(row), row["hook"]): float(row["ms a step"].split()[0]) for row in rows}
        ratios = []
        for row in rows:
            other = under(row["hook"], row)
            if over(row["hook"]) and (place(row), other) in times:
                gain = times[place(row), other] / times[place(row), row["hook"]]
                ratios.append((gain, row["hook"], row))
        return best_of(ratios, papers, by_median=True)

    return found


def sidco(hook: str) -> bool:
    return hook.startswith("sidco")


def beside(codec: str) -> Callable[[str, Row], str | None]:
    """The hook of `codec` with the arguments of another one."""
    return lambda hook, row: codec + hook[hook.index("[") :] if "[" in hook else None


DENSE = ("dense", "fp16", "bf16-sum32")  # hooks that send every element


def at_equal_time(rows: list[Row]) -> Found:
    """The losses of SIDCo's codecs at the end of their runs, of the best other codec, whose steps take as
    long, and of plain DDP after as many seconds."""
    ours = [row for row in rows if sidco(row["hook"])]
    others = [row for row in rows if not sidco(row["hook"]) and row["hook"] not in DENSE]
    column = next(name for name in ours[0] if name.startswith("loss at "))
    pairs = [(float(row[column]), float(row["plain DDP's by then"])) for row in ours]
    lower = sum(a < b for a, b in pairs)
    other = min(others, key=lambda row: float(row[column]))
    lowest = min(a for a, _ in pairs) < float(other[column])
    text = ", ".join(f"{row['hook'].split('[')[0]} {a:.2f}" for row, (a, _) in zip(ours, pairs, strict=True))
    return Found(
        f"{text}, plain DDP {max(b for _, b in pairs):.2f}, {other['hook'].split('[')[0]} "
        f"{float(other[column]):.2f} ({place(ours[0])})",
        outcome(lower == len(pairs) and lowest, lower > 0),
    )


def search_times(rows: list[Row]) -> Found:
    printed = [row for row in rows if row["algorithm"] == "cupcake" and row["search"] == "both prunings"]
    printed = [row for row in printed if row["start"] == "none"]
    ended = [row for row in printed if not row["seconds"].startswith(">")]  # > a time: cut there
    text = "; ".join(
        f"{row['instance'].split(',')[0]} {row['seconds']} s, {row['over optimum']} of the optimum"
        for row in printed
    )
    return Found(text, f"in {len(ended)} of {len(printed)}")


def passing(rows: list[Row]) -> Found:
    means = [float(row[c].split()[0]) for row in rows for c in ("sidco-e", "sidco-gp", "sidco-p")]
    inside = [m for m in means if 0.8 <= m <= 1.2]
    return Found(
        f"{len(inside)} of {len(means)} means within 20 %, {min(means):.2f} to {max(means):.2f}",
        outcome(len(inside) == len(means), len(inside) > len(means) / 2),
    )


def faster_than(topk: str) -> Callable[[list[Row]], Found]:
    """The three SIDCo codecs beside a top-k. The paper prints no factor, so only the direction counts."""

    def found(rows: list[Row]) -> Found:
        over = [float(row[f"{c} / {topk}"]) for row in rows for c in ("sidco-e", "sidco-gp", "sidco-p")]
        text = f"{min(over):.2f} to {max(over):.2f} times as fast, median {median(over):.2f}"
        return Found(text, "yes" if min(over) > 1 else "not here" if median(over) < 1 else "mostly")

    return found


def selection(rows: list[Row]) -> Found:
    torchs = [row["torch topk"] / min(row["torch Alg. 2"], row["torch Alg. 3"]) for row in rows]
    faster = [row["KB"] for row, gain in zip(rows, torchs, strict=True) if gain > 1]
    row = rows[-1]
    ours = row["topk"] / min(row["trimmed"], row["binary"])
    kept = row["topk"] / row["binary / 5"]
    sizes = f"{len(faster)} of {len(rows)} sizes (KB: {', '.join(faster)})"
    return Found(
        f"in torch's operations up to {max(torchs):.1f} times as fast as torch.topk, faster at {sizes}; at "
        f"{row['KB']} KB {ours:.2f} times as fast as sidcomp's exact top-k, {kept:.2f} with a threshold kept "
        "for five steps",
        "for large ones" if len(faster) < len(rows) else "yes",
    )


def matching(rows: list[Row]) -> Found:
    marsit = [row["match %"] for row in rows if row["way"] == "Marsit, ring"]
    cascade = [row["match %"] for row in rows if row["way"] == "SSDM, cascading"]
    return Found(
        f"Marsit {min(marsit):.0f} to {max(marsit):.0f} %, "
        f"cascading {min(cascade):.0f} to {max(cascade):.0f} %",
        outcome(min(marsit) > max(cascade), False),
    )


def fewer_bytes(rows: list[Row]) -> Found:
    def sent(hook: str) -> float:
        return float(next(r["bytes sent a step"] for r in rows if r["hook"] == hook).replace(",", ""))

    dense, signs = (1 - sent("marsit+ring1") / sent(name) for name in ("dense", "signsgd"))
    return Found(
        f"with 4 ranks {100 * dense:.0f} % fewer bytes than plain DDP, {100 * signs:.0f} % fewer than "
        "signSGD by all-gather",
        outcome(dense >= 0.9 and signs >= 0.63, min(dense, signs) > 0.02),
    )


def grouping_keeps(rows: list[Row]) -> Found:
    """Merged beside layer by layer, of the same codec: does the mean fall below the worst seed by layer?"""
    groups = {row["what"]: row for row in rows if "--groups" in row["what"]}
    metric = next(name for name in ("accuracy", "validation loss") if name in rows[0])
    sign = 1 if metric == "accuracy" else -1
    texts, kept = [], []
    for what, row in groups.items():
        merged = groups.get(what.replace("layer", "even:2"))
        if "layer" not in what or merged is None:
            continue
        worst = min(sign * float(x) for x in row["each seed"].split())
        kept.append(sign * float(merged[metric]) >= worst)
        texts.append(f"{what.split()[1]} {row[metric]} by layer, {merged[metric]} merged")
    dense = next(row for row in rows if row["what"] == "dense")
    far = all(
        sign * float(row[metric]) < min(sign * float(x) for x in dense["each seed"].split())
        for row in groups.values()
    )
    outcome = "yes" if all(kept) else "in part" if any(kept) else "not here"
    outcome += ", but all lose to plain DDP" if far else ""
    return Found(f"{metric}: {'; '.join(texts)}; plain DDP {dense[metric]}", outcome)


def as_good_as_sgd(what: str, points: float) -> Callable[[list[Row]], Found]:
    """RGC and its quantised form beside SGD: in how many of the rows are they no worse by more than the
    paper's own largest difference, in points of the error, or in percent of the loss."""

    def found(rows: list[Row]) -> Found:
        systems = [name for name in rows[0] if name.startswith("RGC")]
        fine, texts = 0, []
        for row in rows:
            sgd = float(row["SGD"].split()[0])
            most = points * sgd / 100 if "loss" in row.get("metric", "") else points
            means = [float(row[name].split()[0]) for name in systems]
            fine += sum(x <= sgd + most for x in means)
            texts.append(f"{row[what]}: SGD {sgd:.2f}, RGC {', '.join(f'{x:.2f}' for x in means)}")
        of = len(rows) * len(systems)
        text = f"no further than the paper's in {fine} of {of} cases ({'; '.join(texts)})"
        return Found(text, outcome(fine == of, fine > 0))

    return found


def unpack_grows(rows: list[Row]) -> Found:
    shares = [(int(row["ranks"]), float(row["unpack %"]), float(row["communicate %"])) for row in rows]
    fewest, most = min(r for r, _, _ in shares), max(r for r, _, _ in shares)
    first, last = (max(u for r, u, _ in shares if r == ranks) for ranks in (fewest, most))
    waits = max(c for r, _, c in shares if r == most)
    return Found(
        f"unpack takes at most {first:.0f} % with {fewest} ranks and {last:.0f} % with {most}, "
        f"communication up to {waits:.0f} %",
        "as large" if last > 60 else "too few ranks",
    )


def power_law(rows: list[Row]) -> Found:
    without, fed = ([float(r["p"]) for r in rows if r["memory"] == m] for m in ("none", "residual"))
    above = sum(p > 0.5 for p in without)
    return Found(
        f"p = {min(without):.2f} to {max(without):.2f} without error feedback, "
        f"{min(fed):.2f} to {max(fed):.2f} with it",
        outcome(min(without) > 0.7, above > 0),
    )


def cascading_by_layer(rows: list[Row]) -> Found:
    rates = [(row["elements"], row["SSDM, cascading %"]) for row in rows]
    rest = [rate for _, rate in rates[1:]]
    near = all(54 <= rate <= 58 for _, rate in rates)
    larger = f"{min(rest):.0f} to {max(rest):.0f} % in larger ones"
    return Found(
        f"{rates[0][1]:.0f} % in tensors of {rates[0][0]} elements, {larger}",
        outcome(near, True),
    )


CLAIMS = [
    Claim(
        "MergeComp, figure 2",
        "layer by layer, most compressors are slower than no compression",
        "mergecomp-scaling",
        layer_wise_is_slower,
    ),
    Claim(
        "MergeComp, figures 4 to 6",
        "merged, up to 3.83 times as fast as layer by layer",
        "mergecomp-scaling",
        largest("mergecomp / layer", 3.83),
    ),
    Claim(
        "MergeComp, figures 4 to 6",
        "and up to 2.91 times as fast as no compression (here: an all-reduce of each tensor)",
        "mergecomp-scaling",
        largest("mergecomp / plain DDP by layer", 2.91),
    ),
    Claim(
        "MergeComp, figures 4 to 6",
        "the same (here: plain DDP in its buckets)",
        "mergecomp-scaling",
        ratio("mergecomp", "plain DDP in buckets", 2.91),
    ),
    Claim(
        "MergeComp, figures 4 to 6",
        "over layer by layer, with 8 GPUs and over a fast link",
        "mergecomp-ranks",
        largest("mergecomp / layer", 3.83),
    ),
    Claim(
        "MergeComp, figures 4 to 6",
        "over layer by layer, on the published tensors of ResNets (here with top-k)",
        "mergecomp-sizes",
        largest("mergecomp / layer", 3.83),
    ),
    Claim(
        "MergeComp, abstract",
        "scaling factors up to 99 %",
        "mergecomp-scaling",
        scaling(0.99),
    ),
    Claim(
        "MergeComp, table 4",
        "merging keeps the accuracy of layer-wise compression",
        "convergence-transformer",
        grouping_keeps,
    ),
    Claim(
        "MergeComp, table 2",
        "two groups are up to 1.23 times as fast as one",
        "mergecomp-groups",
        ratio("mergecomp[Y=2]", "model", 1.23),
    ),
    Claim(
        "MergeComp, table 3",
        "the search is up to 1.055 times as fast as two even groups",
        "mergecomp-groups",
        ratio("mergecomp[Y=2]", "even:2", 1.055),
    ),
    Claim(
        "MergeComp, figure 7",
        "DGC, merged, converges 2.27 times as soon as no compression",
        "mergecomp-loss",
        sooner("dgc:mergecomp", 2.27),
    ),
    Claim(
        "MergeComp, figure 7",
        "and 3.28 times as soon as layer by layer",
        "mergecomp-loss",
        sooner_than("dgc:mergecomp", "dgc:layer", 3.28),
    ),
    Claim(
        "MergeComp, figure 8",
        "EF-signSGD, merged, converges 1.28 times as soon as no compression",
        "mergecomp-loss",
        sooner("efsignsgd:mergecomp", 1.28),
    ),
    Claim(
        "MergeComp, figure 8",
        "and 1.42 times as soon as layer by layer",
        "mergecomp-loss",
        sooner_than("efsignsgd:mergecomp", "efsignsgd:layer", 1.42),
    ),
    Claim(
        "MergeComp, section 5",
        "the search takes fewer than 50 iterations",
        "mergecomp-loss",
        searched(50),
    ),
    Claim(
        "Cupcake, figures 6 and 7",
        "up to 2.03 times as fast as no compression (here: plain DDP in its buckets)",
        "cupcake-scaling",
        ratio("cupcake", "plain DDP in buckets", 2.03),
    ),
    Claim(
        "Cupcake, figure 6",
        "up to 2.3 times as fast as layer by layer",
        "cupcake-scaling",
        largest("cupcake / layer", 2.3),
    ),
    Claim(
        "Cupcake, figure 9",
        "up to 1.18 times as fast as even groups, 1.12 as the best buckets (DGC)",
        "cupcake-scaling",
        ratio("cupcake", "even:2", 1.18, "dgc"),
    ),
    Claim(
        "Cupcake, section 5",
        "up to 1.64 times as fast as HiPress, 1.79 on 64 GPUs (here: compressing tensors from 16 KB on)",
        "cupcake-scaling",
        ratio("cupcake", "layer[exclude=<16KB]", 1.64),
    ),
    Claim(
        "Cupcake, figure 8",
        "DGC in its groups converges 1.68 times as soon as no compression",
        "cupcake-loss",
        sooner("dgc:cupcake", 1.68),
    ),
    Claim(
        "Cupcake, figure 8",
        "EF-signSGD 1.32 times as soon",
        "cupcake-loss",
        sooner("efsignsgd:cupcake", 1.32),
    ),
    Claim("Cupcake, table 1", "the search finds the optimum in 2.8, 6.6 and 4.2 s", "cupcake", search_times),
    Claim(
        "SIDCo, figures 1c and 9",
        "the number of elements is within 20 % of the target",
        "sidco-ratio-under",
        passing,
    ),
    Claim(
        "SIDCo, figure 7",
        "gradients follow a power law with an exponent above 0.7",
        "sidco-law",
        power_law,
    ),
    Claim(
        "SIDCo, figures 1b, 14 to 17",
        "threshold estimation compresses faster than top-k, also on a CPU (here: torch.topk)",
        "sidco-speed",
        faster_than("torch top-k"),
    ),
    Claim(
        "SIDCo, figures 1b, 14 to 17",
        "the same (here: sidcomp's exact top-k)",
        "sidco-speed",
        faster_than("topk"),
    ),
    Claim(
        "SIDCo, figures 3a and 5",
        "up to 41.7 times as fast as no compression",
        "sidco-training",
        hooks_over(sidco, lambda hook, row: "dense", 41.7),
    ),
    Claim(
        "SIDCo, figures 3a and 12",
        "up to 7.5 times as fast as training with top-k (here: by torch.topk)",
        "sidco-training",
        hooks_over(sidco, beside("torch-topk"), 7.5),
    ),
    Claim(
        "SIDCo, figure 3a",
        "the same (here: sidcomp's exact top-k)",
        "sidco-training",
        hooks_over(sidco, beside("topk"), 7.5),
    ),
    Claim(
        "SIDCo, figure 3a",
        "up to 1.9 times as fast as training with DGC",
        "sidco-training",
        hooks_over(sidco, beside("dgc"), 1.9),
    ),
    Claim(
        "SIDCo, figure 10",
        "at equal time the loss with SIDCo is the lowest",
        "sidco-loss",
        at_equal_time,
    ),
    Claim(
        "RedSync, figure 3",
        "for large tensors trimmed top-k and threshold search are faster than a top-k of all elements",
        "redsync-selection",
        selection,
    ),
    Claim(
        "RedSync, figures 7 to 9",
        "RGC trains an LSTM up to 4.72 times as fast as the baseline",
        "redsync-scaling",
        hooks_over(
            lambda hook: hook.startswith("redsync:layer"),
            lambda hook, row: "dense" if row["task"].startswith("lstm") else None,
            4.72,
        ),
    ),
    Claim(
        "RedSync, figures 7 to 9",
        "and its quantized form up to 1.2 times as fast as RGC (1.76 and 1.47)",
        "redsync-scaling",
        hooks_over(
            lambda hook: "quantised=on" in hook,
            lambda hook, row: hook.replace("quantised=on;", "") if row["task"].startswith("lstm") else None,
            1.2,
        ),
    ),
    Claim(
        "RedSync, figure 8",
        "ResNet50 gains nothing",
        "redsync-scaling",
        gains_nothing,
    ),
    Claim(
        "RedSync, figure 10",
        "unpacking takes most of the time on many ranks (69 % on 128)",
        "redsync-phases",
        unpack_grows,
    ),
    Claim(
        "RedSync, table 1",
        "RGC and its quantised form end where SGD does: at most 0.39 points worse",
        "redsync-networks",
        as_good_as_sgd("task", 0.39),
    ),
    Claim(
        "RedSync, table 2",
        "and they do so with larger batches: at most 1.84 points worse",
        "redsync-batches",
        as_good_as_sgd("batch, 4 ranks", 1.84),
    ),
    Claim(
        "Marsit, figure 1b",
        "cascading signs match in 56 % of the elements",
        "marsit-layers-resnet50",
        cascading_by_layer,
    ),
    Claim(
        "Marsit, figure 1b",
        "its signs match the sum's more often than cascading ones",
        "marsit-rate",
        matching,
    ),
    Claim(
        "Marsit, figure 4b",
        "90 % fewer bytes than no compression, 70 % fewer than signSGD",
        "marsit-time",
        fewer_bytes,
    ),
    Claim(
        "Marsit, figure 4a",
        "converges 1.5 times as soon as no compression",
        "marsit-loss",
        sooner("local/marsit+ring1[eta_s=0.002;full", 1.5),
    ),
    Claim(
        "Marsit, abstract",
        "35 % less time at the same accuracy",
        "marsit-loss",
        less_time("local/marsit+ring1[eta_s=0.002;full", 0.35),
    ),
    Claim(
        "Marsit, table 2",
        "accuracy within 1.3 points of no compression",
        "marsit-baselines-digits",
        as_accurate,
    ),
    *(
        Claim(paper, says, why=why)
        for paper, says, why in (
            ("Cupcake, figure 7", "uncompressed inside a node of 8 GPUs", "one machine without GPUs"),
            (
                "SIDCo, figures 4, 6, 11 and 13",
                "PTB, AN4 and ImageNet trained to the end",
                "days of computing",
            ),
            ("Marsit, table 1", "cascading diverges on 8 ranks", "in experiments/2026-11-marsit.md"),
        )
    ),
]


def rows() -> list[dict[str, str]]:
    """A row of texts for each claim."""
    out = []
    for claim in CLAIMS:
        here = Found(claim.why, "cannot be shown here")
        if claim.found is not None:
            name = f"papers-{claim.file}.json"
            here = claim.found(json.loads((RESULTS / name).read_text())["rows"])
            here = here._replace(text=f"[{here.text}](../benchmarks/results/{name})")
        out.append({"paper": claim.paper, "claim": claim.says, "here": here.text, "outcome": here.outcome})
    return out
