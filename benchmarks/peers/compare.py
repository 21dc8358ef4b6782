"""Runs the systems of a mode in turn, beside their bound."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.peers.hosts import Host, PeerError, free_memory_share, machine_cpu_seconds
from benchmarks.peers.systems import BOUNDS, SINGLE, System, bubble_share, systems_of
from benchmarks.peers.work import CHECKED_STEPS, LOSS_TOLERANCE, Work

BUSY, TRIES = 0.05, 2
"""The part of the machine that others may use during a turn before it is repeated, and how often it runs at most."""
MIN_FREE_MEMORY = 0.05
"""A machine with less of it left would spend its time on finding memory."""


@dataclass
class Result:
    """What one system did. ``seconds`` and ``bounds`` are of the same rounds; ``error`` says why there are none.

    ``others`` is the part of the machine that other programs used in each turn of the system or its bound.
    """

    system: System
    work: Work
    seconds: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    error: str = ""
    bubble: float | None = None

    @property
    def quiet(self) -> list[int]:
        """The rounds that others hardly disturbed; all, if they are fewer than two."""
        rounds = [number for number, others in enumerate(self.others) if others <= BUSY]
        return rounds if len(rounds) >= 2 else list(range(len(self.seconds)))

    @property
    def shares(self) -> list[float]:
        """Share of the bound, by quiet round."""
        return [self.bounds[number] / self.seconds[number] for number in self.quiet]

    @property
    def step_s(self) -> float:
        """Median over quiet rounds."""
        return statistics.median(self.seconds[number] for number in self.quiet)

    @property
    def tokens_per_s(self) -> float:
        """Median over quiet rounds."""
        return self.work.tokens / self.step_s

    @property
    def disturbance(self) -> float:
        """What others used of the machine, median over the rounds that count."""
        return statistics.median(self.others[number] for number in self.quiet) if self.others else 0.0


def compare(
    mode: str, options: argparse.Namespace, work: Work, python: Mapping[str, str], truth: Sequence[float]
) -> list[Result]:
    """Build all systems of ``mode`` that ``options`` ask for, check their losses, and time them round by round.

    ``truth`` are the losses of one process. The first result is the bound's; there is none when no system is asked for.
    Raises PeerError when the bound fails.
    """
    systems = systems_of(mode, options.peers)
    systems = [system for system in systems if not options.systems or re.search(options.systems, system.name)]
    if not systems:
        return []
    results = [
        Result(system, work, bubble=bubble_share(system.schedule, options.ranks, work.microbatches))
        for system in systems
    ]
    with ExitStack() as stack:
        bound = stack.enter_context(Host(BOUNDS[mode], work, options.ranks, python, options.timeout))
        bound.ready()
        bound.losses(CHECKED_STEPS)
        own = Result(BOUNDS[mode], work)
        hosts = [_admit(result, truth, stack, options, python) for result in results]
        for number in range(options.rounds):
            _round(number, (own, bound), results, hosts, options)
        return [own, *results]


def single_losses(options: argparse.Namespace, work: Work, python: Mapping[str, str]) -> list[float]:
    """The first losses of one process."""
    with Host(SINGLE, work, 1, python, options.timeout) as host:
        host.ready()
        return host.losses(CHECKED_STEPS)


def _admit(
    result: Result,
    truth: Sequence[float],
    stack: ExitStack,
    options: argparse.Namespace,
    python: Mapping[str, str],
) -> Host | None:
    """Start a system; None, with the reason in ``result``, if it does not run or computes something else."""
    name = f"{result.system.mode} {result.system.name}"
    try:
        host = stack.enter_context(Host(result.system, result.work, options.ranks, python, options.timeout))
        host.ready()
        losses = host.losses(CHECKED_STEPS)
        if free_memory_share() < MIN_FREE_MEMORY:
            host.close()
            raise PeerError("the machine's memory is full: state fewer --systems or --ranks")
    except PeerError as error:
        result.error = str(error).splitlines()[0]
        print(f"{name}: {error if options.verbose else result.error}", file=sys.stderr, flush=True)
        return None
    if result.system.peer == "bound":
        return host
    worst = max(abs(loss / true - 1) for loss, true in zip(losses, truth, strict=True))
    print(
        f"{name}: losses {' '.join(f'{loss:.5f}' for loss in losses)}, off by {worst:.1e}", file=sys.stderr, flush=True
    )
    if not worst <= LOSS_TOLERANCE:
        result.error = f"its losses are off by {worst:.1e}, so no time counts"
        host.close()
        return None
    return host


def _round(
    number: int,
    bound: tuple[Result, Host],
    results: Sequence[Result],
    hosts: Sequence[Host | None],
    options: argparse.Namespace,
) -> None:
    """One turn of every system, in an order that moves on from round to round."""
    pairs = [(result, host) for result, host in zip(results, hosts, strict=True) if host is not None]
    first = number % len(pairs) if pairs else 0
    bound_s, bound_others = _quiet_turn(bound[1], options.steps)
    _note(bound[0], bound_s, bound_s, bound_others)
    for result, host in [*pairs[first:], *pairs[:first]]:
        try:
            seconds, others = _quiet_turn(host, options.steps)
        except PeerError as error:
            result.error = str(error).splitlines()[0]
            continue
        _note(result, seconds, bound_s, max(others, bound_others))
    told = ", ".join(
        f"{r.system.mode} {r.system.name} {r.bounds[-1] / r.seconds[-1]:.3f}" for r, _ in pairs if r.seconds
    )
    print(f"round {number + 1}: bound {bound_s:.3f} s; shares {told}", file=sys.stderr, flush=True)


def _note(result: Result, seconds: float, bound_s: float, others: float) -> None:
    result.seconds.append(seconds)
    result.bounds.append(bound_s)
    result.others.append(others)


def _quiet_turn(host: Host, steps: int) -> tuple[float, float]:
    """A turn that other programs hardly disturbed, or the least disturbed of some."""
    turns = [_turn(host, steps)]
    while turns[-1][1] > BUSY and len(turns) < TRIES:
        turns.append(_turn(host, steps))
    return min(turns, key=lambda turn: turn[1])


def _turn(host: Host, steps: int) -> tuple[float, float]:
    """Seconds a step, and the part of the machine that other programs used meanwhile."""
    begin, all_before, own_before = time.perf_counter(), machine_cpu_seconds(), host.cpu_seconds()
    seconds = host.seconds(steps)
    used = machine_cpu_seconds() - all_before - (host.cpu_seconds() - own_before)
    return seconds, max(0.0, used / (time.perf_counter() - begin) / (os.cpu_count() or 1))
