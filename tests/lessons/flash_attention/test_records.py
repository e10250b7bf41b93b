"""The same training with different kernels: how far apart runs are that differ in one thing."""

from lib.lessons.flash_attention.records import differences


def record(kernel: str, seed: int, losses: list[float], validation_loss: float) -> dict:
    return {
        "config": {"seed": seed, "model": {"attention_kernel": kernel}},
        "figures": {"losses": losses, "validation_loss": validation_loss},
    }


def test_runs_are_compared_that_differ_in_one_thing():
    records = [
        record("sdpa", 0, [9.0, 8.0, 2.0, 1.0], 3.0),
        record("flash", 0, [9.5, 8.5, 3.0, 1.5], 3.25),
        record("sdpa", 1, [8.0, 8.0, 2.0, 0.0], 2.0),
        record("flash", 1, [8.0, 8.0, 2.0, 0.0], 2.25),
    ]
    of_kernels, of_seeds = differences(records)
    assert list(of_kernels.values()) == ["kernel", 2, 0.25, 0.375, 0.25]
    assert list(of_seeds.values()) == ["seed", 2, 0.75, 0.875, 1]
