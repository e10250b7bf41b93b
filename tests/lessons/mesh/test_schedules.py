"""Schedules on the clock: how long, what is held, and who waits for whom."""

import pytest

from lib.lessons.exercise import edited, verdict
from lib.lessons.mesh.exercises import interleaved, one_chunk_after_another
from lib.lessons.mesh.schedules import most_held, play
from tests.lessons.mesh.cells import gpipe_orders, one_f_one_b_orders

SIZES = [(2, 1), (2, 5), (3, 2), (4, 8), (8, 3)]


def played(orders, micro_batches, **times):
    times = {"forward_ms": 1.0, "backward_ms": 2.0} | times
    return play(orders, micro_batches=micro_batches, **times)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("make", [gpipe_orders, one_f_one_b_orders])
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (3.0, 1.0)])
def test_a_step_has_the_bubble_of_the_formula(make, p, m, forward, backward):
    step = played(make(p, m), m, forward_ms=forward, backward_ms=backward)
    assert step.fault == "nothing"
    assert step.ms == pytest.approx((m + p - 1) * (forward + backward))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_holds_all_micro_batches_and_1f1b_those_on_their_way_back(p, m):
    assert played(gpipe_orders(p, m), m).held == (m,) * p
    orders = one_f_one_b_orders(p, m)
    assert played(orders, m).held == tuple(min(m, p - stage) for stage in range(p))
    assert [most_held(events) for events in orders] == [min(m, p - stage) for stage in range(p)]


GRID = [(2, 1), (3, 7), (4, 64), (8, 4), (16, 32)]


@pytest.mark.parametrize(("p", "m"), GRID)
@pytest.mark.parametrize("message", [0.3, 1.0, 3.0])
def test_1f1b_waits_for_messages_in_each_micro_batch_and_gpipe_hides_short_ones(p, m, message):
    plain, hops = 3.0 * (m + p - 1), 2 * (p - 1)
    took = played(one_f_one_b_orders(p, m), m, message_ms=message).ms
    formula = (m + p - 1) * (3.0 + hops / p * message)
    # a schedule has whole messages only
    assert formula - 3 * message <= took <= formula + 1e-9
    by_gpipe = played(gpipe_orders(p, m), m, message_ms=message).ms
    # one is sent after another, so those longer than a pass add up
    longer = (m - 1) * (max(0, message - 1) + max(0, message - 2))
    assert by_gpipe == pytest.approx(plain + hops * message + longer)


def test_stages_that_hang_are_named_with_what_they_wait_at():
    orders = one_f_one_b_orders(2, 2)[::-1]
    assert played(orders, 2).fault == (
        "the stages wait for one another forever: stage 0 at backward 0, stage 1 at forward 1"
    )


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda events: events.pop(), "stage 1: backward 1 is missing"),
        (lambda events: events.append(("forward", 0)), "stage 1: ('forward', 0) is unknown, or"),
        (lambda events: events.append(("sideways", 0)), "stage 1: ('sideways', 0) is unknown, or"),
        (lambda events: events.append(3), "stage 1: 3 is unknown, or comes twice"),
    ],
)
def test_a_wrong_event_is_named(spoil, fault):
    orders = gpipe_orders(2, 2)
    spoil(orders[1])
    assert played(orders, 2).fault.startswith(fault)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 1), (2, 4, 3), (3, 6, 2), (4, 8, 2)])
def test_interleaved_chunks_divide_the_bubble_and_hold_less_than_all_forward_first(p, m, v):
    def step(order):
        orders = [order(rank, p, m, v) for rank in range(p)]
        return played(orders, m, chunks=v, forward_ms=1 / v, backward_ms=2 / v)

    found, all_first = step(interleaved.solve), step(one_chunk_after_another)
    assert found.fault == all_first.fault == "nothing"
    assert found.ms == pytest.approx(all_first.ms) == pytest.approx(3 * (v * m + p - 1) / v)
    assert max(found.held) <= max(all_first.held) == v * m
    assert (p, m) == (2, 2) or max(found.held) < v * m


def test_where_messages_take_no_time_interleaved_stages_can_hold_less_than_megatrons_order():
    fewer = edited(interleaved.solve, "2 * (ranks - 1 - rank)", "(ranks - 1 - rank)")
    assert verdict(interleaved, fewer).splitlines()[1].startswith("  yours 4 micro-batches,")
