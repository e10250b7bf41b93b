"""Words and numbers of notebook 02 that no cell of its own checks."""

import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F

from lib.lessons.exercise import edited
from lib.lessons.model import exercises
from lib.model.config import ModelConfig, model_preset
from lib.model.costs import flops_per_token
from lib.model.transformer import TransformerLM
from tests.lessons.answers.table import right_answers
from tests.lessons.page import read_page, run_page

PAGE = read_page("02_model")


def said(pattern: str) -> list[float]:
    """The numbers that a pattern with groups finds in the prose."""
    return [float(number.replace(",", "")) for number in PAGE.said(pattern)]


def test_the_rule_for_parameters_is_off_where_the_page_says_so():
    off = dict(re.findall(r"^(\S+) .* by the rule (\S+)%$", PAGE.outputs, re.MULTILINE))
    assert abs(int(off["tiny"])) < 2
    assert int(off["gpt2-124m"]) > 20
    assert int(off["xl"]) < -20


def mean_first_loss(std: float, vocab_size: int) -> float:
    logits = std * torch.randn(500, vocab_size, generator=torch.Generator().manual_seed(0))
    return logits.logsumexp(-1).mean().item()


def test_a_first_loss_of_25_needs_logits_as_large_as_the_page_says():
    vocab_size, loss = said(r"vocabulary of ([\d,]+), a training run starts at a loss of (\d+)")
    std, variance = said(r"standard deviation is about ([\d.]+), a variance of (\d+)")
    assert std**2 == pytest.approx(variance, abs=1)
    assert mean_first_loss(std, int(vocab_size)) == pytest.approx(loss, abs=0.3)
    # from log V + s²/2, far outside of where it holds
    (inferred,) = said(r"would infer a variance of (\d+); .* overstates the loss, and 32 is needed")
    assert inferred == pytest.approx(2 * (loss - math.log(vocab_size)), abs=1)
    assert mean_first_loss(inferred**0.5, int(vocab_size)) < loss - 1


def test_scores_and_values_are_half_of_the_layers_flops_at_six_times_the_width():
    tokens, width = said(r"\*\*\$T = 6d\$\*\* .*?: ([\d,]+) tokens for GPT-2's (\d+)")
    layers = dataclasses.replace(model_preset("gpt2-124m"), vocab_size=2)
    assert (tokens, width) == (6 * layers.d_model, layers.d_model)
    share = 1 - flops_per_token(layers, 0) / flops_per_token(layers, int(tokens))
    assert share == pytest.approx(0.5, abs=0.01)


def test_heads_cost_no_flops_and_a_tied_matrix_starts_as_small_as_a_head():
    (std,) = said(r"\\sqrt\{2 / \(4096 \+ 96\)\} = ([\d.]+)\$ where an embedding of its own has 1")
    shape = dataclasses.replace(model_preset("tiny"), d_model=96, num_heads=1, tied_embeddings=True)
    assert flops_per_token(shape) == flops_per_token(dataclasses.replace(shape, num_heads=4))
    for is_tied, expected in ((True, std), (False, 1)):
        model = TransformerLM(dataclasses.replace(shape, tied_embeddings=is_tied))
        assert model.token_embeddings.weight.std().item() == pytest.approx(expected, rel=0.1)


def steps_to_learn_by_heart(
    attention=exercises.attention.solve, rope=exercises.rotate.solve
) -> int:
    """Steps until the page's model has a loss below 0.1 on one batch of random tokens."""
    page = {"math": math, "torch": torch, "attention": attention, "rotate": rope}
    needed = ("rms_norm", "swiglu", "init_weights", "transformer", "learn_by_heart")
    page["block"] = exercises.block_with(page)
    for name in needed:
        exec(
            re.search(rf"^def {name}\(.*?(?=^\S|\Z)", PAGE.source, re.DOTALL | re.MULTILINE)[0],
            page,
        )
    shape = {"vocab_size": 500, "context_length": 32, "d_model": 64, "num_layers": 2}
    config = ModelConfig(**shape, num_heads=4, d_ff=176)
    tokens = torch.randint(500, (4, 33), generator=torch.Generator().manual_seed(0))

    def loss_of(weights):
        logits = page["transformer"](weights, tokens[:, :-1], config)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    losses = page["learn_by_heart"](loss_of, page["init_weights"](config, seed=0), 60)
    assert losses[-1] < 0.1
    return sum(loss >= 0.1 for loss in losses)


def test_without_a_mask_or_positions_a_batch_is_learned_in_about_as_many_steps():
    said(r"without the mask, or without positions, this model learns the batch in about as many")
    right = steps_to_learn_by_heart()
    unmasked = edited(exercises.attention.solve, ".masked_fill(~visible, -math.inf)", "")
    assert 0.6 < steps_to_learn_by_heart(unmasked) / right < 1.5
    assert 0.6 < steps_to_learn_by_heart(rope=lambda x, *_: x) / right < 1.5


@pytest.mark.slow
def test_the_page_goes_on_with_right_answers_of_another_kind(monkeypatch, capsys):
    answers = right_answers(exercises)
    run_page(PAGE.cells, answers, monkeypatch)
    assert capsys.readouterr().out.count("right: as expected") == len(answers) == 8
