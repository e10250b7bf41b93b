"""How well a model predicts a text: loss, perplexity, and bits per byte."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from lib.data import take_windows
from lib.distributed import current_device, rank, world_size
from lib.model import TransformerLM

if TYPE_CHECKING:
    from lib.tokenizer import Tokenizer

# Tokens that are counted at a time, so that a memory-mapped array is never in memory as a whole.
CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text."""

    loss: float
    """Mean cross-entropy of a target, in nats."""

    perplexity: float
    """exp(loss)."""

    bits_per_byte: float
    """The loss of all targets, in bits, by the bytes of their text.

    Unlike the loss it can be compared between tokenizers. A special token counts no bytes, though
    its loss counts: the model pays for saying where a document ends and gets no text for it.
    """

    tokens: int
    """How many targets were predicted."""

    bytes: int
    """How many bytes of text they stand for."""


def evaluate(
    model: TransformerLM,
    tokens: np.ndarray,
    bytes_of_token: np.ndarray,
    *,
    batch_size: int,
    device: torch.device | str,
    max_tokens: int = 0,
    autocast: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> Evaluation:
    """Predict each of `tokens` but the first once, in windows that do not overlap, in order.

    A window sees nothing of the ones before. The last one may be shorter and is a batch of its own.
    The model is in evaluation mode meanwhile and afterwards as it was. Ranks deal the batches out
    among themselves, and each gets what one process alone would.

    Args:
        model: has `config.context_length` and `loss(x, y)`, the mean in nats.
        tokens: (num_tokens,), any integer type; may be memory-mapped.
        bytes_of_token: (vocab_size,) int64, from the function of that name.
        batch_size: windows at a time.
        max_tokens: at most so many targets, from the start; 0: all.
        autocast: the dtype of matrix products; None or float32: that of the model's weights.
        group: the ranks that evaluate together, all of which must call it; all by default.

    Raises:
        ValueError: fewer than 2 tokens, `batch_size` less than 1, `max_tokens` less than 0, or a
            token id beyond `bytes_of_token`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; right is: at least 1")
    tokens = _with_targets(tokens, max_tokens)
    counts = _count_tokens(tokens[1:], len(bytes_of_token))
    batches = _batches(len(tokens) - 1, model.config.context_length, batch_size)
    device = torch.device(device)
    # one host synchronisation at the end instead of one a batch; MPS has no float64
    means = torch.zeros(len(batches), dtype=torch.float32, device=device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # not inference_mode: a tensor that a compiled model keeps from there (a cached cast, say)
        # can never be used in training again
        with torch.no_grad(), _autocast(device, autocast):
            for index in range(rank(group), len(batches), world_size(group)):
                starts, length = batches[index]
                means[index] = model.loss(*take_windows(tokens, starts, length, device))
    finally:
        for module, is_training in modes:
            module.training = is_training
    if world_size(group) > 1:
        # each mean comes from one rank, and the others' zeros change no bit of it
        means = means.to(current_device(group))
        dist.all_reduce(means, group=group)
    sizes = torch.tensor([len(starts) * length for starts, length in batches], dtype=torch.float64)
    total = (means.cpu().double() * sizes).sum()
    loss = total / (len(tokens) - 1)
    return Evaluation(
        loss=loss.item(),
        perplexity=loss.exp().item(),
        bits_per_byte=_bits_per_byte(total.item(), counts, bytes_of_token),
        tokens=len(tokens) - 1,
        bytes=int(counts @ bytes_of_token),
    )


def bytes_of_token(tokenizer: Tokenizer) -> np.ndarray:
    """How many bytes of text each id stands for: (vocab_size,) int64; special tokens for none."""
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    special = set(tokenizer.special_tokens.values())
    for token_id, token in tokenizer.vocab.items():
        lengths[token_id] = 0 if token_id in special else len(token)
    return lengths


def unigram_bits_per_byte(
    train_tokens: np.ndarray,
    tokens: np.ndarray,
    bytes_of_token: np.ndarray,
    *,
    max_tokens: int = 0,
) -> float:
    """Bits per byte of a model that knows only how frequent each token is: what any must beat.

    Frequencies come from `train_tokens`, each count plus one (Laplace's rule), so that no token is
    impossible. The targets are those of `evaluate` with the same `tokens` and `max_tokens`.

    Raises:
        ValueError: as `evaluate`.
    """
    tokens = _with_targets(tokens, max_tokens)
    seen = _count_tokens(train_tokens, len(bytes_of_token)) + 1
    counts = _count_tokens(tokens[1:], len(bytes_of_token))
    total = counts @ -np.log(seen / seen.sum())
    return _bits_per_byte(float(total), counts, bytes_of_token)


def _with_targets(tokens: np.ndarray, max_tokens: int) -> np.ndarray:
    """The tokens that are read: the first, which is only seen, and the targets."""
    if len(tokens) < 2:
        raise ValueError(f"tokens has {len(tokens)}; right is: at least 2, one to predict another")
    if max_tokens < 0:
        raise ValueError(f"max_tokens is {max_tokens}; right is: 0 (all) or more")
    return tokens[: max_tokens + 1] if max_tokens else tokens


def _batches(
    num_targets: int, context_length: int, batch_size: int
) -> list[tuple[np.ndarray, int]]:
    """(where its windows start, how long they are) for each batch."""
    num_windows, rest = divmod(num_targets, context_length)
    starts = np.arange(num_windows) * context_length
    batches = [
        (starts[i : i + batch_size], context_length) for i in range(0, len(starts), batch_size)
    ]
    if rest:
        batches.append((np.array([num_windows * context_length]), rest))
    return batches


def _autocast(device: torch.device, dtype: torch.dtype | None):
    return nullcontext() if dtype in (None, torch.float32) else torch.autocast(device.type, dtype)


def _count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id occurs: (vocab_size,) int64."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS].astype(np.int64)
        found = np.bincount(chunk, minlength=vocab_size)
        if len(found) > vocab_size:
            raise ValueError(
                f"bytes_of_token has {vocab_size:,} entries, but tokens has the id "
                f"{len(found) - 1:,}; right is: the table of the tokenizer that made the tokens"
            )
        counts += found
    return counts


def _bits_per_byte(nats: float, counts: np.ndarray, bytes_of_token: np.ndarray) -> float:
    num_bytes = int(counts @ bytes_of_token)
    # targets that are all special tokens have no text
    return nats / math.log(2) / num_bytes if num_bytes else math.inf
