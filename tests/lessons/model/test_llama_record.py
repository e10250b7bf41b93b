"""The recorded logits of `transformers`: ours are the same, and so are those of a new recording."""

import pytest
import torch

from lib.lessons.model import llama_record
from lib.lessons.model.llama_record import read_logits


def test_our_logits_are_those_of_the_record(story):
    model, _ = story
    told = read_logits()
    with torch.no_grad():
        ours = model(torch.tensor([told.token_ids]))[0, :, :: told.every]
    torch.testing.assert_close(ours, torch.tensor(told.logits), rtol=1e-4, atol=1e-3)


def test_the_command_records_the_same_again(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    before = read_logits()
    monkeypatch.setattr(llama_record, "RECORD", tmp_path / "logits.json")
    llama_record.save_logits()
    after = read_logits()
    assert after.token_ids == before.token_ids
    torch.testing.assert_close(
        torch.tensor(after.logits), torch.tensor(before.logits), rtol=1e-4, atol=1e-3
    )
