"""Plays a schedule with costs: when everything happens, what waits for what, and how much memory it takes (pure)."""

from threefold.simulate.costs import StepCosts
from threefold.simulate.play import simulate, step_s
from threefold.simulate.search import search, search_chunks
from threefold.simulate.timeline import Cause, Event, MemoryCurve, Timeline

__all__ = ["Cause", "Event", "MemoryCurve", "StepCosts", "Timeline", "search", "search_chunks", "simulate", "step_s"]
