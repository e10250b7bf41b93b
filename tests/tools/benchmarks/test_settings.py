"""Settings of the benchmarks that cannot be meant are refused with their name."""

import math

import pytest

from lib.tools.benchmarks.attention import AttentionBenchmarkConfig
from lib.tools.benchmarks.communication import CommunicationBenchmarkConfig
from lib.tools.benchmarks.lm_matrix import LmMatrixConfig
from lib.tools.benchmarks.sharding import ShardingConfig
from lib.tools.benchmarks.step import StepBenchmarkConfig
from lib.tools.benchmarks.tokenizer import TokenizerBenchmarkConfig
from lib.tools.benchmarks.training import TrainingBenchmarkConfig

SHARED_BY_RANKS = (
    ({"epochs": 5, "timed_epochs": 5}, "epochs must be more than timed_epochs"),
    ({"ranks": 0}, "ranks must be at least 1"),
    ({"context_length": 0}, "context_length must be"),
    ({"loss_steps": -1}, "loss_steps must be"),
    ({"bucket_size_mb": math.inf}, "bucket_size_mb must be"),
    ({"dtype": "int8"}, 'dtype must be one of "auto"'),
)
REFUSED = {
    AttentionBenchmarkConfig: (
        ({"custom_tiers": ("128",)}, "custom_tiers must be QUERIES:KEYS .* got '128'"),
        ({"custom_tiers": ("9999999999:8",)}, "custom_tiers"),
        ({"head_dims": (64, 0)}, r"head_dims\[1\] must be at least 1, got 0"),
        ({"masks": ()}, r"masks must be a list of at least 1, got \(\)"),
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"warmup": 0}, "warmup .* got 0"),
        ({"samples": 0}, "samples .* got 0"),
        ({"max_seconds": math.inf}, "max_seconds .* got inf"),
        ({"seed": 2**63}, "seed .* got 9223372036854775808"),
    ),
    CommunicationBenchmarkConfig: (
        ({"ranks": 1}, "ranks must be at least 2"),
        ({"sizes_mb": (1.0, 0.0)}, r"sizes_mb\[1\] must be more than 0, got 0.0"),
        ({"collectives": ()}, "collectives must be"),
        ({"samples": 0}, "samples must be"),
        ({"warmup": 0}, "warmup must be"),
        ({"max_seconds": 0.0}, "max_seconds must be"),
        ({"timeout": -1.0}, "timeout must be"),
    ),
    LmMatrixConfig: (
        *SHARED_BY_RANKS,
        ({"kernels": ("sdpa", "fast")}, r"kernels\[1\] must be one of \"scaled"),
        ({"wrappers": ()}, "wrappers must be a list of at least 1"),
        ({"model": "huge"}, 'model must be one of "tiny"'),
    ),
    ShardingConfig: (
        *SHARED_BY_RANKS,
        ({"methods": ("zero3",)}, "methods must be names out of none"),
        ({"methods": ()}, "methods must be a list of at least 1"),
        ({"attention_kernel": "vectorized_torch_compiled"}, "attention_kernel must be one of"),
    ),
    StepBenchmarkConfig: (
        ({"models": ("huge",)}, r"models\[0\] must be one of \"tiny\""),
        ({"attention_kernel": ("fast",)}, "attention_kernel"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"seq_lens": (8, 0)}, r"seq_lens\[1\] must be at least 1, got 0"),
        ({"modes": ()}, "modes must be"),
        ({"max_seconds": 0.0}, "max_seconds must be"),
        ({"attention_kernel": ()}, "attention_kernel must be"),
        ({"seed": -1}, "seed must be"),
    ),
    TokenizerBenchmarkConfig: (
        ({"vocab_sizes": (256,)}, r"vocab_sizes\[0\] must be more than 256, got 256"),
        ({"vocab_sizes": ()}, "vocab_sizes must be"),
        ({"megabytes": 0}, "megabytes must be"),
        ({"samples": 0}, "samples must be"),
    ),
    TrainingBenchmarkConfig: (
        ({"models": ("tiny",)}, "batch_sizes must be one number for each of 1 models"),
        ({"models": ("tiny",), "batch_sizes": (0,)}, r"batch_sizes\[0\] must be at least 1, got 0"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
    ),
}


@pytest.mark.parametrize("config", REFUSED)
def test_a_wrong_setting_is_named(config):
    for settings, message in REFUSED[config]:
        with pytest.raises(ValueError, match=message):
            config(**settings)
