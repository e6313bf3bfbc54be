"""Benchmarks: each prints medians with their spread, and ratios to the physical limit and to a named rival of the same run."""
