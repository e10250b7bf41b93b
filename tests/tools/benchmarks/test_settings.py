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

EPOCHS = {"epochs": 5, "timed_epochs": 5}
REFUSED = [
    (AttentionBenchmarkConfig, {"custom_tiers": ("128",)}, "QUERIES:KEYS .* got '128'"),
    (AttentionBenchmarkConfig, {"custom_tiers": ("9999999999:8",)}, "custom_tiers"),
    (AttentionBenchmarkConfig, {"head_dims": (64, 0)}, r"head_dims\[1\] .* at least 1, got 0"),
    (AttentionBenchmarkConfig, {"masks": ()}, r"masks must be a list of at least 1, got \(\)"),
    (AttentionBenchmarkConfig, {"warmup": 0}, "warmup .* got 0"),
    (AttentionBenchmarkConfig, {"max_seconds": math.inf}, "max_seconds .* got inf"),
    (AttentionBenchmarkConfig, {"seed": 2**63}, "seed .* got 9223372036854775808"),
    (CommunicationBenchmarkConfig, {"ranks": 1}, "ranks must be at least 2"),
    (CommunicationBenchmarkConfig, {"sizes_mb": (1.0, 0.0)}, r"sizes_mb\[1\] must be more than 0"),
    (CommunicationBenchmarkConfig, {"collectives": ()}, "collectives must be"),
    (CommunicationBenchmarkConfig, {"timeout": -1.0}, "timeout must be"),
    (LmMatrixConfig, EPOCHS, "epochs must be more than timed_epochs"),
    (LmMatrixConfig, {"dtype": "int8"}, 'dtype must be one of "auto"'),
    (LmMatrixConfig, {"kernels": ("sdpa", "fast")}, r"kernels\[1\] must be one of \"scaled"),
    (LmMatrixConfig, {"wrappers": ()}, "wrappers must be a list of at least 1"),
    (ShardingConfig, EPOCHS, "epochs must be more than timed_epochs"),
    (ShardingConfig, {"methods": ("zero3",)}, "methods must be names out of none"),
    (ShardingConfig, {"methods": ()}, "methods must be a list of at least 1"),
    (ShardingConfig, {"attention_kernel": "fast"}, 'attention_kernel must be one of "scaled'),
    (StepBenchmarkConfig, {"models": ("huge",)}, r"models\[0\] must be one of \"tiny\""),
    (StepBenchmarkConfig, {"modes": ()}, "modes must be"),
    (TokenizerBenchmarkConfig, {"vocab_sizes": (256,)}, r"vocab_sizes\[0\] must be more than 256"),
    (TrainingBenchmarkConfig, {"models": ("tiny",)}, "batch_sizes must be one number for each of"),
]


@pytest.mark.parametrize(("config", "settings", "message"), REFUSED)
def test_a_wrong_setting_is_named(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)
