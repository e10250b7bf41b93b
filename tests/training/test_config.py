"""Configs of models, training and sampling: wrong values are refused, presets fit together."""

import dataclasses
import math

import pytest

from lib.__main__ import PRESETS
from lib.core.settings import from_json
from lib.model.config import ModelConfig, model_preset
from lib.training.config import (
    OptimizerConfig,
    PipelineConfig,
    SampleConfig,
    TrainConfig,
)
from lib.training.loop import learning_rate

NAMES = sorted(path.stem for path in PRESETS.glob("*.json"))


# A field for each kind of limit, and each rule between fields.
WRONG = [
    (ModelConfig, {"d_model": 0}),
    (ModelConfig, {"vocab_size": 1}),
    (ModelConfig, {"num_heads": 4, "d_model": 30}),
    (ModelConfig, {"d_model": 12, "num_heads": 4}),
    (ModelConfig, {"rope_theta": 0}),
    (ModelConfig, {"attention_kernel": "flash"}),
    (OptimizerConfig, {"learning_rate": math.nan}),
    (OptimizerConfig, {"min_learning_rate": 2e-3}),
    (OptimizerConfig, {"warmup_steps": -1}),
    (OptimizerConfig, {"beta1": 1.0}),
    (OptimizerConfig, {"beta2": -0.1}),
    (TrainConfig, {"steps": 0}),
    (TrainConfig, {"seed": -1}),
    (TrainConfig, {"max_seconds": -1.0}),
    (TrainConfig, {"dtype": "float64"}),
    (TrainConfig, {"sharded_optimizer": "zero1", "ddp_wrapper": "fsdp2"}),
    (TrainConfig, {"bucket_size_mb": math.inf}),
    (SampleConfig, {"prompts": ()}),
    (SampleConfig, {"top_p": 0}),
    (SampleConfig, {"top_p": 1.1}),
]


@pytest.mark.parametrize(("cls", "changes"), WRONG, ids=str)
def test_wrong_values_are_refused_by_name(cls, changes):
    name, value = next(iter(changes.items()))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        cls(**changes)
    assert name in str(caught.value)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(("asked", "steps", "taken"), [(100, 50, 5), (100, 100, 100), (7, 6, 0)])
def test_the_warm_up_is_a_tenth_of_too_few_steps(asked, steps, taken):
    config = TrainConfig(steps=steps, optimizer=OptimizerConfig(warmup_steps=asked))
    assert config.effective_warmup_steps == taken
    assert learning_rate(config, steps) == config.optimizer.min_learning_rate


def test_a_pipeline_that_skips_the_data_needs_some():
    with pytest.raises(ValueError, match=r"train\.data must be a folder"):
        PipelineConfig(skip_data=True)


@pytest.mark.parametrize(
    ("cls", "changes"),
    [
        (ModelConfig, {"vocab_size": 2, "d_model": 2, "num_heads": 1, "d_ff": 1}),
        (ModelConfig, {"d_model": 12, "num_heads": 4, "positions": "none"}),
        (OptimizerConfig, {"learning_rate": 0, "min_learning_rate": 0, "warmup_steps": 0}),
        (OptimizerConfig, {"min_learning_rate": 1e-3, "beta1": 0, "max_grad_norm": 0}),
        (TrainConfig, {"steps": 100}),
        (TrainConfig, {"eval_interval": 0, "eval_tokens": 0, "checkpointing_interval": -1}),
        (SampleConfig, {"prompts": ("",), "max_new_tokens": 0, "temperature": 0, "top_p": 1}),
    ],
)
def test_values_at_the_edge_are_right(cls, changes):
    config = cls(**changes)
    assert dataclasses.asdict(config).items() >= changes.items()


def test_a_heads_width_and_the_inner_width_that_is_built():
    model = ModelConfig(d_model=96, num_heads=6, d_ff=250)
    assert (model.head_dim, model.ff_width) == (16, 250)
    # two matrices of 3/2 the width hold what three of the width do
    assert dataclasses.replace(model, feed_forward="silu").ff_width == 375


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_fits_together(name):
    config = from_json(PipelineConfig, PRESETS / f"{name}.json")
    training = config.train
    # the tokenizer decides the vocabulary, and the corpus step where the data are
    assert (training.model.vocab_size, training.data) == (None, None)
    assert training.checkpointing_interval > 0
    assert training.optimizer.warmup_steps <= 0.1 * training.steps
    # the last step is a multiple of each interval, so that every line is of as many steps
    for interval in ("log_interval", "eval_interval", "checkpointing_interval"):
        assert training.steps % getattr(training, interval) == 0
    assert training.model.d_ff == pytest.approx(8 / 3 * training.model.d_model, rel=0.05)
    # what is sampled fits the model's context
    assert config.sample.max_new_tokens <= 2 * training.model.context_length


@pytest.mark.parametrize("name", ["tiny", "tinystories"])
def test_presets_of_pipelines_and_of_models_agree(name):
    config = from_json(PipelineConfig, PRESETS / f"{name}.json")
    model = dataclasses.replace(config.train.model, vocab_size=config.corpus.vocab_size)
    # a training picks the kernel
    assert model == dataclasses.replace(model_preset(name), attention_kernel="auto")
