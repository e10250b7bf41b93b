"""Ablations: a seed decides everything, variants differ in what they say, the record is whole."""

import numpy as np
import pytest
import torch

from lib.lessons.model import ablation
from lib.lessons.model.ablation import SEEDS, VARIANTS, Run, ShortTraining, train
from lib.model.config import ModelConfig

TINY = ModelConfig(vocab_size=16, context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=16)
# a text in which each token follows from the one before
TOKENS = np.arange(2_000, dtype=np.uint16) % 16


def test_a_short_training_learns_and_its_seed_decides_everything():
    training = ShortTraining(steps=40, warmup_steps=8)
    first, losses = train(TINY, TOKENS, training, seed=3)
    again, same = train(TINY, TOKENS, training, seed=3)
    _, others = train(TINY, TOKENS, training, seed=4)
    assert losses == same
    assert losses != others
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))
    assert losses[-1] < losses[0] / 5


def test_the_record_has_each_variant_and_seed_with_the_settings_of_the_code():
    records = ablation.read_records(ablation.RECORDS)
    expected = [Run(variant, seed) for variant in VARIANTS for seed in SEEDS]
    assert ablation.remaining(expected, records) == []
    assert len(records) == len(expected)


def test_costs_are_differences_of_the_same_seed_dearest_first(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "RECORDS", tmp_path / "records.jsonl")
    monkeypatch.setattr(ablation, "VARIANTS", {"as built": {}, "cheap": {}, "dear": {}})
    added = {"as built": 0.0, "cheap": -0.25, "dear": 0.5}
    for variant, more in added.items():
        for seed in SEEDS:
            record = ablation.new_record({"loss": 2 + seed + more}, config=Run(variant, seed))
            ablation.append_record(ablation.RECORDS, record)
    dear, cheap = ablation.recorded_costs()
    assert (dear["variant"], dear["costs"]) == ("dear", pytest.approx([0.5] * 3))
    assert (cheap["variant"], cheap["mean"]) == ("cheap", pytest.approx(-0.25))
