"""Discrete-event simulation of a chain's decisions and their time, without bytes."""

from tiers.tuning.simulation.sim_chain import SimChain, SimTier
from tiers.tuning.simulation.simulate import simulate
from tiers.tuning.simulation.workload import Workload

__all__ = ["SimChain", "SimTier", "Workload", "simulate"]
