"""How well a model predicts a text: loss, perplexity, and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.settings import require
from lib.data.batches import take_sequences
from lib.ddp.process_group import agree, current_device, on_each_rank, rank, world_size
from lib.model.transformer import TransformerLM
from lib.training.parallelism import Parallel

if TYPE_CHECKING:
    from lib.tokenizer.bpe import Tokenizer

# Tokens counted at a time, so that a memory-mapped array is never loaded as a whole.
CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Evaluation:
    """The quality of a model's predictions of a text."""

    loss: float
    """Mean cross-entropy per target, in nats."""

    perplexity: float
    """exp(loss)."""

    bits_per_byte: float
    """The loss of all targets in bits, divided by the bytes of their text.

    Unlike the loss it can be compared between tokenizers. A special token has no bytes, but its
    loss counts: the model pays for predicting where a document ends and gets no text for it.
    """

    tokens: int
    """Number of targets."""

    bytes: int
    """Number of bytes of their text."""


def evaluate(
    model: TransformerLM | Parallel,
    tokens: np.ndarray,
    bytes_of_token: np.ndarray,
    *,
    batch_size: int,
    device: torch.device | str,
    max_tokens: int = 0,
) -> Evaluation:
    """Predict each of `tokens` but the first once, in sequences that do not overlap, in order.

    A sequence sees nothing of those before it. The last one may be shorter and is a batch of its
    own. The model is in eval mode meanwhile. Ranks split the batches, and each gets the result that
    a single process would. All make the same number of forward passes.

    Args:
        model: with `config.context_length` and `loss(x, y)`, the mean in nats; or a model in
            training, of which FSDP gathers a block at a time.
        tokens: (num_tokens,), any integer type; may be memory-mapped.
        bytes_of_token: (vocab_size,) int64, from the function of that name.
        batch_size: sequences at a time.
        max_tokens: limit on the number of targets, from the start; 0: all.

    Raises:
        ValueError: an argument is wrong, or differs between ranks; as any error of one rank, it is
            raised on all. Only a forward pass that all ranks make together ends the rank on which
            it fails.
    """

    def checked() -> tuple[np.ndarray, np.ndarray, list]:
        require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
        read = _with_targets(tokens, max_tokens)
        counts = _count_tokens(read[1:], len(bytes_of_token))
        return read, counts, _batches(len(read) - 1, model.config.context_length, batch_size)

    def losses_here() -> Tensor:
        with in_eval_mode(module):
            return _mean_losses(model, read, batches, device)

    read, counts, batches = on_each_rank(checked)
    module: nn.Module
    if isinstance(model, Parallel):
        # the weights of the last step
        model.gather()
        module, is_divided = model.module, model.is_divided
    else:
        module, is_divided = model, False
    if world_size() > 1:
        agree(lambda: {"number of batches": str(len(batches))})
    # a rank that failed in the middle of a pass could not tell the others, which wait for it there
    means = losses_here() if is_divided else on_each_rank(losses_here)
    if world_size() > 1:
        # exact: each mean comes from one rank, and the others add zeros
        means = means.to(current_device())
        dist.all_reduce(means)
    # on the CPU whatever the default device is
    sizes = [len(starts) * length for starts, length in batches]
    sizes = torch.tensor(sizes, dtype=torch.float64, device="cpu")
    total = (means.cpu().double() * sizes).sum()
    num_targets = int(sizes.sum())
    loss = total / num_targets
    return Evaluation(
        loss=loss.item(),
        perplexity=loss.exp().item(),
        bits_per_byte=_bits_per_byte(total.item(), counts, bytes_of_token),
        tokens=num_targets,
        bytes=int(counts @ bytes_of_token),
    )


def _mean_losses(
    model: TransformerLM | Parallel,
    tokens: np.ndarray,
    batches: list[tuple[np.ndarray, int]],
    device: torch.device | str,
) -> Tensor:
    """The mean loss of each of this rank's batches, 0 for those of other ranks: (batches,)."""
    # one synchronization at the end instead of one per batch; MPS has no float64
    means = torch.zeros(len(batches), dtype=torch.float32, device=device)
    # not inference_mode: tensors that a compiled model caches there could never be used in training
    # again
    with torch.no_grad():
        for first in range(0, len(batches), world_size()):
            # in the last round, a rank without a batch of its own takes part all the same
            index = min(first + rank(), len(batches) - 1)
            starts, length = batches[index]
            loss = model.loss(*take_sequences(tokens, starts, length, device))
            if index == first + rank():
                means[index] = loss
    return means


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into eval mode for the block; afterwards each module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def bytes_of_token(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text of each token id, 0 for special tokens: (vocab_size,) int64."""
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
    """Bits per byte of a model that has only token frequencies: the baseline for any model.

    Frequencies come from `train_tokens`, each count plus one (Laplace smoothing), so that no token
    is impossible. The targets are those of `evaluate` with the same `tokens` and `max_tokens`.
    """
    tokens = _with_targets(tokens, max_tokens)
    seen = _count_tokens(train_tokens, len(bytes_of_token)) + 1
    counts = _count_tokens(tokens[1:], len(bytes_of_token))
    total = counts @ -np.log(seen / seen.sum())
    return _bits_per_byte(float(total), counts, bytes_of_token)


def _with_targets(tokens: np.ndarray, max_tokens: int) -> np.ndarray:
    """The tokens that are read: the first, which is only an input, and the targets."""
    is_row = isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in "iu"
    kind = type(tokens).__name__
    require(is_row, f"tokens must be a one-dimensional NumPy array of integers, got {kind}")
    require(len(tokens) >= 2, f"tokens must have at least 2 ids, got {len(tokens)}")
    require(max_tokens >= 0, f"max_tokens must be at least 0, got {max_tokens}")
    return tokens[: max_tokens + 1] if max_tokens else tokens


def _batches(
    num_targets: int, context_length: int, batch_size: int
) -> list[tuple[np.ndarray, int]]:
    """(starts of the sequences, their length) of each batch."""
    num_sequences, rest = divmod(num_targets, context_length)
    starts = np.arange(num_sequences) * context_length
    batches = [
        (starts[i : i + batch_size], context_length) for i in range(0, len(starts), batch_size)
    ]
    if rest:
        batches.append((np.array([num_sequences * context_length]), rest))
    return batches


def _count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id occurs: (vocab_size,) int64."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS].astype(np.int64)
        found = np.bincount(chunk, minlength=vocab_size)
        if len(found) > vocab_size:
            raise ValueError(
                f"bytes_of_token must have an entry for every id in tokens, got {vocab_size:,} "
                f"entries and the id {len(found) - 1:,}; they are of different tokenizers"
            )
        counts += found
    return counts


def _bits_per_byte(nats: float, counts: np.ndarray, bytes_of_token: np.ndarray) -> float:
    num_bytes = int(counts @ bytes_of_token)
    # targets that are all special tokens have no text
    return nats / math.log(2) / num_bytes if num_bytes else math.inf
