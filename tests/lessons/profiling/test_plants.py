"""Plants in the model of notebook 04 keep its numbers, and show in its trace."""

from collections import Counter

import pytest
import torch

from lib.lessons.profiling import plain_model
from lib.lessons.profiling.plants import CAUSES, PLANTS, planted
from lib.model import TransformerLM
from lib.model.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=64, context_length=16, d_model=16, num_layers=2, num_heads=2, d_ff=32
)
PARTS = ("embedding", "attention", "feed-forward", "head", "loss")


@pytest.fixture(scope="module")
def batch():
    weights = dict(TransformerLM(CONFIG).named_parameters())
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    return weights, tokens[:, :-1], tokens[:, 1:]


def calls(loss_of, batch):
    """(part, operator) -> calls in a forward pass."""
    with torch.profiler.profile() as profiler:
        loss_of(*batch, CONFIG)
    found = Counter()
    for event in profiler.events():
        part = event
        while part.name not in PARTS and part.cpu_parent:
            part = part.cpu_parent
        found[part.name, event.name] += 1
    return found


def test_the_model_is_that_of_the_library(batch):
    weights, x, y = batch
    model = TransformerLM(CONFIG)
    model.load_state_dict(weights)
    torch.testing.assert_close(plain_model.loss_of(weights, x, y, CONFIG), model.loss(x, y))


@pytest.mark.parametrize("name", PLANTS)
def test_a_plant_changes_no_number(batch, name):
    loss, healthy = (of(*batch, CONFIG) for of in (planted(name), plain_model.loss_of))
    torch.testing.assert_close(loss, healthy, rtol=1e-5, atol=1e-6)


def test_each_plant_shows_in_the_trace_as_its_cause_says(batch):
    healthy = calls(plain_model.loss_of, batch)
    one_hot, mask, float64 = (calls(planted(name), batch) - healthy for name in "ABC")
    assert one_hot["embedding", "aten::mm"] == one_hot["embedding", "aten::one_hot"] == 1
    # Python's work is in no operator: next to nothing is called that was not called before
    assert {operator for _, operator in mask} <= {
        "aten::detach",
        "aten::lift_fresh",
        "detach_",
        "aten::detach_",
        "aten::to",
        "aten::_to_copy",
    }
    assert float64["attention", "aten::copy_"] == 2 * CONFIG.num_layers
    assert not float64["attention", "aten::bmm"]
    assert {"one-hot", "mask", "float64"} <= CAUSES.keys()
