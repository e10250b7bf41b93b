"""A plain recipe for TinyStories on a GPU: the small model of notebook 03's preset, in bfloat16."""

import itertools

import numpy as np
import torch

from lib.model import ModelConfig, TransformerLM
from lib.optimizer import AdamW, clip_grad_norm, cosine_lr

VOCAB_SIZE = 10_000


def recipe(race, seed):
    shape = ModelConfig(
        vocab_size=race.vocab_size, context_length=256,
        d_model=512, num_layers=4, num_heads=16, d_ff=1344,
    )  # fmt: skip
    weights = torch.Generator().manual_seed(seed)  # the same numbers on every device
    model = TransformerLM(shape, generator=weights).to(race.device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]  # of the norms: no weight decay
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    draws = np.random.default_rng(seed)
    for step in itertools.count(1):
        lr = cosine_lr(step, max_lr=3e-3, min_lr=1e-4, warmup_steps=200, cosine_steps=5000)
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = race.batch(256, shape.context_length, draws)
        with torch.autocast(race.device.type, torch.bfloat16):
            loss = model.loss(x, y)
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield model, x.numel()
