"""A model of who works when on one multiprocessor: producer, warpgroups, tensor cores.

The unit of time is one matmul of a tile. `simulate` follows a policy of the Hopper kernel, and
`run_order` an order that the reader writes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lib.core.charts import gantt
from lib.core.figures import BLUE, GRID, PURPLE, VERMILLION
from lib.profiling.trace import union

# Ticks per unit of time; divisible by 2 and 3, so that shared work ends on a tick.
TICKS = 12
# How long each takes alone.
MATMUL, SOFTMAX, LOAD = 1.0, 2.0, 0.5
# Tiles of keys, and of values, that the ring in shared memory holds.
STAGES = 2
# Tiles of keys in `run_order`.
TILES = 4
# A matmul -> the load that it waits for.
LOADED = {"scores": "load K", "values": "load V"}
# Readers' names of the matmuls.
SHORT = {"S": "scores", "PV": "values"}
# Colors of loads, of warpgroups, and of their matmuls: those with the values are paler.
KINDS = {"load": GRID, "A": BLUE, "B": VERMILLION, "C": PURPLE}
KINDS |= {"A S": BLUE, "B S": VERMILLION, "C S": PURPLE}
KINDS |= {"A PV": "#73AED1", "B PV": "#E6A373", "C PV": "#E3B6CD"}
# (warpgroup or -1 for the producer, what, tile)
Job = tuple[int, str, int]


# Schedules of the Hopper kernel by name: the arguments of `simulate`.
TIMELINES: dict[str, dict] = {
    "one, step by step": {"warpgroups": 1, "tiles": 4, "runs_ahead": False},
    "one, issuing ahead": {"warpgroups": 1, "tiles": 4, "runs_ahead": True},
    "two, unordered": {"warpgroups": 2, "tiles": 4, "runs_ahead": True},
    "two, ping-pong": {"warpgroups": 2, "tiles": 4, "runs_ahead": True, "ping_pong": True},
    "three, ping-pong": {"warpgroups": 3, "tiles": 4, "runs_ahead": True, "ping_pong": True},
}


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of work in a schedule."""

    who: int
    """The warpgroup; -1 for the producer."""

    what: str
    """`load K`, `load V`, `scores`, `softmax` or `values`."""

    tile: int
    """The tile of keys, from 0."""

    start: float
    end: float


def simulate(
    warpgroups: int, tiles: int, *, runs_ahead: bool, ping_pong: bool = False
) -> list[Span]:
    """Simulate a policy of the Hopper kernel.

    With `ping_pong` the tensor cores serve one warpgroup after the other; without, all
    that have issued a matmul share them, each more slowly. Exponentials are shared like that, too.
    The producer loads a tile once all warpgroups have used the one `STAGES` before it.

    Args:
        warpgroups: each goes through all `tiles` of keys, for its own queries.
        runs_ahead: whether a warpgroup issues the next tile's scores along with this tile's matmul
            of probabilities and values, not after it.
    """
    issued: list[Job] = []

    def choose(done: Mapping[Job, float]) -> list[Job]:
        # each warpgroup issues what it can; its matmuls run in that order, once their tile is there
        for group in range(warpgroups):
            jobs = _next_matmuls(group, tiles, done, runs_ahead)
            issued.extend(job for job in jobs if job not in issued)
        waiting = [job for job in issued if job not in done]
        heads = [next((j for j in waiting if j[0] == group), None) for group in range(warpgroups)]
        ready = [job for job in heads if job and (-1, LOADED[job[1]], job[2]) in done]
        return sorted(ready, key=issued.index)[: 1 if ping_pong else None]

    return _run(warpgroups, tiles, choose)


def run_order(order: str) -> list[Span]:
    """Let the tensor cores multiply in this order: `A.S0 B.S0 A.PV0 …`.

    A and B are warpgroups, S0 the scores of tile 0, and PV0 its weights times values. All keys and
    values are there. A softmax begins as soon as its scores are there. A warpgroup has room for two
    tiles of scores.

    Raises:
        TypeError: `order` is not a string.
        ValueError: a matmul is unknown, missing or there twice, or waits for one that comes later.
    """
    if not isinstance(order, str):
        raise TypeError(f"the order must be one string, found {type(order).__name__}")
    words = order.split()
    jobs = {
        f"{name}.{short}{tile}": (group, what, tile)
        for group, name in enumerate("AB")
        for short, what in SHORT.items()
        for tile in range(TILES)
    }
    for word in words:
        if word not in jobs:
            raise ValueError(f"no matmul is called {word!r}; the first is 'A.S0'")
    for name in jobs:
        if words.count(name) != 1:
            raise ValueError(f"{name} must be there once, found {words.count(name)} times")
    for index, word in enumerate(words):
        group, short, tile = word[0], word[2:-1], int(word[-1])
        needed = f"{group}.S{tile}" if short == "PV" else f"{group}.PV{tile - 2}"
        if needed in words[index:]:
            raise ValueError(f"{word} waits for {needed}, which comes later in this order")

    def choose(done: Mapping[Job, float]) -> list[Job]:
        word = next((word for word in words if jobs[word] not in done), None)
        if word is None:
            return []
        group, what, tile = jobs[word]
        # the matmuls that it needs came before
        is_ready = what == "scores" or (group, "softmax", tile) in done
        return [jobs[word]] if is_ready else []

    return _run(2, TILES, choose, has_producer=False)


