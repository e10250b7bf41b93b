"""Orders of a step on a clock: as the library predicts, and each fault by name."""

import itertools

import pytest

from lib.lessons.fsdp.exercises import fast_order, prefetching
from lib.lessons.fsdp.orders import Costs, play
from lib.lessons.fsdp.prediction import predict_fsdp

TIMES = {"forward": 2.0, "backward": 4.0}


def costs(blocks: int, message: float = 1.0) -> Costs:
    return Costs.equal(blocks, **TIMES, gather=message, reduce=message)


@pytest.mark.parametrize("message", [0.1, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_prefetching_takes_as_long_as_predicted(blocks, message):
    played = play(prefetching(blocks), costs(blocks, message))
    times = {f"{name}_ms": value for name, value in TIMES.items()}
    predicted = predict_fsdp(blocks, **times, gather_ms=message, reduce_ms=message)
    assert played.fault == "nothing"
    assert played.most == min(2, blocks)
    assert played.ms == pytest.approx(predicted.step_ms)
    sent = sum(span.end - span.start for span in played.spans if span.lane == "network")
    assert sent == pytest.approx(predicted.communication_ms)


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
