"""Activation checkpointing: the same gradients from less memory, and nothing costly done twice."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lib.fsdp.activation_checkpointing import checkpoint_activations
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM

CONFIG = ModelConfig(
    vocab_size=31, context_length=64, d_model=32, num_layers=4, num_heads=2, d_ff=64
)
WAYS = {
    "everything": None,
    "matmuls": checkpoint_activations(keep="matmuls"),
    "attention": checkpoint_activations(keep="attention"),
    "every other": checkpoint_activations(every=2),
    "input": checkpoint_activations(),
}


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def step(way: str, kernel: str = "sdpa") -> tuple[list[Tensor], int, Counter]:
    """Gradients, bytes that forward keeps for backward, and the operations of backward."""
    config = dataclasses.replace(CONFIG, attention_kernel=kernel)
    model = TransformerLM(config, generator=torch.Generator().manual_seed(0))
    model.around_block = WAYS[way]
    tokens = torch.arange(2 * 64).view(2, 64) % 31
    kept: dict[int, int] = {}
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(tokens, tokens)
    with Counted() as counted:
        loss.backward()
    return [param.grad for param in model.parameters()], sum(kept.values()), counted.calls


@pytest.fixture(scope="module")
def steps():
    return {way: step(way) for way in WAYS}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_without_checkpointing_to_the_bit(steps, way):
    assert all(map(torch.equal, steps[way][0], steps["everything"][0]))


def test_what_is_kept_is_not_computed_again(steps):
    operations = {way: calls for way, (_, _, calls) in steps.items()}
    attention = {
        way: sum(n for name, n in calls.items() if name.endswith("flash_attention_for_cpu"))
        for way, calls in operations.items()
    }
    expected = {"everything": 0, "matmuls": 0, "attention": 0, "every other": 2, "input": 4}
    assert attention == expected
    # four matmuls a block, computed again
    matmuls = {
        way: calls["aten::mm"] - operations["everything"]["aten::mm"]
        for way, calls in operations.items()
    }
    assert matmuls["matmuls"] == 0
    assert matmuls["attention"] == matmuls["input"] == 2 * matmuls["every other"] > 0


def test_our_attention_is_kept_too():
    computed_again = step("attention", "flash_attention_torch")[2]
    assert computed_again["workbook::flash_attention_torch_backward"] == CONFIG.num_layers
    assert not computed_again["workbook::flash_attention_torch"]


def test_forward_keeps_less_the_more_is_computed_again(steps):
    kept = {way: steps[way][1] for way in ("everything", "every other", "input")}
    assert kept["input"] < kept["every other"] < kept["everything"]
    # a block keeps its input, 2 × 64 × 32 floats
    inputs = 4 * CONFIG.num_layers * 2 * 64 * 32
    outside = kept["input"] - inputs
    assert kept["every other"] - outside - inputs / 2 == pytest.approx(
        (kept["everything"] - outside) / 2, rel=0.1
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"keep": "all"}, "keep must be one of input, attention, matmuls, got 'all'"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        checkpoint_activations(**options)
