"""Two ranks run the functions of notebook 08, against one process."""

import pytest
import torch

from lib.ddp.launcher import launch
from lib.lessons.ddp import ranks
from lib.lessons.zero1 import ranks as zero1_ranks
from lib.model.config import ModelConfig
from lib.profiling.trace import parse_trace
from lib.sharded_optimizer.memory_formula import rank_memory

RANKS, STEPS, FURTHER = 2, 3, 2
SHAPE = ModelConfig(vocab_size=32, context_length=8, d_model=16, num_layers=2, num_heads=2, d_ff=32)
BY_HAND = ["train_whole_parameters", "train_flat_slices"]
BY_LIBRARY = ["train_by_parameters", "train_by_slices"]
# long backward passes, so that messages begin in them on a busy machine too
LONG, CAP = 99, {"bucket_size_mb": 0.01}
WAYS = {
    "whole": {"ddp_wrapper": "flashddp", **CAP},
    "behind": {"ddp_wrapper": "flashddp", "sharded_optimizer": "zero1", **CAP},
    "zero1": {"ddp_wrapper": "none", "sharded_optimizer": "zero1", **CAP},
}

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def results(folder):
    """For each job by name the results of all ranks."""
    jobs = {name: (getattr(zero1_ranks, name), (SHAPE, 3, STEPS)) for name in BY_HAND + BY_LIBRARY}
    jobs["saved"] = (zero1_ranks.train_and_save, (SHAPE, 3, folder, STEPS, FURTHER))
    jobs["timed"] = (zero1_ranks.time_ways, (SHAPE, WAYS, LONG, 2))
    found = launch(ranks.in_turn, RANKS, list(jobs.values()), backend="gloo")
    return dict(zip(jobs, zip(*found)))


@pytest.fixture(scope="module")
def alone():
    """Training in one process, with clipping and without."""
    return {
        clips: zero1_ranks.train_alone(SHAPE, 3, STEPS, RANKS, clips=clips)
        for clips in (True, False)
    }


@pytest.mark.parametrize("name", BY_HAND + BY_LIBRARY)
def test_each_way_trains_as_one_process_does(results, alone, name):
    first, second = (one.weights for one in results[name])
    assert torch.equal(first, second)
    expected = alone[name in BY_LIBRARY].weights
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


def test_training_and_clipping_change_weights(alone):
    start = zero1_ranks.weights_of(ranks.make_model(SHAPE))
    assert (alone[True].weights - start).abs().max() > 1e-3
    assert min(alone[True].norms) > zero1_ranks.MAX_NORM
    assert not torch.equal(alone[True].weights, alone[False].weights)


@pytest.mark.parametrize("name", BY_HAND + BY_LIBRARY)
def test_ranks_share_the_state_of_one_process(results, alone, name):
    step_counts = 4 * len(list(ranks.make_model(SHAPE).parameters()))
    held = [one.state_bytes for one in results[name]]
    # a parameter that is cut has a step count on both ranks
    assert abs(sum(held) - alone[True].state_bytes) <= step_counts
    expected = rank_memory(SHAPE, ranks=RANKS, stage=1, dtype="float32").optimizer_state
    if name in ("train_flat_slices", "train_by_slices"):
        assert all(0 <= num_bytes - expected <= step_counts for num_bytes in held)


@pytest.mark.parametrize("name", BY_LIBRARY)
def test_the_norm_is_that_of_the_parts_and_of_one_process(results, alone, name):
    first, second = results[name]
    expected = pytest.approx(alone[True].norms, rel=1e-4)
    assert first.norms == second.norms == expected
    parts = [(a**2 + b**2) ** 0.5 for a, b in zip(first.own_norms, second.own_norms)]
    assert parts == expected
    assert first.own_norms != second.own_norms


def test_one_process_goes_on_where_two_ranks_saved(results, folder):
    resumed = zero1_ranks.resume_alone(SHAPE, 3, folder, STEPS, FURTHER, RANKS)
    went_on = results["saved"][0].weights
    torch.testing.assert_close(resumed.weights, went_on, rtol=1e-4, atol=1e-5)
    # the state matters: without it, training goes elsewhere
    for path in folder.glob("shard-*"):
        shard = torch.load(path, weights_only=True)
        for state in shard["state"].values():
            state["exp_avg"].zero_()
        torch.save(shard, path)
    other = zero1_ranks.resume_alone(SHAPE, 3, folder, STEPS, FURTHER, RANKS)
    assert (other.weights - went_on).abs().max() > 1e-3


def test_times_are_the_same_on_all_ranks_and_cycles_of_the_first(results):
    first, second = results["timed"]
    assert list(first) == list(second) == list(WAYS)
    for name in WAYS:
        assert first[name].times_ms == second[name].times_ms
        assert min(first[name].times_ms) > 0
        assert (len(first[name].cycles), len(second[name].cycles)) == (2, 0)


def test_sharded_ways_send_weights_after_backward(results):
    whole, behind, zero1 = (one.cycle for one in results["timed"][0].values())
    assert not whole.collectives["weights"]
    for cycle in (whole, behind, zero1):
        assert cycle.collectives["gradients"][0][0] < cycle.timeline.backward[1]
    for cycle in (behind, zero1):
        assert cycle.collectives["weights"][0][0] > cycle.timeline.backward[1]
    compute = dict(zero1.timeline.compute)
    assert all(compute[phase] for phase in ("forward", "backward", "update"))


def event(name, category, start, duration):
    return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": duration, "pid": 1}


def test_a_collective_belongs_to_the_cycle_that_launched_it():
    def launched(name, correlation, call, start, duration):
        kernel = event(name, "kernel", start, duration) | {"tid": 7}
        request = event("cudaLaunchKernel", "cuda_runtime", call, 5)
        return [one | {"args": {"correlation": correlation}} for one in (kernel, request)]

    trace = parse_trace(
        [
            event("cycle of it", "user_annotation", 1000, 5000),
            event("backward", "user_annotation", 1000, 2000),
            *launched("sgemm", 1, 1200, 2000, 3000),
            # of the step before
            *launched("ncclDevKernel_AllGather", 2, 900, 1100, 300),
            # the host has left when it runs
            *launched("ncclDevKernel_AllGather", 3, 5500, 7000, 1000),
            *launched("ncclDevKernel_ReduceScatter", 4, 1300, 2500, 1000),
        ]
    )
    (cycle,) = zero1_ranks.cycles(trace, "cycle of it")
    assert cycle.collectives == {"gradients": ((1.5, 2.5),), "weights": ((6.0, 7.0),)}


def test_a_trace_without_the_cycle_is_refused():
    with pytest.raises(ValueError, match="no range 'cycle of it'"):
        zero1_ranks.cycles(parse_trace([]), "cycle of it")
