"""What the ranks of notebook 07 do, run by two of them, against one process."""

import pytest
import torch

from lib import demo_ddp, demo_sharding, demo_sharding_trace
from lib.config_training import ModelConfig
from lib.distributed import launch
from lib.memory_accounting import rank_memory
from lib.trace_file import parse_trace

RANKS, STEPS, FURTHER = 2, 3, 2
SHAPE = ModelConfig(vocab_size=32, context_length=8, d_model=16, num_layers=2, num_heads=2, d_ff=32)
BY_HAND = ["train_whole_parameters", "train_flat_slices"]
BY_LIBRARY = ["train_by_parameters", "train_by_slices"]
# so long a backward pass that messages begin in it on a busy machine too
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
    jobs = {
        name: (getattr(demo_sharding, name), (SHAPE, 3, STEPS)) for name in BY_HAND + BY_LIBRARY
    }
    jobs["saved"] = (demo_sharding.train_and_save, (SHAPE, 3, folder, STEPS, FURTHER))
    jobs["timed"] = (demo_sharding_trace.time_ways, (SHAPE, WAYS, LONG, 2))
    found = launch(demo_ddp.in_turn, RANKS, list(jobs.values()), backend="gloo")
    return dict(zip(jobs, zip(*found)))


@pytest.mark.parametrize("name", BY_HAND + BY_LIBRARY)
def test_each_way_trains_as_one_process_does(results, name):
    first, second = (one.weights for one in results[name])
    assert torch.equal(first, second)
    alone = demo_sharding.train_alone(SHAPE, 3, STEPS, RANKS, clips=name in BY_LIBRARY)
    torch.testing.assert_close(first, alone.weights, rtol=1e-4, atol=1e-5)
    start = demo_sharding.weights_of(demo_ddp.make_model(SHAPE))
    assert (first - start).abs().max() > 1e-3


def test_clipping_changes_the_training():
    clipped = demo_sharding.train_alone(SHAPE, 3, STEPS, RANKS)
    plain = demo_sharding.train_alone(SHAPE, 3, STEPS, RANKS, clips=False)
    assert min(clipped.norms) > demo_sharding.MAX_NORM
    assert not torch.equal(clipped.weights, plain.weights)


@pytest.mark.parametrize("name", BY_HAND + BY_LIBRARY)
def test_ranks_share_the_state_of_one_process(results, name):
    alone = demo_sharding.train_alone(SHAPE, 3, STEPS, RANKS)
    step_counts = 4 * len(list(demo_ddp.make_model(SHAPE).parameters()))
    held = [one.state_bytes for one in results[name]]
    # a parameter that is cut has a step count on both ranks
    assert abs(sum(held) - alone.state_bytes) <= step_counts
    expected = rank_memory(SHAPE, ranks=RANKS, stage=1, dtype="float32").optimizer_state
    if name in ("train_flat_slices", "train_by_slices"):
        assert all(0 <= num_bytes - expected <= step_counts for num_bytes in held)


@pytest.mark.parametrize("name", BY_LIBRARY)
def test_the_norm_is_that_of_the_parts_and_of_one_process(results, name):
    alone = demo_sharding.train_alone(SHAPE, 3, STEPS, RANKS)
    first, second = results[name]
    assert first.norms == second.norms == pytest.approx(alone.norms, rel=1e-4)
    parts = [(a**2 + b**2) ** 0.5 for a, b in zip(first.own_norms, second.own_norms)]
    assert parts == pytest.approx(alone.norms, rel=1e-4)
    assert first.own_norms != second.own_norms


def test_one_process_goes_on_where_two_ranks_saved(results, folder):
    resumed = demo_sharding.resume_alone(SHAPE, 3, folder, STEPS, FURTHER, RANKS)
    went_on = results["saved"][0].weights
    torch.testing.assert_close(resumed.weights, went_on, rtol=1e-4, atol=1e-5)
    # without the state it would have gone elsewhere
    for path in folder.glob("shard-*"):
        shard = torch.load(path, weights_only=True)
        for state in shard["state"].values():
            state["exp_avg"].zero_()
        torch.save(shard, path)
    other = demo_sharding.resume_alone(SHAPE, 3, folder, STEPS, FURTHER, RANKS)
    assert (other.weights - went_on).abs().max() > 1e-3


def test_times_are_the_same_on_all_ranks_and_cycles_of_the_first(results):
    first, second = results["timed"]
    assert list(first) == list(second) == list(WAYS)
    for name in WAYS:
        assert first[name].times_ms == second[name].times_ms
        assert min(first[name].times_ms) > 0
        assert (len(first[name].cycles), len(second[name].cycles)) == (2, 0)


def test_weights_are_sent_by_sharded_ways_alone(results):
    sent = {name: one.cycle.collectives for name, one in results["timed"][0].items()}
    assert all(found["gradients"] for found in sent.values())
    assert [bool(found["weights"]) for found in sent.values()] == [False, True, True]


def test_gradients_are_sent_from_backward_on_and_weights_after_it(results):
    cycle = results["timed"][0]["zero1"].cycle
    compute = dict(cycle.timeline.compute)
    assert cycle.collectives["gradients"][0][0] < cycle.timeline.backward[1]
    # when they arrive is the machine's business
    assert cycle.collectives["weights"][0][0] > cycle.timeline.backward[1]
    assert all(compute[phase] for phase in ("forward", "backward", "update"))


def event(name, category, start, duration):
    return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": duration, "pid": 1}


def test_collectives_of_a_cycle_are_told_by_purpose():
    trace = parse_trace(
        [
            event("cycle of it", "user_annotation", 1000, 5000),
            event("backward", "user_annotation", 1000, 2000),
            event("gloo:all_reduce", "cpu_op", 1500, 500),
            event("c10d::allreduce_", "cpu_op", 1500, 9),
            event("gloo:_reduce_scatter_base", "cpu_op", 1800, 700),
            event("gloo:all_gather", "cpu_op", 4000, 1000),
            event("gloo:all_gather", "cpu_op", 9000, 1000),
        ]
    )
    (cycle,) = demo_sharding_trace.cycles(trace, "cycle of it")
    assert cycle.collectives == {"gradients": ((0.5, 1.5),), "weights": ((3.0, 4.0),)}


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
        ]
    )
    (cycle,) = demo_sharding_trace.cycles(trace, "cycle of it")
    assert cycle.collectives == {"gradients": (), "weights": ((6.0, 7.0),)}


def test_a_trace_without_the_cycle_is_refused():
    with pytest.raises(ValueError, match="no range 'cycle of it'"):
        demo_sharding_trace.cycles(parse_trace([]), "cycle of it")
