"""A small model trained with one fault at a time, for the broken runs of notebooks 03 and 12.

Ranks are models in one process, whose gradients are averaged as an all-reduce would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data import get_batch
from lib.data.stories import generate_stories
from lib.lessons.model.explorers import attention_patterns
from lib.model import ModelConfig, TransformerLM
from lib.model.transformer import CausalSelfAttention, RotaryEmbedding
from lib.optimizer import AdamW, clip_grad_norm, cosine_lr

# Sequences of a step, over all ranks.
STEPS, EVAL_INTERVAL, BATCH_SIZE, WARMUP_STEPS = 150, 10, 8, 15
LEARNING_RATE, MAX_GRAD_NORM = 0.005, 1.0
SHAPE = {"context_length": 64, "d_model": 128, "num_layers": 2, "num_heads": 4, "d_ff": 352}
HEALTHY = "healthy"
# No fault here: this model trains just as well without.
NO_WARM_UP = "no warm-up"
# Queries of the last tile of a kernel whose tiles have 48.
TILE = 48


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


KERNELS = {
    "no causal mask": without_mask,
    "last tile of queries never written": without_last_tile,
}


def unscale(config: ModelConfig) -> Callable:
    """A hook that makes queries √head_dim times as long, which undoes the division."""

    def hook(layer: Any, inputs: Any, qkv: Tensor) -> Tensor:
        queries, others = qkv.tensor_split([config.d_model], dim=-1)
        return torch.cat([queries * math.sqrt(config.head_dim), others], dim=-1)

    return hook


def make_ranks(fault: str, vocab_size: int, ranks: int) -> list[TransformerLM]:
    """The models of the ranks, with what is wrong with them."""
    config = ModelConfig(vocab_size=vocab_size, **SHAPE)
    models = []
    for rank in range(ranks):
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
    length, ahead = SHAPE["context_length"], 1 if fault == "targets two ahead" else 0
    x, y = get_batch(tokens, size, length + ahead, "cpu", generator=generator)
    if fault == "targets not shifted":
        return x, x
    return x[:, :length], y[:, ahead:]


def average(models: list[TransformerLM], fault: str) -> None:
    """An all-reduce of the gradients, right or with a fault."""
    if fault == "gradients not exchanged":
        return
    for parameters in zip(*(model.parameters() for model in models)):
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = sum(gradients) / (1 if fault == "gradients added, not averaged" else len(models))
        for gradient in gradients:
            gradient.copy_(total)


def train_with(
    fault: str,
    train: np.ndarray,
    held_out: np.ndarray,
    vocab_size: int,
    *,
    ranks: int = 1,
    held_out_seed: int = 1,
) -> dict[str, list[float]]:
    """Train with `fault`, HEALTHY or NO_WARM_UP.

    Returns:
        Of each step `loss`, `loss_of_rank_1` where there is one and `grad_norm` (before clipping),
        every EVAL_INTERVAL steps `held_out_loss` and `weight_gap` (the ranks' largest difference of
        a weight), in the end `loss_by_position` in eight parts of a sequence, and before the first
        step `attention_peak`.
    """
    models = make_ranks(fault, vocab_size, ranks)
    options: dict = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [AdamW(model.parameters(), **options) for model in models]
    same = fault == "both ranks read the same batches"
    draws = [np.random.default_rng(0 if same else rank) for rank in range(ranks)]
    judged = batch_of(fault, held_out, 32, np.random.default_rng(held_out_seed))
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
            batches = [batch_of(fault, train, BATCH_SIZE // ranks, draw) for draw in draws]
        rate = cosine_lr(
            step + 1,
            max_lr=LEARNING_RATE * (10 if fault == "learning rate too high" else 1),
            min_lr=0.0,
            warmup_steps=0 if fault == NO_WARM_UP else WARMUP_STEPS,
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
    pairs = zip(*(model.parameters() for model in (models[0], models[-1])))
    history["weight_gap"].append(max((a - b).abs().max().item() for a, b in pairs))


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
