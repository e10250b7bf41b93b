"""Two ranks run the functions of notebook 09, against one process."""

import pytest
import torch

from lib.ddp.launcher import launch
from lib.lessons.ddp import ranks
from lib.lessons.zero1 import ranks as zero1_ranks
from lib.model.config import ModelConfig
from lib.profiling.memory_formula import rank_memory
from lib.training.tensor_files import read_tensors, write_tensors

RANKS, STEPS, FURTHER = 2, 3, 2
SHAPE = ModelConfig(vocab_size=32, context_length=8, d_model=16, num_layers=2, num_heads=2, d_ff=32)

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def results(folder):
    """For each job by name the results of all ranks."""
    jobs = {"slices": (zero1_ranks.train_by_slices, (SHAPE, 3, STEPS))}
    jobs["saved"] = (zero1_ranks.train_and_save, (SHAPE, 3, folder, STEPS, FURTHER))
    found = launch(ranks.in_turn, RANKS, list(jobs.values()), backend="gloo")
    return dict(zip(jobs, zip(*found)))


@pytest.fixture(scope="module")
def alone():
    """Training in one process."""
    return zero1_ranks.train_alone(SHAPE, 3, STEPS, RANKS)


def test_ranks_train_and_clip_as_one_process_does(results, alone):
    first, second = (one.weights for one in results["slices"])
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone.weights, rtol=1e-4, atol=1e-5)
    start = zero1_ranks.weights_of(ranks.make_model(SHAPE))
    assert (alone.weights - start).abs().max() > 1e-3
    assert min(alone.norms) > zero1_ranks.MAX_NORM


def test_ranks_share_the_state_of_one_process(results, alone):
    step_counts = 4 * len(list(ranks.make_model(SHAPE).parameters()))
    held = [one.state_bytes for one in results["slices"]]
    # a parameter that is cut has a step count on both ranks
    assert abs(sum(held) - alone.state_bytes) <= step_counts
    expected = rank_memory(SHAPE, ranks=RANKS, stage=1, dtype="float32").optimizer_state
    assert all(0 <= num_bytes - expected <= step_counts for num_bytes in held)


def test_the_norm_is_that_of_the_parts_and_of_one_process(results, alone):
    first, second = results["slices"]
    expected = pytest.approx(alone.norms, rel=1e-4)
    assert first.norms == second.norms == expected
    parts = [(a**2 + b**2) ** 0.5 for a, b in zip(first.own_norms, second.own_norms)]
    assert parts == expected
    assert first.own_norms != second.own_norms


def test_one_process_goes_on_where_two_ranks_saved(results, folder, monkeypatch):
    resumed = zero1_ranks.resume_alone(SHAPE, 3, folder, STEPS, FURTHER, RANKS)
    went_on = results["saved"][0].weights
    torch.testing.assert_close(resumed.weights, went_on, rtol=1e-4, atol=1e-5)
    # the state matters: without it, training goes elsewhere
    for path in folder.glob("step-*/shard-*"):
        tensors, metadata = read_tensors(path)
        without = {k: t * 0 if k.endswith("exp_avg") else t for k, t in tensors.items()}
        write_tensors(path, without, metadata)
    monkeypatch.setattr("lib.training.checkpoint._verify", lambda path: None)
    other = zero1_ranks.resume_alone(SHAPE, 3, folder, STEPS, FURTHER, RANKS)
    assert (other.weights - went_on).abs().max() > 1e-3
