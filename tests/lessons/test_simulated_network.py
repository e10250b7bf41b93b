"""The simulated network: the right sums, as late as the formulas say, and faults by name."""

import dataclasses
import re

import pytest

from lib.ddp import launcher
from lib.ddp.launcher import WorkerError
from lib.lessons.simulated_network import NETWORKS, LostRank, Network, SlowLink, Straggler, Workload
from lib.profiling.collectives import Link
from tests.ddp import training_cases as training
from tests.ddp.workers import launch, run_cases
from tests.lessons import network_cases as cases

RANKS = 3

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def found():
    """What each case found on each of three ranks."""
    return launch(run_cases, RANKS, "tests.lessons.network_cases", cases.CASES)


def test_steps_take_as_long_as_predicted_with_every_wrapper_on_every_network(found):
    steps = [rank["steps_of_wrappers"] for rank in found]
    assert len(steps[0]) == len(NETWORKS) * len(cases.OVERLAPS)
    for step in steps:
        ratios = {way: took / predicted for way, (took, predicted) in step.items()}
        assert {way: ratio for way, ratio in ratios.items() if abs(ratio - 1) > 0.05} == {}
    # where communication is slow, overlap saves more than a tenth of the step
    slow = {name: steps[0]["100 Gb Ethernet", name][0] for name in ("flat", "flashddp")}
    assert slow["flashddp"] < 0.9 * slow["flat"]


def test_collectives_give_what_gloo_does(found):
    for rank in found:
        assert [name for name, is_same in rank["results_beside_gloo"] if not is_same] == []


def test_stragglers_and_slow_links_hold_everyone_up(found):
    for rank in found:
        times = rank["timings_of_faulty_networks"]
        # 4 messages of 0.1 ms, and 4/3 of 6,000 bytes at 1 MB/s
        assert times["well"] == pytest.approx(8.4)
        assert times["straggler"] == pytest.approx(15.4)
        assert times["slow link"] == pytest.approx(32.4)
        assert times["slow link, predicted"] == pytest.approx(32.4)


def test_a_ring_of_messages_takes_as_long_as_the_all_reduce(found):
    for rank in found:
        took, predicted, result = rank["ring_by_messages"]
        assert took == pytest.approx(predicted)
        assert result == [6.0] * 150


def test_by_the_wall_clock_nothing_comes_early(found):
    for rank in found:
        by_network, took, is_early, is_right = rank["wall_clock"]
        # 2 collectives of 4 messages
        assert by_network == pytest.approx(0.08)
        assert took >= 0.08
        assert is_right
        assert not is_early


def test_calls_that_differ_and_lost_ranks_are_named(found):
    for number, rank in enumerate(found):
        differ, later, lost = rank["named_errors"]
        assert "all ranks must make the same calls in the same order, but as call 1" in differ
        assert f"rank {number} made all_reduce (sum) of {4 + (number == 2)} float32" in differ
        assert later == differ
        assert lost == (
            "TimeoutError: rank 2 did not call all_reduce (sum) of 4 float32 within 0.5 s"
        )


def test_wrappers_train_on_it_as_one_process_does():
    results = launch(training.equality, 2, backend="simulated", options=cases.PCIE)
    for way in training.WAYS_TO_TRAIN:
        training.check_training([result[way] for result in results])


def test_it_can_be_the_network_of_a_whole_job():
    found = launch(cases.on_a_simulated_job, 2, backend="simulated", options=cases.PCIE)
    assert found == [("simulated", 2.0, True)] * 2
    lost = dataclasses.replace(cases.PCIE, lost_rank=LostRank(1))
    words = r"^rank 0 of 2 raised TimeoutError: rank 1 did not call all_reduce .* within 2 s$"
    with pytest.raises(WorkerError, match=re.compile(words, re.MULTILINE)):
        launcher.launch(cases.on_a_simulated_job, 2, backend="simulated", options=lost, timeout=2)


def test_a_miniature_waits_for_the_same_part_of_its_step():
    real, here = Workload(4e9, 250.0), Workload(2e6, 100.0)
    for ranks, network in ((2, NETWORKS["NVLink pair"]), (8, NETWORKS["two hosts"])):
        small = network.miniature(real, here)
        for part in (1.0, 0.01, 0.0):
            expected = network.collective_ms("all_reduce", part * 4e9, ranks) / 250
            found = small.collective_ms("all_reduce", part * 2e6, ranks) / 100
            assert found == pytest.approx(expected)


def test_two_hosts_are_as_slow_as_their_network():
    # 14 messages of 10 us
    assert Network(Link(10.0, 1.0)).collective_ms("all_reduce", 0, 8) == pytest.approx(0.14)
    hosts = Network(Link(1.0, 100.0), between=Link(8.0, 10.0))
    found = hosts.link(4)
    assert (found.latency_us, found.bandwidth_gbs) == (pytest.approx((8 + 2 * 1) / 3), 10.0)
    assert hosts.link_of(0, 1, 4) == hosts.inside
    assert hosts.link_of(1, 2, 4) == hosts.between


@pytest.mark.parametrize(
    "fault",
    [
        {"straggler": Straggler(9, 5.0)},
        {"slow_link": SlowLink(2, 0.5)},
        {"lost_rank": LostRank(2)},
    ],
    ids=str,
)
def test_a_fault_of_a_rank_that_is_not_there_is_refused(fault):
    network = dataclasses.replace(cases.PCIE, **fault)
    with pytest.raises(ValueError, match=r"must be below the number of ranks, 2, got (9|2)"):
        launch(int, 2, backend="simulated", options=network)


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("simulated", None, "options must be a Network, got None"),
        (None, cases.PCIE, "options must be None with backend 'gloo', got Network"),
        (cases.PCIE, None, "backend must be .* one of nccl, gloo, simulated, got Network"),
    ],
    ids=["none", "default", "no name"],
)
def test_a_backend_and_options_that_do_not_fit_are_refused(backend, options, words):
    with pytest.raises(ValueError, match=words):
        launch(int, 2, backend=backend, options=options)
