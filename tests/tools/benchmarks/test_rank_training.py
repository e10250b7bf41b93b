"""Settings and trainings of benchmarks on several ranks."""

import dataclasses
import time

import pytest
import torch

from lib.data.batches import BatchSampler
from lib.ddp.launcher import launch
from lib.ddp.process_group import rank
from lib.lessons.ddp.ranks import trace_of
from lib.sharded_optimizer import flat_slices
from lib.tools.benchmarks.lm_matrix import LmMatrixConfig
from lib.tools.benchmarks.rank_training import Training, TrainingCase, skewed_tokens
from lib.tools.benchmarks.sharding_cases import ShardingConfig
from tests.tools.benchmarks.rank_benchmarks import SIZES, SMALL

BOTH = pytest.mark.parametrize("config", [LmMatrixConfig, ShardingConfig])


@BOTH
def test_settings_that_do_not_fit_the_machine_are_refused(config):
    with pytest.raises(ValueError, match="ranks must be 2, as torchrun started 2, got 4"):
        config(ranks=4).with_defaults(2, on_gpu=False)
    with pytest.raises(ValueError, match="cuda_graph must be False on a CPU"):
        config(cuda_graph=True).with_defaults(2, on_gpu=False)


@BOTH
def test_given_settings_win_over_defaults(config):
    chosen = config(tr_batch_size=5).with_defaults(3, on_gpu=True)
    assert (chosen.tr_batch_size, chosen.ranks, chosen.backend) == (5, 3, "nccl")
    assert config(backend="gloo").with_defaults(2, on_gpu=True).backend == "gloo"
    assert chosen.steps_per_epoch > config().with_defaults(2, on_gpu=False).steps_per_epoch


@pytest.fixture
def case() -> TrainingCase:
    config = LmMatrixConfig(**SMALL).with_defaults(2, on_gpu=False)
    return config.case("sdpa", "flat", "float32")


def test_settings_reach_the_training(case):
    changes = {"compile": True, "low_precision_weights": True, "bucket_size_mb": 3.0}
    changed = dataclasses.replace(case, cuda_graph=True, **changes)
    settings = changed.train_config(log_interval=4, gradient_accumulation_steps=3)
    assert settings.cuda_graph
    assert {name: getattr(settings, name) for name in changes} == changes
    assert (settings.ddp_wrapper, settings.model.attention_kernel) == ("flat", "sdpa")
    assert {name: getattr(settings.model, name) for name in SIZES} == SIZES
    assert (settings.batch_size, settings.gradient_accumulation_steps) == (2, 3)
    assert settings.log_interval == 4


def test_losses_are_compared_for_at_most_the_steps_that_there_are(case):
    assert case.compared_steps == SMALL["epochs"] * SMALL["steps_per_epoch"]
    assert dataclasses.replace(case, loss_steps=4).compared_steps == 4


def test_an_epoch_is_one_pass_over_skewed_tokens(case):
    tokens = skewed_tokens(case, seed=0)
    length, batch_size = case.context_length, case.tr_batch_size
    sampler = BatchSampler(len(tokens), length, batch_size, seed=0, world_size=case.ranks)
    assert sampler.num_sequences == case.steps_per_epoch * sampler.sequences_per_step
    assert tokens.min() >= 0
    assert tokens.max() < case.vocab_size
    # half of u⁴ lies below 1/16
    assert (tokens < case.vocab_size / 16).mean() == pytest.approx(0.5, abs=0.15)


def trace_with_a_late_rank(case: TrainingCase, config: ShardingConfig) -> list[bool]:
    """Trace steps whose last all-gathers one rank starts late.

    Returns whether these were over whenever a profiler stopped on this rank.
    """
    if rank() == 1:
        gather = flat_slices.all_gather
        flat_slices.all_gather = lambda *args, **kwargs: time.sleep(0.1) or gather(*args, **kwargs)
    training = Training(case, config, None)
    found, stop = [], torch.profiler.profile.stop_trace

    def look_and_stop(profiler: torch.profiler.profile) -> None:
        works = [bucket.gathering for bucket in training.step.optimizer.strategy.buckets]
        found.append(all(work is None or work.is_completed() for work in works))
        stop(profiler)

    torch.profiler.profile.stop_trace = look_and_stop
    training.trace_communication(1, None)
    trace_of({"step": lambda: training.train(1)}, 1, training.device)
    training.read_losses()
    return found


@pytest.mark.usefixtures("quick_ranks")
def test_no_collective_is_under_way_when_a_profiler_stops():
    # gloo's threads would write into a log that is freed, and the process might die
    settings = {name: value for name, value in SMALL.items() if name not in SIZES}
    config = ShardingConfig(models=("tiny",), **settings).with_defaults(2, on_gpu=False)
    case = config.case("tiny", "zero1", "float32")
    assert (
        launch(trace_with_a_late_rank, 2, case, config, backend="gloo", timeout=60)
        == [[True] * 2] * 2
    )
