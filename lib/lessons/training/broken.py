"""The broken runs of notebook 03: a small model, trained with one fault at a time.

`python -m lib lessons broken-runs` records them in artifacts/broken_runs.jsonl, some 35 KB in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lib.core.files import ROOT
from lib.core.records import append_record, new_record, read_records
from lib.data import get_batch
from lib.data.stories import generate_stories
from lib.lessons.model.explorers import attention_patterns
from lib.model import ModelConfig, TransformerLM
from lib.optimizer import AdamW, clip_grad_norm, cosine_lr

RECORDS = ROOT / "artifacts/broken_runs.jsonl"
STEPS, EVAL_INTERVAL, BATCH_SIZE, WARMUP_STEPS = 150, 10, 8, 15
LEARNING_RATE, MAX_GRAD_NORM = 0.005, 1.0
SHAPE = {"context_length": 64, "d_model": 128, "num_layers": 2, "num_heads": 4, "d_ff": 352}
# Letter in the notebook -> what is wrong; "healthy" is shown beside all.
FAULTS = {
    "A": "same batch",
    "B": "schedule over too early",
    "C": "learning rate too high",
    "D": "targets not shifted",
    "E": "gradients not cleared",
    "F": "scores not scaled",
}
HEALTHY = "healthy"
# Recorded as well, and no fault here: this model trains just as well without.
NO_WARM_UP = "no warm-up"


def train_with(
    fault: str, train: np.ndarray, held_out: np.ndarray, vocab_size: int
) -> dict[str, list[float]]:
    """Train a small model with `fault`, a value of FAULTS, HEALTHY or NO_WARM_UP.

    Returns:
        Of each step "loss" and "grad_norm", every EVAL_INTERVAL steps "held_out_loss", and before
        the first step "attention_peak": the share of its attention that a query gives to one
        key, on average over the first layer.
    """
    config = ModelConfig(vocab_size=vocab_size, **SHAPE)
    model = TransformerLM(config, generator=torch.Generator().manual_seed(0))
    if fault == "scores not scaled":
        for layer in model.layers:
            layer.attn.qkv_proj.register_forward_hook(unscale(config))
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    generator = np.random.default_rng(0)
    judged = _batch(fault, held_out, 32, np.random.default_rng(1))
    history: dict[str, list[float]] = {"loss": [], "grad_norm": [], "held_out_loss": []}
    history["attention_peak"] = [attention_peak(model, judged[0])]
    for step in range(STEPS):
        if step == 0 or fault != "same batch":
            x, y = _batch(fault, train, BATCH_SIZE, generator)
        rate = cosine_lr(
            step + 1,
            max_lr=LEARNING_RATE * (10 if fault == "learning rate too high" else 1),
            min_lr=0.0,
            warmup_steps=0 if fault == NO_WARM_UP else WARMUP_STEPS,
            cosine_steps=STEPS // 3 if fault == "schedule over too early" else STEPS,
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        if fault != "gradients not cleared":
            optimizer.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        history["loss"].append(loss.item())
        history["grad_norm"].append(clip_grad_norm(model.parameters(), MAX_GRAD_NORM).item())
        optimizer.step()
        if (step + 1) % EVAL_INTERVAL == 0:
            with torch.no_grad():
                history["held_out_loss"].append(model.loss(*judged).item())
    return history


def _batch(
    fault: str, tokens: np.ndarray, batch_size: int, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    x, y = get_batch(tokens, batch_size, SHAPE["context_length"], "cpu", generator=generator)
    return (x, x) if fault == "targets not shifted" else (x, y)


def unscale(config: ModelConfig) -> Callable:
    """A hook that makes queries √head_dim times as long, which undoes the division."""

    def hook(layer: Any, inputs: Any, qkv: Tensor) -> Tensor:
        queries, others = qkv.tensor_split([config.d_model], dim=-1)
        return torch.cat([queries * math.sqrt(config.head_dim), others], dim=-1)

    return hook


def attention_peak(model: TransformerLM, x: Tensor) -> float:
    """The share of its attention that a query gives to one key, on average, in the first layer."""
    # (texts, heads, queries, keys)
    weights = np.stack([attention_patterns(model, token_ids)[0] for token_ids in x.tolist()])
    # the first queries have too few keys to choose from
    return float(weights[:, :, 8:].max(-1).mean())


def story_tokens() -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens of stories to train on, of others held out, and the size of their vocabulary."""
    from lib.lessons.start.story import load_story_model

    _, tokenizer, _ = load_story_model("cpu")
    train, held_out = (
        np.array(tokenizer.encode("".join(generate_stories(num_bytes, split=split))))
        for split, num_bytes in (("train", 4_000_000), ("validation", 100_000))
    )
    return train, held_out, tokenizer.vocab_size


def record_broken_runs() -> Path:
    """Train each broken run on generated stories, and write their records."""
    train, held_out, vocab_size = story_tokens()
    RECORDS.unlink(missing_ok=True)
    for fault in (HEALTHY, NO_WARM_UP, *FAULTS.values()):
        history = train_with(fault, train, held_out, vocab_size)
        figures: dict[str, Any] = {"run": fault}
        figures |= {name: [round(value, 4) for value in values] for name, values in history.items()}
        settings = {"steps": STEPS, "batch_size": BATCH_SIZE, "learning_rate": LEARNING_RATE}
        append_record(RECORDS, new_record(figures, config=settings | SHAPE, seed=0))
    return RECORDS


def read_run(fault: str) -> dict[str, Any]:
    """Return the figures of the run with `fault`, a value of FAULTS, HEALTHY or NO_WARM_UP."""
    (found,) = (r["figures"] for r in read_records(RECORDS) if r["figures"]["run"] == fault)
    return found


def read_broken_runs() -> dict[str, dict[str, Any]]:
    """Return the figures of the runs that the notebook shows: HEALTHY, then a letter for each."""
    return {name: read_run(fault) for name, fault in ({HEALTHY: HEALTHY} | FAULTS).items()}
