"""Times of collectives against sums by hand, and links fitted to times."""

import math

import pytest

from lib.profiling.collectives import COLLECTIVES, bus_bandwidth_gbs, fit_link, predicted_ms

LINK = {"latency_us": 10.0, "bandwidth_gbs": 100.0}


@pytest.mark.parametrize(
    ("collective", "milliseconds"),
    # 8 MB on 4 ranks: 10 µs per message, and 8 MB take 80 µs through one link
    [
        ("all_reduce", 6 * 0.010 + 1.5 * 0.080),
        ("reduce_scatter", 3 * 0.010 + 0.75 * 0.080),
        ("all_gather", 3 * 0.010 + 0.75 * 0.080),
        ("broadcast", 3 * 0.010 + 0.080),
    ],
)
def test_costs_are_those_worked_out_by_hand(collective, milliseconds):
    assert predicted_ms(collective, 8e6, 4, **LINK) == pytest.approx(milliseconds)
    # one rank sends nothing
    assert predicted_ms(collective, 1e9, 1, **LINK) == 0
    # without latency, the bus bandwidth is the link's
    time = predicted_ms(collective, 1e8, 5, latency_us=0, bandwidth_gbs=100)
    assert bus_bandwidth_gbs(collective, 1e8, 5, time) == pytest.approx(100)


@pytest.mark.parametrize(
    "changed",
    [
        {"collective": "gather"},
        {"ranks": 0},
        {"num_bytes": -1},
        {"latency_us": -1.0},
        {"bandwidth_gbs": 0.0},
    ],
)
def test_a_wrong_argument_of_the_formula_is_named(changed):
    right = {"collective": "all_reduce", "num_bytes": 1, "ranks": 2} | LINK
    with pytest.raises(ValueError, match=f"{next(iter(changed))} must be"):
        predicted_ms(**right | changed)


def times_of(collective: str, ranks: int, latency_us: float, bandwidth_gbs: float) -> list:
    link = (latency_us, bandwidth_gbs)
    sizes = [2**power for power in range(10, 31, 2)]
    return [(size, predicted_ms(collective, size, ranks, *link)) for size in sizes]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("latency", "bandwidth"), [(12.0, 330.0), (300.0, 0.7), (0.0, 5.0)])
def test_the_fit_finds_the_link_again(collective, latency, bandwidth):
    times = times_of(collective, 3, latency, bandwidth)
    # of all sizes, or of two
    for link in (fit_link(collective, 3, times), fit_link(collective, 3, times[:: len(times) - 1])):
        assert link.latency_us == pytest.approx(latency, rel=1e-3)
        assert link.bandwidth_gbs == pytest.approx(bandwidth, rel=1e-3)


def test_the_fit_weighs_twice_as_much_as_half_as_much():
    times = times_of("all_reduce", 2, 10.0, 100.0)
    links = []
    for sign in (1, -1):
        noisy = [(size, ms * 2 ** (sign * (-1) ** index)) for index, (size, ms) in enumerate(times)]
        links.append(fit_link("all_reduce", 2, noisy))
    middle = math.sqrt(links[0].latency_us * links[1].latency_us)
    assert middle == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize(
    "times", [[], [(1024, 1.0)], [(1024, 1.0)] * 3, [(2**10, 1.0), (2**20, 1.0), (2**30, 1.0)]]
)
def test_there_is_no_fit_without_two_sizes_or_where_bytes_cost_nothing(times):
    assert fit_link("all_gather", 2, times) is None


@pytest.mark.parametrize(
    ("ranks", "times", "words"),
    [(1, [(1, 1.0)], "ranks"), (2, [(1024, 0.0)], "times"), (2, [(0, 1.0)], "times")],
)
def test_the_fit_refuses_what_has_no_logarithm(ranks, times, words):
    with pytest.raises(ValueError, match=words):
        fit_link("all_reduce", ranks, times)
