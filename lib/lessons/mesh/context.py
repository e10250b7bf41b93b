"""One sequence on several ranks: ring attention, zigzag, sequence parallelism, experts.

`ranks` is a rank of several as exercises have it (`lib.lessons.ranks`): `number` of `count`, with
`send(tensor, to)`, which doesn't wait, `receive(source, like)`, and collectives of flat tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lib.lessons.ranks import Threads, run_on_threads

# Context parallelism


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The attention of queries to some of their keys, and the log-sum-exp of each row of scores.

    Args:
        q: (..., queries, head_dim).
        k, v: (..., keys, head_dim).
        visible: (queries, keys), whether a query sees a key; all by default.

    Returns:
        out: like q; 0 where a query sees none of the keys.
        lse: (..., queries, 1); -inf where a query sees none of the keys.
    """
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (..., queries, keys)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    # nan in rows that see nothing
    weights = scores.softmax(-1).nan_to_num(0.0)
    return weights @ v, lse


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention to two sets of keys, from the attention to each and its log-sum-exp.

    Every query sees at least one key of the first set.
    """
    total = torch.logaddexp(lse, new_lse)  # (..., queries, 1)
    # exp(lse - total), but not by way of a rounded total
    weight, new_weight = torch.sigmoid(lse - new_lse), torch.sigmoid(new_lse - lse)
    return weight * out + new_weight * new_out, total


def pass_on(tensor: Tensor, ranks: Any) -> Tensor:
    """Send a tensor to the next rank of the ring; return that of the rank before."""
    ranks.send(tensor, (ranks.number + 1) % ranks.count)
    return ranks.receive((ranks.number - 1) % ranks.count, like=tensor)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, shares: Sequence[Tensor], ranks: Any
) -> tuple[Tensor, Tensor]:
    """Causal attention of this rank's queries to the keys of all ranks, and its log-sum-exps.

    Args:
        q, k, v: (..., tokens / ranks, head_dim), of this rank's tokens.
        shares: the numbers of the tokens of each rank.
    """
    n, me = ranks.count, ranks.number
    out, lse = attend(q, k, v, shares[me][:, None] >= shares[me])
    for step in range(1, n):
        k, v = pass_on(k, ranks), pass_on(v, ranks)
        visible = shares[me][:, None] >= shares[(me - step) % n]
        out, lse = merge(out, lse, *attend(q, k, v, visible))
    return out, lse


def zigzag(tokens: int, ranks: int) -> list[Tensor]:
    """The numbers of the tokens that each rank holds: one chunk from each end of the sequence.

    `tokens` is a multiple of 2 · `ranks`.
    """
    chunks = torch.arange(tokens).chunk(2 * ranks)
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)]


def zigzag_ring(q: Tensor, k: Tensor, v: Tensor, ranks: Any) -> tuple[Tensor, Tensor]:
    """As `ring_attention` with the shares of `zigzag`, without the scores of hidden halves.

    Args:
        q, k, v: (tokens / ranks, head_dim), of this rank's two chunks.
    """
    n, me, half = ranks.count, ranks.number, len(q) // 2
    out, lse = attend(q, k, v, torch.ones(len(q), len(q), dtype=torch.bool).tril())
    for step in range(1, n):
        k, v = pass_on(k, ranks), pass_on(v, ranks)
        if (me - step) % n < me:
            # their early chunk is before all queries, their late one after
            out, lse = merge(out, lse, *attend(q, k[:half], v[:half]))
        else:
            # the late queries are after all keys, the early ones before
            late = merge(out[half:], lse[half:], *attend(q[half:], k, v))
            out, lse = torch.cat([out[:half], late[0]]), torch.cat([lse[:half], late[1]])
    return out, lse


def on_a_ring(
    forward: Callable, backward: Callable, inputs: Sequence[Tensor], shares: Sequence[Tensor]
) -> tuple[list[Tensor], tuple[int, int]]:
    """Run ring attention on threads as ranks.

    Args:
        forward: as `ring_attention`.
        backward: (q, k, v, out, lse, grad_out, shares, ranks) -> gradients of this rank's q, k, v.
        inputs: q, k, v and the gradient of the output, (..., tokens, head_dim) each.

    Returns:
        the output and the gradients of q, k and v, in the order of the tokens; and the elements
        that a rank sends forward and backward.
    """

    def run(ranks: Threads) -> tuple:
        q, k, v, grad_out = (x[..., shares[ranks.number], :] for x in inputs)
        out, lse = forward(q, k, v, shares, ranks)
        sent = ranks.elements_sent
        grads = backward(q, k, v, out, lse, grad_out, shares, ranks)
        return out, *grads, (sent, ranks.elements_sent - sent)

    *parts, sent = zip(*run_on_threads(run, len(shares)))
    order = torch.cat([*shares]).argsort()
    return [torch.cat(part, -2)[..., order, :] for part in parts], sent[0]


def in_one_process(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    """PyTorch's causal attention of a whole sequence, and the gradients of q, k and v."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    # with four dimensions it is the fused kernel, which keeps log-sum-exps as a ring does
    whole = [x[(None,) * (4 - x.ndim)] for x in (q, k, v)]
    out = scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True).view(q.shape)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]


