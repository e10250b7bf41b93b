"""Orders of a step on a clock: as the library predicts, and each fault by name."""

import itertools

import pytest

from lib.lessons.fsdp.exercises import fast_order, just_in_time, prefetching
from lib.lessons.fsdp.orders import Costs, play

TIMES = {"forward": 2.0, "backward": 4.0}


def costs(blocks: int, message: float = 1.0) -> Costs:
    return Costs.equal(blocks, **TIMES, gather=message, reduce=message)


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_with_fast_messages_the_first_and_the_last_are_exposed_and_two_blocks_held(blocks):
    played = play(prefetching(blocks), costs(blocks, 0.5))
    assert played.fault == "nothing"
    assert played.most == min(2, blocks)
    assert played.ms == pytest.approx(6.0 * blocks + 2 * 0.5)


def test_with_slow_messages_each_is_sent_after_the_other():
    played = play(prefetching(4), costs(4, 50.0))
    # seven all-gathers and four reduce-scatters, of which computing hides its own time at most
    assert 550.0 < played.ms <= 550.0 + 4 * 6.0


def test_a_block_is_held_from_the_start_of_its_all_gather_until_it_is_freed():
    spans = play(just_in_time(2), costs(2)).spans
    held = [(s.block, s.start, s.end) for s in spans if s.lane == "memory"]
    # block 1 stays between its passes
    assert held == [(0, 0.0, 3.0), (1, 3.0, 10.0), (0, 10.0, 16.0)]


def test_a_lane_does_one_thing_at_a_time():
    spans = play(prefetching(5), costs(5, 3.0)).spans
    for lane in ("compute", "network"):
        own = [span for span in spans if span.lane == lane]
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))


RIGHT = prefetching(2)


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([("gather", 2)], "event 0, 'gather' of block 2: there is no such event"),
        ([("wait", 0)], "event 0, 'wait' of block 0: there is no such event"),
        ([("gather", 0)] * 2, "event 1, 'gather' of block 0: it is already gathered"),
        ([("forward", 0)], "event 0, 'forward' of block 0: its parameters are not gathered"),
        ([("gather", 1), ("forward", 1)], "forward runs block 0 next"),
        ([("gather", 1), ("backward", 1)], "forward has not run all blocks"),
        ([("reduce", 1)], "there is no gradient to send"),
        ([("free", 1)], "it is not gathered"),
        ([event for event in RIGHT if event != ("reduce", 1)], "reduce of block 1 is missing"),
        (RIGHT[:3], "forward of block 1 is missing"),
        (RIGHT[:-1], "block 0 is never freed"),
    ],
)
def test_each_fault_is_named(events, fault):
    assert play(events, costs(2)).fault.endswith(fault)


def test_sizes_are_added_up_and_looking_further_ahead_is_faster():
    sizes = [4, 1, 1, 2, 1, 1, 1, 4]
    lengths = tuple(map(float, sizes))
    uneven = Costs(lengths, (2.0,) * 8, (4.0,) * 8, lengths)
    one_ahead = play(prefetching(8), uneven, sizes)
    # as the notebook says
    assert (one_ahead.ms, one_ahead.most) == (60.0, 5)
    far = play(fast_order.solve(sizes, 8), uneven, sizes)
    assert far.ms < 60.0
    assert 5 < far.most <= 8