def _run(
    warpgroups: int,
    tiles: int,
    choose: Callable[[Mapping[Job, float]], list[Job]],
    *,
    has_producer: bool = True,
) -> list[Span]:
    """Tick until all is done; `choose` says which matmuls share the tensor cores now.

    Without a producer, nothing is loaded.

    Raises:
        RuntimeError: nothing can go on; its argument is what is done.
    """
    began: dict[Job, float] = {}
    left: dict[Job, float] = {}
    done: dict[Job, float] = {}
    loads: list[Job] = [(-1, f"load {x}", i) for i in range(tiles) for x in "KV" * has_producer]
    groups, now = range(warpgroups), 0
    while len(done) < len(loads) + 3 * tiles * warpgroups:
        heads = choose(done)
        sums = [(g, "softmax", i) for g in groups for i in range(tiles) if _is_next(g, i, done)]
        loading = [job for job in loads if job not in done][:1]
        loading = [job for job in loading if _has_room(job, groups, done)]
        if not (heads or sums or loading):
            raise RuntimeError(done)
        # one tick, shared by all jobs of a kind
        for jobs, length in ((heads, MATMUL), (sums, SOFTMAX), (loading, LOAD)):
            for job in jobs:
                began.setdefault(job, now / TICKS)
                left[job] = left.get(job, length) - 1 / TICKS / len(jobs)
        now += 1
        for job in (*heads, *sums, *loading):
            if left[job] < 1e-9:
                done[job] = now / TICKS
    return [Span(*job, began[job], end) for job, end in done.items()]


def _next_matmuls(group: int, tiles: int, done: Mapping, runs_ahead: bool) -> list[Job]:
    """The matmuls that a warpgroup has issued by now."""
    jobs = []
    for i in range(tiles):
        before = done.get((group, "softmax", i - 1))
        if not runs_ahead:
            before = done.get((group, "values", i - 1))
        elif (group, "values", i - 2) not in done and i >= 2:
            before = None
        if i == 0 or before is not None:
            jobs.append((group, "scores", i))
        if (group, "softmax", i) in done:
            jobs.append((group, "values", i))
    # the next tile's scores come first
    return sorted(jobs, key=lambda job: (job[2] + (job[1] == "values") * 1.5, job[1]))


def _is_next(group: int, tile: int, done: Mapping) -> bool:
    """Whether a warpgroup computes the exponentials of `tile` now."""
    is_first = tile == 0 or (group, "softmax", tile - 1) in done
    return is_first and (group, "scores", tile) in done and (group, "softmax", tile) not in done


def _has_room(job: Job, groups: Sequence[int], done: Mapping) -> bool:
    """Whether the ring has a free slot for a load."""
    reader = {"load K": "scores", "load V": "values"}[job[1]]
    old = job[2] - STAGES
    return old < 0 or all((group, reader, old) in done for group in groups)


def busy_share(spans: Sequence[Span]) -> float:
    """The share of the time in which the tensor cores multiply."""
    busy = union([(span.start, span.end) for span in spans if span.what in LOADED])
    return float(np.diff(busy).sum() / max(span.end for span in spans))


def show_spans(spans: Sequence[Span], title: str) -> None:
    """Show lanes of the producer, if it is there, and of each warpgroup and its tensor cores.

    The title says how busy the tensor cores are.
    """
    names = {"scores": "S", "values": "PV", "softmax": "softmax ", "load K": "K", "load V": "V"}
    lanes: dict[str, list[tuple]] = collections.defaultdict(list)
    for span in spans:
        letter = "ABC"[span.who] if span.who >= 0 else ""
        if not letter:
            lane, kind = f"producer, {names[span.what]}", "load"
        elif span.what in LOADED:
            lane, kind = f"tensor cores, {letter}", f"{letter} {names[span.what]}"
        else:
            lane, kind = f"warpgroup {letter}", letter
        lanes[lane].append((span.start, span.end, kind, f"{names[span.what]}{span.tile}"))
    gantt(
        dict(sorted(lanes.items())),
        title=f"{title}: tensor cores busy {busy_share(spans):.0%} of the time",
        xlabel="time (1 = one matmul of a tile, alone)",
        styles={kind: {"color": color} for kind, color in KINDS.items()},
        legend="none",
        size=(9.5, 1.0 + 0.42 * len(lanes)),
    )
