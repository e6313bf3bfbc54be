"""Fusion plans, and what they are made from: cost curves, profiles, searches. Needs no torch."""

from sidcomp.planner.fusion import evaluate, plan
from sidcomp.planner.profile import Profile

__all__ = ["Profile", "evaluate", "plan"]
