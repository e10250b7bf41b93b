"""Settings and trainings of benchmarks on several ranks."""

import dataclasses

import pytest

from lib.benchmarks.lm_matrix import LmMatrixConfig
from lib.benchmarks.rank_training import TrainingCase, skewed_tokens
from lib.benchmarks.sharding_cases import ShardingConfig
from lib.data.batches import BatchSampler
from tests.benchmarks.rank_benchmarks import SIZES, SMALL

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
