"""`make bench`: all benchmarks, one after the other. `--save` writes benchmarks/results/."""

import sys

from benchmarks import bench_codec, bench_hook

save = [a for a in sys.argv[1:] if a == "--save"]
for benchmark in (bench_codec, bench_hook):
    benchmark.main(save)
