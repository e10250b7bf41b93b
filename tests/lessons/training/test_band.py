"""The band of notebook 03: runs that differ by their seeds alone."""

import dataclasses

import numpy as np

from lib.lessons.training.band import SEEDS, BandRun, read_band, smooth, train_with_seed

TINY = BandRun(vocab_size=40, context_length=16, d_model=24, num_layers=1, steps=6, batch_size=2)


def test_a_run_is_given_by_its_seed():
    tokens = np.tile(np.arange(40), 60)
    losses = [train_with_seed(TINY, tokens, seed)[1] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert len(losses[0]) == 6


def test_a_curve_is_the_mean_of_twenty_losses_at_the_last_of_their_steps():
    assert smooth([1.0] * 20 + [2.0] * 10 + [4.0] * 10 + [9.0] * 19) == {20: 1.0, 40: 3.0}


def test_the_committed_band_is_that_of_the_default_run_and_of_no_other():
    band = read_band(BandRun())
    assert len(band["held_out"]) == len(SEEDS)
    assert band["steps"] == [*range(20, 501, 20)]
    assert all(low < high for low, high in zip(band["low"], band["high"], strict=True))
    # below the bigram's
    assert max(band["high"][-3:]) < 2.9
    assert read_band(dataclasses.replace(BandRun(), steps=400)) is None
