"""Training with different attention kernels: records, their differences, table and figure."""

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
    return folder, curves.train_with_kernels(
        folder, run=SMALL, kernels=KERNELS, seeds=(0, 1), device="cpu"
    )


def test_each_kernel_trains_with_each_seed(made):
    _, records = made
    runs = [(curves.kernel_of(record), curves.seed_of(record)) for record in records]
    assert runs == [(kernel, seed) for seed in (0, 1) for kernel in KERNELS]
    assert all(record["figures"]["steps"] == [10, 20] for record in records)


def test_kernels_train_alike_and_seeds_do_not(made):
    of_kernels, of_seeds = curves.differences(made[1])
    assert of_kernels["pairs"] == of_seeds["pairs"] == 2
    for part in ("first half", "second half", "validation"):
        assert of_kernels[part] < 1e-4 < 1e-3 < of_seeds[part]


def test_table_and_figure_are_written(made):
    folder, _ = made
    table = (folder / "attention_training.md").read_text(encoding="utf-8")
    assert "| flash_attention_torch |" in table
    assert "| kernel  |" in table
    assert (folder / "attention_training.png").stat().st_size > 10_000


def test_finished_runs_are_not_repeated(made, monkeypatch):
    folder, records = made
    monkeypatch.setattr(curves, "_train", lambda *_: pytest.fail("trained again"))
    again = curves.train_with_kernels(
        folder, run=SMALL, kernels=KERNELS, seeds=(0, 1), device="cpu"
    )
    assert again == records


def record(kernel: str, seed: int, losses: list[float], validation_loss: float) -> dict:
    return {
        "config": {"seed": seed, "model": {"attention_kernel": kernel}},
        "figures": {"losses": losses, "validation_loss": validation_loss},
    }


RECORDS = [
    record("sdpa", 0, [9.0, 8.0, 2.0, 1.0], 3.0),
    record("flash", 0, [9.5, 8.5, 3.0, 1.0], 3.25),
    record("sdpa", 1, [8.0, 8.0, 2.0, 0.0], 2.0),
    record("flash", 1, [8.0, 8.0, 2.0, 0.0], 2.25),
]


def test_runs_are_compared_that_differ_in_one_thing():
    assert curves.differences(RECORDS) == [
        {
            "another": "kernel",
            "pairs": 2,
            "first half": 0.25,
            "second half": 0.25,
            "validation": 0.25,
        },
        {"another": "seed", "pairs": 2, "first half": 0.75, "second half": 0.75, "validation": 1},
    ]


def test_final_losses_have_mean_and_spread():
    rows = curves.final_losses(RECORDS[:3])
    assert [row["kernel"] for row in rows] == ["sdpa", "flash"]
    assert rows[0] == {
        "kernel": "sdpa",
        "seeds": 2,
        "validation loss": 2.5,
        "standard deviation": pytest.approx(0.5**0.5),
    }
    assert rows[1]["standard deviation"] is None
