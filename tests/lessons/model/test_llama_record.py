"""The recorded logits of `transformers`: ours are the same, and so are those of a new recording."""

import pytest
import torch

from lib.lessons.model import llama_record
from lib.lessons.model.llama_record import GROUPED, grouped_weights, read_logits
from lib.model.llama import from_llama, from_llama_config
from lib.model.transformer import TransformerLM
from lib.training.generation import load_model


def models():
    trained, _, _ = load_model(llama_record.TRAINED, "cpu")
    grouped = TransformerLM(from_llama_config(GROUPED))
    grouped.load_state_dict(from_llama(grouped_weights(), grouped.config))
    return {"trained": trained.float(), "grouped": grouped}


@pytest.fixture(scope="module", params=["trained", "grouped"])
def recorded(request):
    model = models()[request.param]
    return read_logits(request.param), torch.no_grad()(lambda ids: model(ids[None])[0])


def test_our_logits_are_those_of_the_record(recorded):
    told, logits_of = recorded
    ours = logits_of(torch.tensor(told.token_ids))[:, :: told.every]
    torch.testing.assert_close(ours, torch.tensor(told.logits), rtol=1e-4, atol=1e-3)
    # the likeliest next token, at the end of the text and at each token of the continuation
    likeliest = logits_of(torch.tensor(told.token_ids + told.continuation)).argmax(-1).tolist()
    assert likeliest[len(told.token_ids) - 1 : -1] == told.continuation


def test_the_command_records_the_same_again(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    before = [read_logits(name) for name in ("trained", "grouped")]
    monkeypatch.setattr(llama_record, "RECORD", tmp_path / "logits.json")
    llama_record.save_logits()
    for old, name in zip(before, ("trained", "grouped")):
        new = read_logits(name)
        assert (new.token_ids, new.continuation) == (old.token_ids, old.continuation)
        torch.testing.assert_close(
            torch.tensor(new.logits), torch.tensor(old.logits), rtol=1e-4, atol=1e-3
        )
