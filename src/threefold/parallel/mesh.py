"""The live side of ``layout``: one rank's place in the job and its process groups, as a value that is passed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from threefold.layout import AXES, Coord, Layout
from threefold.parallel.activity import ActivityLog, NullActivity
from threefold.parallel.collectives import Group, Traffic
from threefold.parallel.counters import MemoryCounter
from threefold.parallel.recorder import Recorder
from threefold.parallel.shared import open_shared_memory


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinate and its groups, by the axes that they connect."""

    layout: Layout
    rank: int
    device: torch.device
    groups: Mapping[str, Group]
    activity: ActivityLog
    traffic: Traffic
    memory: MemoryCounter = field(default_factory=MemoryCounter)
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def coord(self) -> Coord:
        """Position on each axis."""
        return self.layout.coord(self.rank)

    @property
    def place(self) -> str:
        """This rank in words, for messages."""
        return f"rank {self.rank} ({describe(self.coord)})"

    def group(self, *axes: str) -> Group:
        """The ranks that differ from this one in these axes only, e.g. ``group("dp", "tp")``."""
        return self.groups[group_name(self.layout, axes)]

    @property
    def dp(self) -> Group:
        """Ranks that hold the same parameters and see other data."""
        return self.group("dp")

    @property
    def tp(self) -> Group:
        """Ranks that hold the other parts of the same layers."""
        return self.group("tp")

    @property
    def pp(self) -> Group:
        """Ranks that hold the other stages of the same replica."""
        return self.group("pp")

    @property
    def world(self) -> Group:
        """Every rank of the job."""
        return self.group(*AXES)

    def tied(self, pp_ranks: Collection[int]) -> Group:
        """Ranks that hold a copy of a parameter that all of ``pp_ranks`` use: these coordinates of all replicas."""
        return self.dp if len(pp_ranks) == 1 else self.groups[tied_name(pp_ranks)]


def describe(coord: Coord) -> str:
    """``dp 0, pp 1, tp 0``."""
    return f"dp {coord.dp}, pp {coord.pp}, tp {coord.tp}"


def group_name(layout: Layout, axes: Iterable[str]) -> str:
    """Canonical name of a union of axes: ``dp+tp``. Axes of one rank add nothing and are left out."""
    sizes = {"dp": layout.dp, "pp": layout.pp, "tp": layout.tp}
    return "+".join(axis for axis in AXES if axis in set(axes) and sizes[axis] > 1)


def build_mesh(
    layout: Layout,
    rank: int,
    device: torch.device | None = None,
    activity: ActivityLog | None = None,
    tied: Collection[tuple[int, ...]] = (),
    shared_memory: bool = False,
) -> Mesh:
    """Make every group of the layout. All ranks must call this, after ``init_process_group``.

    ``tied`` lists the sets of pipeline coordinates that share a parameter, such as ``(0, pp - 1)`` for an embedding.
    With ``shared_memory``, groups whose ranks are CPU processes of one machine exchange through it if there is room.
    """
    activity = activity or NullActivity()
    traffic = Traffic()
    groups: dict[str, Group] = {}
    shares = shared_memory and (device is None or device.type == "cpu")

    def add(name: str, all_ranks: Iterable[tuple[int, ...]]) -> None:
        # new_group is collective over the world: every rank makes every group, in the same order.
        for ranks in all_ranks:
            handle = _process_group(ranks, layout.world_size)
            if rank in ranks:
                shared = open_shared_memory(handle, ranks, ranks.index(rank)) if handle and shares else None
                groups[name] = Group(name or "self", ranks, rank, handle, activity, traffic, shared)

    for axes in (("dp",), ("pp",), ("tp",), ("dp", "tp"), AXES):
        name = group_name(layout, axes)
        if name not in groups:
            add(name, layout.groups(axes) if name else [(r,) for r in range(layout.world_size)])
    for pp_ranks in sorted(set(tied)):
        add(tied_name(pp_ranks), tied_ranks(layout, pp_ranks))
    device = device or torch.device("cpu")
    return Mesh(layout, rank, device, groups, activity, traffic, recorder=Recorder.on(device))


def tied_name(pp_ranks: Collection[int]) -> str:
    """Name of the group of a parameter that several pipeline ranks use."""
    return f"tied pp {'+'.join(map(str, sorted(pp_ranks)))}"


def tied_ranks(layout: Layout, pp_ranks: Collection[int]) -> list[tuple[int, ...]]:
    """For each tp coordinate: the ranks with these pipeline coordinates in all replicas."""
    return [
        tuple(sorted(layout.rank(dp=dp, pp=pp, tp=tp) for dp in range(layout.dp) for pp in pp_ranks))
        for tp in range(layout.tp)
    ]


def _process_group(ranks: tuple[int, ...], world_size: int) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if len(ranks) == world_size:
        return dist.group.WORLD
    handle = dist.new_group(list(ranks))
    return handle if isinstance(handle, dist.ProcessGroup) else None
