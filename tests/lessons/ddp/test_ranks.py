"""The toys that ranks of lessons train with: a model, sequences of their own, plain descent."""

import torch

from lib.lessons.ddp import ranks
from lib.model.config import ModelConfig

SHAPE = ModelConfig(vocab_size=32, context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=32)


def test_ranks_have_sequences_of_their_own_and_a_batch_is_all_of_them():
    whole = ranks.batch(SHAPE, 2, 1, range(3))
    parts = [ranks.batch(SHAPE, 2, 1, [number]) for number in range(3)]
    for both, own in zip(whole, zip(*parts)):
        assert torch.equal(both, torch.cat(own))
    assert not torch.equal(parts[0][0], parts[1][0])
    assert torch.equal(whole[0][:, 1:], whole[1][:, :-1])


def test_a_step_of_descent_drops_the_gradients():
    model = ranks.make_model(SHAPE)
    before = [param.detach().clone() for param in model.parameters()]
    model(*ranks.batch(SHAPE, 2, 0, [0])).backward()
    expected = [old - 0.1 * param.grad for old, param in zip(before, model.parameters())]
    ranks.descend(model)
    assert all(map(torch.equal, expected, model.parameters()))
    assert all(param.grad is None for param in model.parameters())
