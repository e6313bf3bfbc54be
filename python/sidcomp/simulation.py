"""Compression without a network: many ranks in one process, and networks that are simulated."""

from sidcomp.config.step_sizes import StepSizes, marsit_step_sizes
from sidcomp.standalone.loopback import Loopback
from sidcomp.standalone.simulation import Compute, Link, Simulation, simulate

__all__ = ["Compute", "Link", "Loopback", "Simulation", "StepSizes", "marsit_step_sizes", "simulate"]
