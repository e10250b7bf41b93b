"""Logits of Hugging Face's `transformers`, recorded once, so that notebook 03 needs no network.

`python -m lib lessons llama` makes artifacts/llama_logits.json anew; it needs `transformers`
(.ci/requirements-interop.txt). Two models are in it:

- `trained`: artifacts/tiny_stories, exported by `lib.training.interchange`;
- `grouped`: a seeded Llama of `transformers`' own, whose query heads share keys and values.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lib.core.files import ROOT, write_atomically
from lib.model.llama import from_llama_config
from lib.tokenizer.bpe import Tokenizer
from lib.training.config import ExportConfig
from lib.training.interchange import export_run

RECORD = ROOT / "artifacts/llama_logits.json"
TRAINED = ROOT / "artifacts/tiny_stories"
PROMPT = "Once upon a time, there was a little fox"
STORY_TOKENS = 40
# The logits of every so many-th token are kept.
EVERY = {"trained": 512, "grouped": 4}
GROUPED: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class LlamaLogits:
    """The results of `transformers` for one model."""

    token_ids: list[int]
    """The text."""

    every: int
    """The logits kept are those of ids 0, `every`, 2 · `every`, …"""

    logits: list[list[float]]
    """For each token of the text."""

    continuation: list[int]
    """The likeliest next token, again and again; empty where the model is not trained."""


def read_logits(name: str) -> LlamaLogits:
    """Read the recorded logits of `trained` or `grouped`, and print who computed them."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    print("recorded with transformers {transformers}, torch {torch}, {date}".format(**record))
    return LlamaLogits(**record[name])


def grouped_weights(seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the `grouped` model in Llama's layout, the same on every machine."""
    config = from_llama_config(GROUPED)
    d_model, kv_width = config.d_model, GROUPED["num_key_value_heads"] * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d_model)}
    for layer in range(config.num_layers):
        part = f"model.layers.{layer}"
        shapes |= {
            f"{part}.input_layernorm.weight": (d_model,),
            f"{part}.self_attn.q_proj.weight": (d_model, d_model),
            f"{part}.self_attn.k_proj.weight": (kv_width, d_model),
            f"{part}.self_attn.v_proj.weight": (kv_width, d_model),
            f"{part}.self_attn.o_proj.weight": (d_model, d_model),
            f"{part}.post_attention_layernorm.weight": (d_model,),
            f"{part}.mlp.gate_proj.weight": (config.d_ff, d_model),
            f"{part}.mlp.up_proj.weight": (config.d_ff, d_model),
            f"{part}.mlp.down_proj.weight": (d_model, config.d_ff),
        }
    shapes |= {"model.norm.weight": (d_model,), "lm_head.weight": (config.vocab_size, d_model)}
    # its numbers are frozen, unlike those of newer generators
    generator = np.random.RandomState(seed)
    weights = {}
    for name, shape in shapes.items():
        values = torch.tensor(generator.standard_normal(shape), dtype=torch.float32)
        weights[name] = 1 + values / 4 if len(shape) == 1 else values / 4
    return weights


def save_logits() -> Path:
    """Compute both models' logits with `transformers`, and write the record."""
    import datetime

    import transformers

    with tempfile.TemporaryDirectory() as scratch:
        folder = export_run(ExportConfig(folder=Path(scratch) / "model", checkpoint=TRAINED))
        trained = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    config = transformers.LlamaConfig(**GROUPED)
    grouped = transformers.LlamaForCausalLM(config).eval()
    grouped.load_state_dict(grouped_weights())
    ids = Tokenizer.load(TRAINED).encode(PROMPT)
    record = {
        "made by": "python -m lib lessons llama",
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "trained": _record_of(trained, ids, EVERY["trained"], STORY_TOKENS),
        "grouped": _record_of(grouped, [3, 1, 4, 1, 5, 9, 2, 6], EVERY["grouped"], 0),
    }
    write_atomically(RECORD, json.dumps(record) + "\n")
    return RECORD


@torch.no_grad()
def _record_of(model: Any, token_ids: list[int], every: int, more: int) -> dict[str, Any]:
    given = torch.tensor([token_ids])
    logits = model(given).logits[0, :, ::every].double()
    story = model.generate(given, max_new_tokens=more, do_sample=False) if more else given
    return {
        "token_ids": token_ids,
        "every": every,
        "logits": [[round(value, 5) for value in row] for row in logits.tolist()],
        "continuation": story[0, len(token_ids) :].tolist(),
    }
