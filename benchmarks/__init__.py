"""Benchmarks: each prints medians, their spread, and ratios to a limit and to a baseline of the same run."""