def rounding_errors(
    forward: Callable,
    backward: Callable,
    shares: Sequence[Tensor],
    size: Sequence[int] = (96, 16),
    scale: float = 1.0,
    draws: int = 5,
) -> dict[str, Tensor]:
    """Root mean square errors of O, dQ, dK and dV in float32, (4,), of a `ring` and of `PyTorch`.

    Args:
        forward, backward: as in `on_a_ring`.
        size: of q, k, v and the gradient of the output, which are normal numbers times `scale`.
        draws: of inputs, over which the errors' mean is taken.
    """
    squares: dict[str, list[Tensor]] = {"ring": [], "PyTorch": []}
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        inputs = scale * torch.randn(4, *size, dtype=torch.float64, generator=generator)
        exact, rounded = in_one_process(*inputs), [*inputs.float()]
        found = {"ring": on_a_ring(forward, backward, rounded, shares)[0]}
        found["PyTorch"] = in_one_process(*rounded)
        for name, tensors in found.items():
            off = [(a - b).square().mean() for a, b in zip(tensors, exact)]
            squares[name].append(torch.stack(off))
    return {name: torch.stack(found).mean(0).sqrt() for name, found in squares.items()}


# Sequence parallelism


def sequence_parallel_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, ranks: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """relu(x W1ᵀ) W2ᵀ of this rank's tokens, with a share of the hidden units on each rank.

    Args:
        x: (tokens / ranks, d_model), this rank's tokens.
        w1: (d_ff / ranks, d_model), this rank's rows: column-parallel.
        w2: (d_model, d_ff / ranks), this rank's columns: row-parallel.

    Returns:
        y: like x; and backward(grad_y) -> the gradients of x, w1 and w2, each of this rank's part.
    """
    d_model = x.shape[1]

    def gather(rows):
        return ranks.all_gather(rows.flatten()).view(-1, d_model)

    def scatter(rows):
        return ranks.reduce_scatter(rows.flatten()).view(-1, d_model)

    # forward
    x = gather(x)  # (tokens, d_model)
    h = x @ w1.T  # (tokens, d_ff / ranks)
    y = scatter(h.relu() @ w2.T)

    def backward(grad_y):
        grad_y = gather(grad_y)
        grad_h = (grad_y @ w2) * (h > 0)
        return scatter(grad_h @ w1), grad_h.T @ x, grad_y.T @ h.relu()

    return y, backward


# Experts


def all_to_all(parts: Sequence[Tensor], ranks: Any) -> list[Tensor]:
    """Send `parts[r]` to each rank r; return what each rank sent to this one, in order.

    `parts`: one for each rank, (rows, d_model), whose rows may differ.
    """
    others = [rank for rank in range(ranks.count) if rank != ranks.number]
    for rank in others:
        ranks.send(torch.tensor([len(parts[rank])]), rank)
        ranks.send(parts[rank], rank)
    received = list(parts)  # its own stays
    for rank in others:
        rows = ranks.receive(rank, like=torch.tensor([0])).item()
        like = parts[rank].new_empty(rows, parts[rank].shape[1])
        received[rank] = ranks.receive(rank, like=like)
    return received


def toy_experts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """64 tokens, a router of four experts, and the two matrices of each; float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = (64, 16), (4, 16), (4, 24, 16), (4, 16, 24)
    x, router, w1, w2 = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return x, router, w1, w2
