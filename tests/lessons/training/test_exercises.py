"""Helpers and checkers of notebook 03's exercises; test_answers.py has the answers to them."""

import pytest
import torch

from lib.lessons.exercise import draw_inputs
from lib.lessons.training import exercises, toys
from lib.lessons.training.toys import ToyDecoder
from tests.lessons.answers.training import whole_run_at_once


def test_an_interrupted_run_has_the_weights_of_a_whole_one():
    for given in draw_inputs(exercises.resume, 0):
        assert torch.equal(exercises.resume.solve(*given), whole_run_at_once(*given))


def test_a_token_that_is_computed_again_is_refused():
    model = ToyDecoder(0, 1, 4)
    model.qkv(3, 0)
    with pytest.raises(ValueError, match="position 0 was computed before; keep its key and value"):
        model.qkv(3, 0)


def test_batches_that_are_joined_are_refused():
    weights = {"slope": torch.ones(2), "offset": torch.zeros(())}
    with pytest.raises(MemoryError, match="points do not fit, only those of the 3 of one batch"):
        toys.ToyLoss()(weights, torch.ones(6, 2), torch.ones(6))
