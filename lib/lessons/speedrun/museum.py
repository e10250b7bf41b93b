"""A museum of broken runs: a small model on two ranks, trained with one fault at a time.

`python -m lib lessons museum` trains them and records their symptoms in artifacts/museum.jsonl. The
two ranks are two models in one process, whose gradients are averaged as an all-reduce would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.core.files import ROOT
from lib.core.records import append_record, new_record, read_records
from lib.data import get_batch
from lib.lessons.training.broken import (
    EVAL_INTERVAL,
    HEALTHY,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    SHAPE,
    STEPS,
    WARMUP_STEPS,
    attention_peak,
    story_tokens,
    unscale,
)
from lib.model import ModelConfig, TransformerLM
from lib.model.transformer import CausalSelfAttention, RotaryEmbedding
from lib.optimizer import AdamW, clip_grad_norm, cosine_lr

RECORDS = ROOT / "artifacts/museum.jsonl"
RANKS, SEQUENCES_OF_RANK, LENGTH = 2, 4, SHAPE["context_length"]
# Queries of the last tile of a kernel whose tiles have 48.
TILE = 48
# Number of the exhibit -> what is wrong with it.
FAULTS = {
    1: "no causal mask",
    2: "gradients added, not averaged",
    3: "same batch",
    4: "last tile of queries never written",
    5: "schedule over too early",
    6: "gradients not exchanged",
    7: "targets two ahead",
    8: "scores not scaled",
    9: "both ranks read the same batches",
    10: "gradients not cleared",
    11: "embedding starts too large",
    12: "learning rate too high",
    13: "different initial weights",
    14: "targets not shifted",
}


class WithKernel(nn.Module):
    """An attention layer that computes softmax(q kᵀ / √d) v with a function of its own."""

    def __init__(self, layer: CausalSelfAttention, kernel: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.kernel = layer, kernel

    def forward(self, x: Tensor, rope: RotaryEmbedding, *rest: Any) -> Tensor:
        layer = self.layer
        qkv = layer.qkv_proj(x).unflatten(-1, (3, layer.num_heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)  # (batch, heads, length, head_dim) each
        return layer.output_proj(self.kernel(rope(q), rope(k), v).transpose(1, 2).flatten(-2))


def without_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query sees every key."""
    return F.scaled_dot_product_attention(q, k, v)


def without_last_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The grid has length // TILE programs: for a last, shorter tile of queries memory stays as it
    was, here with queries of an earlier step."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    full = q.shape[-2] // TILE * TILE
    return torch.cat([out[..., :full, :], 20 * q[..., full:, :].detach()], dim=-2)


KERNELS = {"no causal mask": without_mask, FAULTS[4]: without_last_tile}


def make_ranks(fault: str, vocab_size: int) -> list[TransformerLM]:
    """The models of the ranks, with what is wrong with them."""
    config = ModelConfig(vocab_size=vocab_size, **SHAPE)
    models = []
    for rank in range(RANKS):
        seed = rank if fault == "different initial weights" else 0
        model = TransformerLM(config, generator=torch.Generator().manual_seed(seed))
        if fault == "embedding starts too large":
            model.token_embeddings.weight.data.mul_(20)
            model.lm_head.weight.data.mul_(20)
        models.append(model)
        for layer in model.layers:
            if fault == "scores not scaled":
                layer.attn.qkv_proj.register_forward_hook(unscale(config))
    return models


