"""Pipeline schedules as data: actions, generators, lowering, checker, text grammar (pure)."""

from threefold.schedule.actions import Action, Kind, partner
from threefold.schedule.check import check_lowered, check_schedule, require_legal, require_safe
from threefold.schedule.generators import forward_only, gpipe, naive, one_f_one_b
from threefold.schedule.grid import bubble_share
from threefold.schedule.interleaved import interleaved_1f1b
from threefold.schedule.lower import lower
from threefold.schedule.named import NAMED, build_schedule
from threefold.schedule.of_job import job_schedule, read_schedule
from threefold.schedule.schedule import Placement, Schedule, parse_schedule, peak_live_microbatches
from threefold.schedule.search import SEARCHED
from threefold.schedule.timing import UNIT_COSTS, idle_share, makespan, start_times
from threefold.schedule.zero_bubble import zb_h1, zb_v

__all__ = [
    "NAMED",
    "SEARCHED",
    "UNIT_COSTS",
    "Action",
    "Kind",
    "Placement",
    "Schedule",
    "bubble_share",
    "build_schedule",
    "check_lowered",
    "check_schedule",
    "forward_only",
    "gpipe",
    "idle_share",
    "interleaved_1f1b",
    "job_schedule",
    "lower",
    "makespan",
    "naive",
    "one_f_one_b",
    "parse_schedule",
    "partner",
    "peak_live_microbatches",
    "read_schedule",
    "require_legal",
    "require_safe",
    "start_times",
    "zb_h1",
    "zb_v",
]
