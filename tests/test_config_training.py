"""Configs of models, training and sampling: wrong values are refused, presets fit together."""

import dataclasses
import json
import math
import re

import pytest

from lib.__main__ import PRESETS
from lib.config import TokenizeConfig
from lib.config_training import (
    GenerateConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    SampleConfig,
    TrainConfig,
)
from lib.model_presets import MODEL_PRESETS, model_preset
from lib.strict_json import from_json, to_json

NAMES = sorted(path.stem for path in PRESETS.glob("*.json"))


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (ModelConfig, {"vocab_size": 1}, "vocab_size is 1; right is: at least 2"),
        (ModelConfig, {"context_length": 0}, "context_length is 0; right is: at least 1"),
        (ModelConfig, {"d_model": -8}, "d_model is -8; right is: at least 1"),
        (ModelConfig, {"num_layers": 0}, "num_layers is 0"),
        (ModelConfig, {"num_heads": 0}, "num_heads is 0"),
        (ModelConfig, {"d_ff": 0}, "d_ff is 0"),
        (ModelConfig, {"d_model": 30, "num_heads": 4}, "d_model 30 is not divisible by num_heads"),
        (ModelConfig, {"d_model": 12, "num_heads": 4}, "= head_dim 3, which is odd"),
        (ModelConfig, {"rope_theta": 0}, "rope_theta is 0; right is: more than 0"),
        (ModelConfig, {"norm_eps": 0}, "norm_eps is 0"),
        (ModelConfig, {"attention_kernel": "flash"}, "attention_kernel is 'flash'; right is: scal"),
        (OptimizerConfig, {"learning_rate": -1e-3}, "learning_rate is -0.001; right is: 0 or more"),
        (OptimizerConfig, {"learning_rate": math.nan}, "learning_rate is nan"),
        (OptimizerConfig, {"min_learning_rate": 2e-3}, "between 0 and learning_rate 0.001"),
        (OptimizerConfig, {"min_learning_rate": -1e-9}, "min_learning_rate is -1e-09"),
        (OptimizerConfig, {"warmup_steps": -1}, "warmup_steps is -1"),
        (OptimizerConfig, {"weight_decay": -0.1}, "weight_decay is -0.1"),
        (OptimizerConfig, {"beta1": 1.0}, "beta1 is 1.0; right is: at least 0 and less than 1"),
        (OptimizerConfig, {"beta2": -0.1}, "beta2 is -0.1"),
        (OptimizerConfig, {"eps": 0}, "eps is 0; right is: more than 0"),
        (OptimizerConfig, {"max_grad_norm": -1}, "max_grad_norm is -1"),
        (OptimizerConfig, {"z_loss": -1}, "z_loss is -1"),
        (TrainConfig, {"steps": 0}, "steps is 0; right is: at least 1"),
        (TrainConfig, {"batch_size": 0}, "batch_size is 0"),
        (TrainConfig, {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        (TrainConfig, {"log_interval": 0}, "log_interval is 0"),
        (TrainConfig, {"keep_last": 0}, "keep_last is 0"),
        (TrainConfig, {"max_nonfinite_steps": 0}, "max_nonfinite_steps is 0"),
        (TrainConfig, {"seed": -1}, "seed is -1; right is: 0 or more"),
        (TrainConfig, {"eval_interval": -1}, "eval_interval is -1"),
        (TrainConfig, {"eval_tokens": -1}, "eval_tokens is -1"),
        (TrainConfig, {"dtype": "float64"}, "right is: auto, float32, bfloat16 or float16"),
        (TrainConfig, {"dtype": ""}, "dtype is ''"),
        (TrainConfig, {"ddp_wrapper": "ddp"}, "ddp_wrapper is 'ddp'; right is: none, naive, flat"),
        (TrainConfig, {"sharded_optimizer": "zero2"}, "right is: none, zero1, torch_zero"),
        (TrainConfig, {"zero1_strategy": "whole"}, "'whole'; right is: flat, parameters"),
        (
            TrainConfig,
            {"ddp_wrapper": "fsdp2", "sharded_optimizer": "zero1"},
            "sharded_optimizer is 'zero1' and ddp_wrapper 'fsdp2', which shards the optimizer's",
        ),
        (TrainConfig, {"bucket_size_mb": 0}, "bucket_size_mb is 0; right is: more than 0"),
        (TrainConfig, {"steps": 99}, "warmup_steps 100 is more than steps 99"),
        (SampleConfig, {"prompts": ()}, "prompts is (); right is: at least one text"),
        (SampleConfig, {"max_new_tokens": -1}, "max_new_tokens is -1"),
        (SampleConfig, {"temperature": -0.1}, "temperature is -0.1; right is: 0 or more"),
        (SampleConfig, {"temperature": math.inf}, "temperature is inf"),
        (SampleConfig, {"top_k": -1}, "top_k is -1"),
        (SampleConfig, {"top_p": 0}, "top_p is 0; right is: more than 0 and at most 1"),
        (SampleConfig, {"top_p": 1.1}, "top_p is 1.1"),
        (SampleConfig, {"seed": -1}, "seed is -1"),
        (PipelineConfig, {"skip_data": True}, "skip_data is True and train.data is not given"),
    ],
)
def test_wrong_values_are_refused_by_name(cls, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        cls(**changes)


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


@pytest.mark.parametrize("value", ["both", "", None])
@pytest.mark.parametrize("field", ["norm", "positions", "feed_forward"])
def test_variants_that_do_not_exist_are_refused_in_a_file(field, value):
    with pytest.raises(ValueError, match=f"{field} is .*; right is: one of "):
        from_json(ModelConfig, json.dumps({field: value}))


@pytest.mark.parametrize(
    "cls",
    [ModelConfig, OptimizerConfig, TrainConfig, SampleConfig, GenerateConfig, PipelineConfig],
)
def test_defaults_come_back_from_json(cls):
    assert from_json(cls, to_json(cls())) == cls()


def test_a_heads_width_and_the_inner_width_that_is_built():
    model = ModelConfig(d_model=96, num_heads=6, d_ff=250)
    assert (model.head_dim, model.ff_width) == (16, 250)
    # two matrices of 3/2 the width hold what three of the width do
    assert dataclasses.replace(model, feed_forward="silu").ff_width == 375


def test_the_pipelines_that_come_along():
    assert {"tiny", "tinystories", "shakespeare"} <= set(NAMES)


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


def test_the_tinystories_preset_sees_as_many_tokens_as_the_course_asks_for():
    training = from_json(PipelineConfig, PRESETS / "tinystories.json").train
    seen = training.steps * training.batch_size * training.model.context_length
    assert seen == 327_680_000


@pytest.mark.parametrize("name", ["tiny", "tinystories"])
def test_presets_of_pipelines_and_of_models_agree(name):
    config = from_json(PipelineConfig, PRESETS / f"{name}.json")
    model = dataclasses.replace(config.train.model, vocab_size=config.corpus.vocab_size)
    assert model == model_preset(name)


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_model_preset_says_how_large_its_vocabulary_is(name):
    assert MODEL_PRESETS[name].vocab_size >= TokenizeConfig().vocab_size


def test_an_unknown_model_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"model preset is 'huge'; known: tiny, tinystories, "):
        model_preset("huge")