def batch_of(
    fault: str, tokens: np.ndarray, size: int, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, with what is wrong with them."""
    ahead = 1 if fault == "targets two ahead" else 0
    x, y = get_batch(tokens, size, LENGTH + ahead, "cpu", generator=generator)
    if fault == "targets not shifted":
        return x, x
    return x[:, :LENGTH], y[:, ahead:]


def average(models: list[TransformerLM], fault: str) -> None:
    """An all-reduce of the gradients, right or with a fault."""
    if fault == "gradients not exchanged":
        return
    for parameters in zip(*(model.parameters() for model in models)):
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = sum(gradients) / (1 if fault == "gradients added, not averaged" else RANKS)
        for gradient in gradients:
            gradient.copy_(total)


def train_with(
    fault: str, train: np.ndarray, held_out: np.ndarray, vocab_size: int
) -> dict[str, list[float]]:
    """Train on two ranks with `fault`, a value of FAULTS, or HEALTHY.

    Returns:
        Of each step `loss`, `loss_of_rank_1` and `grad_norm` (before clipping), every EVAL_INTERVAL
        steps `held_out_loss` and `weight_gap` (the ranks' largest difference of a weight), in the
        end `loss_by_position` in eight parts of a sequence, and before the first step
        `attention_peak`.
    """
    models = make_ranks(fault, vocab_size)
    options: dict = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [AdamW(model.parameters(), **options) for model in models]
    same = fault == "both ranks read the same batches"
    draws = [np.random.default_rng(0 if same else rank) for rank in range(RANKS)]
    judged = batch_of(fault, held_out, 32, np.random.default_rng(9))
    names = ("loss", "loss_of_rank_1", "grad_norm", "held_out_loss", "weight_gap")
    history: dict[str, list[float]] = {name: [] for name in names}
    history["attention_peak"] = [attention_peak(models[0], judged[0])]
    for model in models:
        for layer in model.layers:
            if fault in KERNELS:
                layer.attn = WithKernel(layer.attn, KERNELS[fault])
    batches: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        if not batches or fault != "same batch":
            batches = [batch_of(fault, train, SEQUENCES_OF_RANK, draw) for draw in draws]
        rate = cosine_lr(
            step + 1,
            max_lr=LEARNING_RATE * (10 if fault == "learning rate too high" else 1),
            min_lr=0.0,
            warmup_steps=WARMUP_STEPS,
            cosine_steps=STEPS // 3 if fault == "schedule over too early" else STEPS,
        )
        for model, optimizer, (x, y), name in zip(models, optimizers, batches, names):
            if fault != "gradients not cleared":
                optimizer.zero_grad()
            loss = model.loss(x, y)
            loss.backward()
            history[name].append(loss.item())
        average(models, fault)
        for model, optimizer in zip(models, optimizers):
            norm = clip_grad_norm(model.parameters(), MAX_GRAD_NORM).item()
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        history["grad_norm"].append(norm)
        if (step + 1) % EVAL_INTERVAL == 0:
            judge(models, judged, history)
    with torch.no_grad():
        losses = F.cross_entropy(models[0](judged[0]).mT, judged[1], reduction="none")
    history["loss_by_position"] = losses.unflatten(1, (8, -1)).mean((0, 2)).tolist()
    return history


@torch.no_grad()
def judge(
    models: list[TransformerLM], judged: tuple[Tensor, Tensor], history: dict[str, list[float]]
) -> None:
    """Append the held-out loss of the first rank, and how far the ranks' weights are apart."""
    history["held_out_loss"].append(models[0].loss(*judged).item())
    pairs = zip(*(model.parameters() for model in models))
    history["weight_gap"].append(max((a - b).abs().max().item() for a, b in pairs))


def record_museum(path: Path = RECORDS) -> Path:
    """Train the healthy run and every broken one, and write their symptoms as records."""
    train, held_out, vocab_size = story_tokens()
    path.unlink(missing_ok=True)
    for fault in (HEALTHY, *FAULTS.values()):
        history = train_with(fault, train, held_out, vocab_size)
        figures: dict[str, Any] = {"run": fault}
        figures |= {name: [round(value, 4) for value in values] for name, values in history.items()}
        settings: dict = {"steps": STEPS, "ranks": RANKS, "batch_size": SEQUENCES_OF_RANK}
        settings["learning_rate"] = LEARNING_RATE
        append_record(path, new_record(figures, config=settings | SHAPE, seed=0))
    return path


def read_museum(path: Path = RECORDS) -> dict[int | str, dict[str, Any]]:
    """The symptoms of the healthy run and of each exhibit, by number."""
    runs = {record["figures"]["run"]: record["figures"] for record in read_records(path)}
    return {number: runs[fault] for number, fault in ({HEALTHY: HEALTHY} | FAULTS).items()}


def symptoms(runs: Mapping[int | str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The symptoms of runs as rows of a table."""
    rows = []
    for number, run in runs.items():
        others = zip(run["loss"], run["loss_of_rank_1"])
        by_position = run["loss_by_position"]
        rows.append(
            {
                "run": number,
                "first loss": run["loss"][0],
                "last loss": float(np.mean(run["loss"][-5:])),
                "held out": run["held_out_loss"][-1],
                "held out, last eighth of a sequence": by_position[-1],
                "median norm": float(np.median(run["grad_norm"])),
                "largest norm": max(run["grad_norm"]),
                "attention to one token": f"{run['attention_peak'][0]:.0%}",
                "ranks' losses differ by": float(np.mean([abs(a - b) for a, b in others])),
                "ranks' weights differ by": run["weight_gap"][-1],
            }
        )
    return rows


def show_museum(runs: Mapping[int | str, Mapping[str, Any]]) -> None:
    """Show the losses of every exhibit, with the healthy run in gray."""
    import matplotlib.pyplot as plt

    from lib.core.charts import lines
    from lib.core.figures import BLUE, GRAY, VERMILLION

    healthy = runs[HEALTHY]
    styles = {
        "healthy run": {"color": GRAY, "linewidth": 1},
        "training": {"color": BLUE, "linewidth": 1},
        "held out": {"color": VERMILLION, "linestyle": "--", "marker": ""},
    }
    figure, panels = plt.subplots(nrows=3, ncols=5, figsize=(10, 6), sharex=True, sharey=True)
    exhibits = {number: run for number, run in runs.items() if number != HEALTHY}
    for axes, (number, run) in zip(panels.flat, exhibits.items()):
        held_out = enumerate(run["held_out_loss"], start=1)
        losses = {"healthy run": healthy["loss"], "training": run["loss"]}
        losses["held out"] = {EVAL_INTERVAL * count: loss for count, loss in held_out}
        how: dict = {"xlabel": "step", "ylabel": "loss (nats)", "styles": styles, "legend": "none"}
        lines(losses, axes=axes, title=f"Exhibit {number}", ylim=(-0.3, 11), **how)
        axes.label_outer()
    for axes in panels.flat[len(exhibits) :]:
        axes.axis("off")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    plt.show()
