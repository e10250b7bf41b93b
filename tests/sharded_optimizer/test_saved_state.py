"""Saved state in one process: what is refused, and what becomes of settings."""

import pytest
import torch
from torch import Tensor

from lib.optimizer.adamw import AdamW
from lib.sharded_optimizer.saved_state import load_unsharded
from tests.sharded_optimizer.cases import ADAMW, SGD, backward, made_of, stack


def test_state_that_is_refused_changes_no_setting_of_an_unsharded_optimizer(tmp_path):
    module = stack()
    made = made_of(module, SGD)
    backward(module)
    made.step()
    made.save_shard(tmp_path)
    plain = AdamW(stack().parameters(), lr=0.2)
    with pytest.raises(ValueError, match="state step of parameter 0"):
        load_unsharded(tmp_path, plain)
    assert plain.param_groups[0]["lr"] == 0.2
    assert "momentum" not in plain.param_groups[0]


@pytest.mark.parametrize("unsharded", [AdamW, torch.optim.AdamW])
def test_a_learning_rate_tensor_stays_one_and_takes_the_saved_value(tmp_path, unsharded):
    made_of(stack(), {"optimizer_cls": torch.optim.AdamW, "lr": 0.3}).save_shard(tmp_path)
    lr = torch.tensor(0.1)
    plain = unsharded(stack().parameters(), lr=lr)
    load_unsharded(tmp_path, plain)
    assert isinstance(plain.param_groups[0]["lr"], Tensor)
    assert plain.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("stray", "message"),
    [
        ("shard-00003-of-00004.pt", "got those of 1 and of 4: .*, shard-00003-of-00004.pt"),
        ("shard-00001-of-00001.pt", None),
        ("shard-best-of-all.pt", None),
    ],
)
def test_a_file_that_is_no_shard_of_the_save_is_named_or_left_alone(tmp_path, stray, message):
    made_of(stack(), SGD).save_shard(tmp_path)
    (tmp_path / stray).write_bytes(b"from before")
    plain = torch.optim.SGD(stack().parameters(), lr=0.1)
    if message is None:
        load_unsharded(tmp_path, plain)
        return
    with pytest.raises(ValueError, match=message):
        load_unsharded(tmp_path, plain)


def test_masters_are_dropped_by_optimizers_that_keep_none(tmp_path):
    module = stack().bfloat16()
    made = made_of(module, ADAMW)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    made.step()
    made.save_shard(tmp_path)
    plain = torch.optim.AdamW(stack().parameters())
    load_unsharded(tmp_path, plain)
    assert {"exp_avg", "exp_avg_sq"} <= plain.state_dict()["state"][0].keys()
    assert "master" not in plain.state_dict()["state"][0]


def test_state_that_is_not_that_of_its_elements_is_not_cut():
    module = stack()
    made = made_of(module, ADAMW)
    backward(module)
    made.step()
    saved = made.state_dict()
    saved["ranges"][0] = (0, 12)
    with pytest.raises(ValueError, match=r"elements 0 to 24 of parameter 0 are needed, but .* 12"):
        made.load_state_dict(saved)
    # covers more than the parameter, so that a part of it would have to be cut out
    saved["ranges"][0] = (0, 36)
    with pytest.raises(ValueError, match="cannot be cut by elements"):
        made.load_state_dict(saved)
