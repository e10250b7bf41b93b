"""Training with different attention kernels: records, differences, table and figure."""

import pytest

from lib.model.config import ModelConfig
from lib.tools.benchmarks import attention_training as benchmark
from lib.training.config import OptimizerConfig

SMALL = benchmark.LossRun(
    model=ModelConfig(context_length=32, d_model=32, num_layers=1, num_heads=2, d_ff=64),
    optimizer=OptimizerConfig(learning_rate=0.003, min_learning_rate=0.003, warmup_steps=0),
    batch_size=2,
    corpus_bytes=100_000,
    vocab_size=300,
)
KERNELS = ("sdpa", "flash_attention_torch")


def test_kernels_train_alike_and_seeds_do_not(tmp_path, monkeypatch):
    config = benchmark.AttentionTrainingConfig(
        KERNELS, (0, 1), steps=20, device="cpu", output=tmp_path
    )
    records = benchmark.train_with_kernels(config, SMALL)
    runs = [(benchmark.kernel_of(record), benchmark.seed_of(record)) for record in records]
    assert runs == [(kernel, seed) for seed in (0, 1) for kernel in KERNELS]
    assert all(record["figures"]["steps"] == [10, 20] for record in records)
    of_kernels, of_seeds = benchmark.differences(records)
    assert of_kernels["pairs"] == of_seeds["pairs"] == 2
    for part in ("first half", "second half", "validation"):
        assert of_kernels[part] < 1e-4 < 1e-3 < of_seeds[part]

    text = (tmp_path / "attention_training.md").read_text(encoding="utf-8")
    assert "| flash_attention_torch |" in text
    assert "| kernel  |" in text
    assert (tmp_path / "attention_training.png").stat().st_size > 10_000

    # finished runs are not repeated
    monkeypatch.setattr(benchmark, "_train", lambda *_: pytest.fail("trained again"))
    assert benchmark.train_with_kernels(config, SMALL) == records


def record(kernel: str, seed: int, losses: list[float], validation_loss: float) -> dict:
    return {
        "config": {"seed": seed, "model": {"attention_kernel": kernel}},
        "figures": {"losses": losses, "validation_loss": validation_loss},
    }


RECORDS = [
    record("sdpa", 0, [9.0, 8.0, 2.0, 1.0], 3.0),
    record("flash", 0, [9.5, 8.5, 3.0, 1.5], 3.25),
    record("sdpa", 1, [8.0, 8.0, 2.0, 0.0], 2.0),
    record("flash", 1, [8.0, 8.0, 2.0, 0.0], 2.25),
]


def test_runs_are_compared_that_differ_in_one_thing():
    of_kernels, of_seeds = benchmark.differences(RECORDS)
    assert list(of_kernels.values()) == ["kernel", 2, 0.25, 0.375, 0.25]
    assert list(of_seeds.values()) == ["seed", 2, 0.75, 0.875, 1]


def test_final_losses_have_mean_and_spread():
    first, second = benchmark.final_losses(RECORDS[:3])
    assert list(first.values()) == ["sdpa", 2, 2.5, pytest.approx(0.5**0.5)]
    assert list(second.values()) == ["flash", 1, 3.25, None]
