"""`make bench`: all benchmarks, one after the other; arguments go to none of them."""

from benchmarks import bench_codec, bench_hook

bench_codec.main(["--save"])
bench_hook.main(["--save"])
