"""Pipeline schedules as data: actions, generators, lowering, checker, text grammar (pure)."""

from threefold.schedule.actions import Action, Kind, partner
from threefold.schedule.check import check_lowered, check_schedule, require_legal, require_safe
from threefold.schedule.generators import build_schedule, forward_only, gpipe, naive, one_f_one_b
from threefold.schedule.grid import bubble_share
from threefold.schedule.lower import lower
from threefold.schedule.schedule import Schedule, parse_schedule, peak_live_microbatches
from threefold.schedule.timing import UNIT_COSTS, makespan, start_times

__all__ = [
    "UNIT_COSTS",
    "Action",
    "Kind",
    "Schedule",
    "bubble_share",
    "build_schedule",
    "check_lowered",
    "check_schedule",
    "forward_only",
    "gpipe",
    "lower",
    "makespan",
    "naive",
    "one_f_one_b",
    "parse_schedule",
    "partner",
    "peak_live_microbatches",
    "require_legal",
    "require_safe",
    "start_times",
]
