"""SIDCo's figures 1b and 12 to 17 on a CPU: how much faster than top-k each codec compresses.

The paper's premise is that selecting the k largest elements costs most, which an estimated threshold saves.
"torch top-k" is that selection as the paper has it: torch.topk over the magnitudes. The codecs are
sidcomp's, whose top-k finds the exact threshold in its pass over the vector. Vectors have the sizes of the
paper's models, with elements from a Laplace distribution; the last one is a gradient of the task lstm.
"""

import itertools
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from benchmarks.common import RESULTS, command, race, report
from benchmarks.examples import TASKS
from benchmarks.netlab.replay import record
from benchmarks.papers.redsync_selection import POOL, WARM, encoder, top_k, turned

SIZES = {"ResNet20": 269_722, "VGG16, CIFAR-10": 14_982_987, "ResNet50": 25_559_081}
CODECS = ("topk", "dgc", "redsync", "gaussiank", "sidco-e", "sidco-gp", "sidco-p")
RATIOS = (0.1, 0.01, 0.001)


def gradients(task: str, steps: int = 20) -> list[np.ndarray]:
    """Gradients of the last POOL of these steps of training, without clipping, as flat vectors."""
    kind = TASKS[task]
    what = kind(0, 1, kind.batch, torch.device("cpu"))
    return [torch.cat(of_step).numpy() for of_step in record(what, steps, POOL)]


def run(sizes: dict[str, int], ratios: list[float], repeats: int) -> list[dict[str, str]]:
    rows = []
    vectors = {
        name: [np.random.default_rng(i).laplace(size=n).astype(np.float32) for i in range(POOL)]
        for name, n in sizes.items()
    }
    vectors["lstm, its gradients"] = gradients("lstm")
    for (name, of), ratio in itertools.product(vectors.items(), ratios):
        n = len(of[0])
        k = max(1, round(ratio * n))
        tensors = itertools.cycle([torch.from_numpy(v) for v in of])
        runners: dict[str, Callable[[], object]] = {
            "torch top-k": lambda k=k, tensors=tensors: top_k(next(tensors), k)
        }
        runners |= {c: encoder(turned(of, i), ratio, c, fresh=False) for i, c in enumerate(CODECS, 1)}
        took = race(runners, repeats)
        row = {"vector": name, "elements": f"{n:,}", "ratio": f"{ratio:g}"}
        row["torch top-k, ms"] = str(took["torch top-k"])
        row["topk, ms"] = str(took["topk"])
        row |= {f"{c} / torch top-k": f"{took['torch top-k'].median / took[c].median:.1f}" for c in CODECS}
        row |= {f"{c} / topk": f"{took['topk'].median / took[c].median:.2f}" for c in CODECS[1:]}
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = command("papers.sidco_speed", __doc__)
    add = parser.add_argument
    add("--repeats", type=int, default=15, help="timed runs of each (default 15)")
    add("--short", action="store_true", help="only the smallest model and lstm")
    add("--save", action="store_true", help="write benchmarks/results/papers-sidco-speed.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    sizes = dict(list(SIZES.items())[:1]) if args.short else SIZES
    rows = run(sizes, list(RATIOS), args.repeats)
    over = [float(row[f"{c} / topk"]) for row in rows for c in CODECS[4:]]
    exact = [float(row["topk / torch top-k"]) for row in rows]
    note = (
        f"Speed-up of a compression over torch.topk, and over sidcomp's own top-k; median [quartiles] of "
        f"{args.repeats}, one thread, no residual, each codec after {WARM} calls. The exact top-k is "
        f"{min(exact):.0f} to {max(exact):.0f} times as fast as torch.topk (median {median(exact):.0f}). The "
        f"three SIDCo codecs are {min(over):.2f} to {max(over):.2f} times as fast as that top-k (median "
        f"{median(over):.2f}), so an estimated threshold {'saves' if median(over) > 1 else 'does not save'} "
        "time over an exact one here."
    )
    out = RESULTS if args.save else None
    report("papers-sidco-speed", "Compression beside top-k (SIDCo, figures 1b, 12 to 17)", rows, note, out)


if __name__ == "__main__":
    main()
