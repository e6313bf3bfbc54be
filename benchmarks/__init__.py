"""Benchmarks: each prints medians with their spread, and ratios to a limit and to a rival of the same run."""
