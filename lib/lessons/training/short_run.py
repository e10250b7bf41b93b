"""A plain training run of seconds, as the records of notebooks 02 and 03 are made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lib.data.batches import get_batch
from lib.data.prepare import TokenizeConfig, tokenize_corpus
from lib.data.token_array import load_token_array
from lib.model.transformer import TransformerLM
from lib.optimizer.adamw import clip_grad_norm
from lib.optimizer.schedule import cosine_lr
from lib.tokenizer.bpe import Tokenizer
from lib.training.evaluation import Evaluation, bytes_of_token, evaluate


def prepare_stories(eval_tokens: int) -> tuple[np.ndarray, Callable[[TransformerLM], Evaluation]]:
    """Make notebook 01's tokens; return those to train on, and what evaluates a model on others.

    Args:
        eval_tokens: how many held-out tokens a model is judged on.
    """
    from lib.lessons.show import progress_bar

    data = TokenizeConfig()
    tokenize_corpus(data, progress_bar=progress_bar)
    tokenizer = Tokenizer.load(data.output_dir)
    tokens, held_out = (
        load_token_array(data.output_dir / f"{part}.npy", tokenizer=tokenizer)
        for part in ("train", "validation")
    )

    def judge(model: TransformerLM) -> Evaluation:
        lengths = bytes_of_token(tokenizer)
        return evaluate(
            model, held_out, lengths, batch_size=32, device="cpu", max_tokens=eval_tokens
        )

    return tokens, judge


def train(
    model: TransformerLM,
    optimizer: torch.optim.Optimizer,
    tokens: np.ndarray,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    warmup_steps: int,
    seed: int,
) -> list[float]:
    """Train on random sequences of `tokens`, drawn with `seed`; return each step's loss.

    The rate climbs to `learning_rate`, and follows half a cosine down to a tenth of it.
    """
    generator, losses = np.random.default_rng(seed), []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = cosine_lr(
                step,
                max_lr=learning_rate,
                min_lr=learning_rate / 10,
                warmup_steps=warmup_steps,
                cosine_steps=steps,
            )
        length = model.config.context_length
        loss = model.loss(*get_batch(tokens, batch_size, length, "cpu", generator=generator))
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
