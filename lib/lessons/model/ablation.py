"""Ablations of notebook 02: the same short training run with one thing changed, for three seeds.

`python -m lib lessons ablation` trains all of them and adds their losses to
artifacts/ablation.jsonl. An interrupted run continues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from lib.core.files import ROOT
from lib.core.records import append_record, new_record, read_records, remaining
from lib.data.batches import get_batch
from lib.data.prepare import TokenizeConfig, tokenize_corpus
from lib.data.token_array import load_token_array
from lib.lessons.show import progress_bar
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from lib.optimizer import AdamW, clip_grad_norm, cosine_lr
from lib.tokenizer.bpe import Tokenizer
from lib.training.evaluation import Evaluation, bytes_of_token, evaluate

RECORDS = ROOT / "artifacts/ablation.jsonl"
AS_BUILT = "as built"
SHAPE = ModelConfig(
    vocab_size=4096, context_length=64, d_model=96, num_layers=2, num_heads=4, d_ff=256
)
VARIANTS: dict[str, dict[str, Any]] = {
    AS_BUILT: {},
    "no positions": {"positions": "none"},
    "no norm": {"norm": "none"},
    "norm after each sum": {"norm": "post"},
    "no gate": {"feed_forward": "silu"},
    "one head": {"num_heads": 1},
    "RoPE with θ = 100": {"rope_theta": 100.0},
    "norm of q and k": {"qk_norm": True},
    "embedding is head": {"tied_embeddings": True},
}
SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class ShortTraining:
    """Settings of a training run of seconds."""

    steps: int = 500
    learning_rate: float = 1e-2
    warmup_steps: int = 100
    batch_size: int = 8


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of the record."""

    variant: str
    seed: int
    training: ShortTraining = ShortTraining()
    eval_tokens: int = 20_000


def prepare_stories() -> tuple[np.ndarray, Callable[[TransformerLM], Evaluation]]:
    """Make notebook 01's tokens; return those to train on, and what evaluates a model on others."""
    data = TokenizeConfig()
    tokenize_corpus(data, progress_bar=progress_bar)
    tokenizer = Tokenizer.load(data.output_dir)
    tokens, held_out = (
        load_token_array(data.output_dir / f"{part}.npy", tokenizer=tokenizer)
        for part in ("train", "validation")
    )

    def judge(model: TransformerLM) -> Evaluation:
        lengths, most = bytes_of_token(tokenizer), Run.eval_tokens
        return evaluate(model, held_out, lengths, batch_size=32, device="cpu", max_tokens=most)

    return tokens, judge


def train(
    shape: ModelConfig, tokens: np.ndarray, training: ShortTraining, seed: int
) -> tuple[TransformerLM, list[float]]:
    """Train a model of `shape` on random sequences of `tokens`; return it and each step's loss.

    The rate climbs, and follows half a cosine down to a tenth of its peak. `seed` selects the
    initial weights and the sequences.
    """
    model = TransformerLM(shape, device="cpu", generator=torch.Generator().manual_seed(seed))
    optimizer = AdamW(model.parameters())
    generator, losses = np.random.default_rng(seed), []
    size = (training.batch_size, shape.context_length)
    for step in range(1, training.steps + 1):
        rate = cosine_lr(
            step,
            max_lr=training.learning_rate,
            min_lr=training.learning_rate / 10,
            warmup_steps=training.warmup_steps,
            cosine_steps=training.steps,
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model.loss(*get_batch(tokens, *size, "cpu", generator=generator))
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def run_ablations() -> Path:
    """Train every variant with every seed that has no record yet; return the records' path."""
    tokens, judge = prepare_stories()
    runs = [Run(variant, seed) for variant in VARIANTS for seed in SEEDS]
    for run in remaining(runs, read_records(RECORDS)):
        shape = dataclasses.replace(SHAPE, **VARIANTS[run.variant])
        model, _ = train(shape, tokens, run.training, run.seed)
        result = judge(model)
        losses = {"loss": result.loss, "bits_per_byte": result.bits_per_byte}
        figures = {name: round(value, 4) for name, value in losses.items()}
        append_record(RECORDS, new_record(figures, config=run, seed=run.seed))
        print(f"{run.variant}, seed {run.seed}: {result.loss:.3f} nats")
    return RECORDS


def recorded_costs() -> list[dict[str, Any]]:
    """Return what each variant adds to the loss of the model as built, seed by seed, dearest first.

    Returns:
        Rows with `variant`, `costs` in nats per token, one for each seed, and their `mean`.
    """
    losses: dict[tuple[str, int], float] = {}
    for record in read_records(RECORDS):
        run = record["config"]
        losses[run["variant"], run["seed"]] = record["figures"]["loss"]
    rows = []
    for variant in VARIANTS:
        if variant != AS_BUILT:
            costs = [losses[variant, seed] - losses[AS_BUILT, seed] for seed in SEEDS]
            rows.append({"variant": variant, "costs": costs, "mean": mean(costs)})
    return sorted(rows, key=lambda row: -row["mean"])
