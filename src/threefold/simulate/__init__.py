"""Plays a schedule with costs: when everything happens, what waits for what, and how much memory it takes (pure)."""

from threefold.simulate.costs import StepCosts
from threefold.simulate.play import simulate
from threefold.simulate.timeline import Cause, Event, MemoryCurve, Timeline

__all__ = ["Cause", "Event", "MemoryCurve", "StepCosts", "Timeline", "simulate"]
