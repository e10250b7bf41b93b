"""The peer of FSDP: gradients that PyTorch has averaged get to the optimizer's shards."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="needs PyTorch's FSDP2")

from lib.sharded_optimizer.shards import make_shard
from lib.tools.peers.fsdp2 import FullySharded


def local(value: float) -> SimpleNamespace:
    """A gradient of two rows, as a `DTensor` has it."""
    return SimpleNamespace(to_local=lambda: torch.full((2, 3), value))


def test_gradients_add_up_and_finishing_again_changes_nothing():
    param = torch.nn.Parameter(torch.zeros(2, 3))
    shard = make_shard(param, 0, 0, 6, param.detach().view(-1))
    shard.param = SimpleNamespace(grad=None)
    peer = SimpleNamespace(shards=[shard])
    for value in (1.0, 2.0):
        shard.param.grad = local(value)
        for _ in range(2):
            FullySharded.finish_gradient_synchronization(peer)
    assert shard.param.grad is None
    assert shard.leaf.grad.flatten().tolist() == [3.0] * 6
