"""The model of notebook 02, its parts named for profilers: a dict of weights, and `transformer`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from lib.model.config import ModelConfig


def rms_norm(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, theta):
    length, head_dim = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=x.device) / head_dim)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies  # (length, head_dim / 2)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def attention(x, w_q, w_k, w_v, w_out, num_heads, theta):
    head_dim, length = len(w_q) // num_heads, x.shape[1]

    def split(y):
        return y.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # (batch, heads, length, head_dim)

    q, k, v = rotate(split(x @ w_q.T), theta), rotate(split(x @ w_k.T), theta), split(x @ w_v.T)
    scores = q @ k.transpose(-2, -1) / math.sqrt(head_dim)
    visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(-2) @ w_out.T


def swiglu(x, w13, w2):
    gate, value = (x @ w13.T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * value) @ w2.T


def transformer(weights: dict[str, Tensor], tokens: Tensor, config: ModelConfig) -> Tensor:
    """Logits (batch, length, vocab_size) of token ids (batch, length)."""
    with record_function("embedding"):
        x = weights["token_embeddings.weight"][tokens]  # (batch, length, d_model)
    for i in range(config.num_layers):
        w = {name.removeprefix(f"layers.{i}."): weight for name, weight in weights.items()}
        w_q, w_k, w_v = w["attn.qkv_proj.weight"].chunk(3)
        w_out, shape = w["attn.output_proj.weight"], (config.num_heads, config.rope_theta)
        with record_function("attention"):
            x = x + attention(rms_norm(x, w["ln1.weight"]), w_q, w_k, w_v, w_out, *shape)
        with record_function("feed-forward"):
            x = x + swiglu(rms_norm(x, w["ln2.weight"]), w["ffn.w13.weight"], w["ffn.w2.weight"])
    with record_function("head"):
        return rms_norm(x, weights["ln_final.weight"]) @ weights["lm_head.weight"].T


def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor, config: ModelConfig) -> Tensor:
    """The mean cross-entropy of the tokens y that follow x, (batch, length) both."""
    logits = transformer(weights, x, config)
    with record_function("loss"):
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())
