"""The learning rate by step against CS336's values."""

import pytest

from lib.optimizer.schedule import cosine_lr


def test_cosine_lr_has_the_values_of_cs336():
    settings = {"max_lr": 1, "min_lr": 0.1, "warmup_steps": 7, "cosine_steps": 21}
    right = {0: 0, 1: 1 / 7, 7: 1, 8: 0.9887175604818206, 14: 0.55, 21: 0.1, 24: 0.1}
    for step, lr in right.items():
        assert cosine_lr(step, **settings) == pytest.approx(lr, rel=1e-15), step


def test_cosine_lr_without_a_cosine_or_a_warm_up():
    settings = {"max_lr": 2.0, "min_lr": 0.5, "warmup_steps": 2, "cosine_steps": 2}
    assert [cosine_lr(step, **settings) for step in range(4)] == [0, 1.0, 0.5, 0.5]
    assert cosine_lr(0, max_lr=0.3, min_lr=0, warmup_steps=0, cosine_steps=4) == 0.3


@pytest.mark.parametrize(
    ("name", "value"), [("step", -1), ("warmup_steps", -1), ("cosine_steps", 1), ("min_lr", 2.0)]
)
def test_cosine_lr_names_what_is_out_of_order(name, value):
    settings = {"step": 0, "max_lr": 1.0, "min_lr": 0.1, "warmup_steps": 2, "cosine_steps": 4}
    with pytest.raises(ValueError, match=f"^{name} must be .*, got {value}"):
        cosine_lr(**(settings | {name: value}))
