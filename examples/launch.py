"""Starts train.py on two hosts that a link of limited bandwidth joins, on this machine: `make train`.

    python examples/launch.py --task digits --link 100mbit

All flags are train.py's. What the link carries is measured and printed first. Where the kernel does not let
us build a network, the next best is taken, and the table says so. With `--link none`, or on GPUs, it is
torchrun that starts the ranks.
"""

import os
import sys
from pathlib import Path

import flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.netlab.lab import Lab, LabError, parse_rate


def main() -> int:
    args = flags.parse(__doc__.split("\n")[0])
    train = [str(Path(__file__).with_name("train.py")), *sys.argv[1:]]
    if args.device == "cuda" and args.link not in (None, "none"):
        print(
            "launch.py: --link limits TCP, which GPUs of one machine do not use: leave it out",
            file=sys.stderr,
        )
        return 2
    if args.device == "cuda" or args.link == "none":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        os.execv(sys.executable, [sys.executable, *torchrun, *train])
    try:
        rate = parse_rate(args.link or "1gbit")
    except ValueError as e:
        print(f"launch.py: --link: {e}", file=sys.stderr)
        return 2
    try:
        with Lab.build(2, rate) as lab:
            lines = lab.introduce()
            lab.run([sys.executable, *train], env={"TRAIN_NETWORK": " ".join(lines)})
    except LabError as e:
        print(f"launch.py: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
