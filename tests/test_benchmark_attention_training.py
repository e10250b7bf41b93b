"""Training with different attention kernels: records, their differences, table and figure."""

import dataclasses

import pytest

from lib import benchmark_attention_training as curves
from lib.config_training import ModelConfig, OptimizerConfig

SMALL = curves.LossRun(
    model=ModelConfig(context_length=32, d_model=32, num_layers=1, num_heads=2, d_ff=64),
    optimizer=OptimizerConfig(learning_rate=0.003, min_learning_rate=0.003, warmup_steps=0),
    steps=20,
    batch_size=2,
    corpus_bytes=100_000,
    vocab_size=300,
)
KERNELS = ("sdpa", "flash_attention_torch")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curves")
    return folder, curves.train_with_kernels(folder, run=SMALL, kernels=KERNELS, device="cpu")


def test_each_kernel_trains_with_each_seed(made):
    _, records = made
    runs = [(curves.kernel_of(record), curves.seed_of(record)) for record in records]
    assert runs == [(kernel, seed) for seed in (0, 1) for kernel in KERNELS]
    assert all(record["figures"]["steps"] == [10, 20] for record in records)


def test_kernels_train_alike_and_seeds_do_not(made):
    rows = curves.differences(made[1])
    between_kernels = [row for row in rows if row["first"][-1] == row["second"][-1]]
    between_seeds = [row for row in rows if row not in between_kernels]
    assert len(between_kernels) == len(between_seeds) == 2
    assert max(row["largest difference"] for row in between_kernels) < 1e-4
    assert min(row["largest difference"] for row in between_seeds) > 1e-3


def test_table_and_figure_are_written(made):
    folder, _ = made
    table = (folder / "attention_training.md").read_text(encoding="utf-8")
    assert "| flash_attention_torch, seed 0 |" in table
    assert (folder / "attention_training.png").stat().st_size > 10_000


def test_finished_runs_are_not_repeated(made, monkeypatch):
    folder, records = made
    monkeypatch.setattr(curves, "_train", lambda *_: pytest.fail("trained again"))
    again = curves.train_with_kernels(folder, run=SMALL, kernels=KERNELS, device="cpu")
    assert again == records


def test_a_difference_is_that_of_the_second_half():
    record = {"config": {"seed": 0, "model": {"attention_kernel": "sdpa"}}}
    figures = {"steps": [1, 2, 3, 4], "losses": [9.0, 9.0, 2.0, 1.0], "validation_loss": 3.0}
    other = dataclasses.asdict(SMALL) | {"seed": 1, "model": {"attention_kernel": "sdpa"}}
    moved = {"steps": [1, 2, 3, 4], "losses": [0.0, 0.0, 2.5, 0.5], "validation_loss": 2.0}
    rows = curves.differences([record | {"figures": figures}, {"config": other, "figures": moved}])
    assert rows == [
        {
            "first": "sdpa, seed 0",
            "second": "sdpa, seed 1",
            "mean difference": 0.5,
            "largest difference": 0.5,
            "validation difference": 1.0,
        }
    ]
