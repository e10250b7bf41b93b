"""Logits of Hugging Face's `transformers`, recorded once, so that notebook 03 needs no network.

`python -m lib lessons llama` makes artifacts/llama_logits.json anew, of artifacts/tiny_stories as
`lib.training.interchange` exports it; it needs `transformers` (.ci/requirements-interop.txt).
"""

from __future__ import annotations

import datetime
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from lib.core.files import ROOT, write_atomically
from lib.tokenizer.bpe import Tokenizer
from lib.training.config import ExportConfig
from lib.training.interchange import export_run

RECORD = ROOT / "artifacts/llama_logits.json"
TRAINED = ROOT / "artifacts/tiny_stories"
PROMPT = "Once upon a time, there was a little fox"
# The logits of every so many-th token are kept.
EVERY = 512


@dataclass(frozen=True)
class LlamaLogits:
    """The results of `transformers` for a text."""

    token_ids: list[int]
    """The text."""

    every: int
    """The logits kept are those of ids 0, `every`, 2 · `every`, …"""

    logits: list[list[float]]
    """For each token of the text."""


def read_logits() -> LlamaLogits:
    """Read the recorded logits, and print who computed them."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    print("recorded with transformers {transformers}, torch {torch}, {date}".format(**record))
    return LlamaLogits(**record["trained"])


@torch.no_grad()
def save_logits() -> Path:
    """Compute the story model's logits with `transformers`, and write the record."""
    import transformers

    with tempfile.TemporaryDirectory() as scratch:
        folder = export_run(ExportConfig(folder=Path(scratch) / "model", checkpoint=TRAINED))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = Tokenizer.load(TRAINED).encode(PROMPT)
    logits = model(torch.tensor([ids])).logits[0, :, ::EVERY].double()
    rounded = [[round(value, 5) for value in row] for row in logits.tolist()]
    record = {
        "made by": "python -m lib lessons llama",
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "trained": {"token_ids": ids, "every": EVERY, "logits": rounded},
    }
    write_atomically(RECORD, json.dumps(record) + "\n")
    return RECORD
