"""Exercises of one sequence on several ranks; the solutions are in `lib.lessons.mesh.context`."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lib.lessons.differences import AtMost, Named
from lib.lessons.exercise import exercise
from lib.lessons.inputs import choices, ints
from lib.lessons.mesh import context
from lib.lessons.meters import load_dispatch
from lib.lessons.ranks import Threads, whole_numbers

# Merge two parts of a row


def partial_results(generator: random.Random, size: int) -> tuple[Tensor, ...]:
    """Two outputs with their log-sum-exps: small ones, large ones, and rows that see nothing."""
    torch_generator = torch.Generator().manual_seed(generator.getrandbits(32))
    rows = 1 + size // 3
    out, new_out = torch.randn(2, rows, 3, generator=torch_generator).mul(4).round().div(4)
    lse, new_lse = torch.randn(2, rows, 1, generator=torch_generator).mul(4).round().div(4)
    # both small, both large, or one so much larger that its exponential overflows beside the other
    shift, new_shift = generator.choice([(0, 0), (0, 0), (100, 100), (-100, 100), (100, -100)])
    if generator.random() < 0.25:
        new_out[-1], new_lse[-1] = 0.0, -math.inf
    return out, lse + shift, new_out, new_lse + new_shift


merge = exercise("warm-up", partial_results)(context.merge)
merge.mistakes = """
weight * out + new_weight * new_out => (out + new_out) / 2
    | the two outputs are averaged; a part with larger scores counts for more
weight * out + new_weight * new_out =>
    new_weight * out + weight * new_out
    | each output has the weight of the other
weight * out + new_weight * new_out =>
    torch.exp(lse) * out + torch.exp(new_lse) * new_out
    | the weights don't sum to 1; divide them by the sum of both parts
torch.logaddexp(lse, new_lse) => torch.log(torch.exp(lse) + torch.exp(new_lse))
    | the exponential of a log-sum-exp in the hundreds is infinite or 0; take the larger of the two
    out first
new_out, total => new_out, total - torch.maximum(lse, new_lse)
    | the larger log-sum-exp was subtracted, and is missing in what you return; add it again
torch.logaddexp(lse, new_lse) => torch.maximum(lse, new_lse)
    | the larger log-sum-exp is taken for that of both; the sums below the logarithm add up
"""


# The ring


def around_the_ring(ring: Callable, tokens: int, head_dim: int, ranks: Threads) -> Named:
    """Run a ring on one rank; return its results and the elements that it sends."""
    generator = random.Random(tokens + ranks.count)
    q, k, v = whole_numbers(generator, 3, tokens, head_dim).double() / 4
    # any tokens may be on a rank, so one that sees no key of another is tried, too
    order = torch.tensor(generator.sample(range(tokens), tokens))
    shares = [share.sort().values for share in order.chunk(ranks.count)]
    mine, passing = shares[ranks.number], counted_receipts(ranks)
    result = ring(q[mine], k[mine], v[mine], shares, ranks)
    if isinstance(result, Tensor):
        raise TypeError("return two tensors, the output and the log-sum-exps, got one")
    out, lse = result
    found = Named(out=out, lse=lse)
    sent_to = {rank for direction, rank in ranks.messages if direction == "to"}
    found["ranks that it sends to"] = AtMost(len(sent_to))
    found["elements that it sends"] = AtMost(ranks.elements_sent)
    # K and V that came, and those of the step before; a variable may refer to one more
    found["received tensors beyond five at once"] = AtMost(max(0, passing["most"] - 5))
    return found


def counted_receipts(ranks: Threads) -> dict[str, int]:
    """Count the received tensors that are still there; `most` is the most of them so far."""
    receive, alive, passing = ranks.receive, [], {"most": 0}

    def noted(source: int, like: Tensor) -> Tensor:
        tensor = receive(source, like)
        alive[:] = [one for one in alive if one() is not None] + [weakref.ref(tensor)]
        passing["most"] = max(passing["most"], len(alive))
        return tensor

    ranks.receive = noted  # type: ignore[method-assign]
    return passing


ring_attention = exercise(
    "core",
    {"tokens": choices(12, 24, 36), "head_dim": choices(2, 3), "ranks": choices(2, 3, 4)},
    harness=around_the_ring,
    ranks=True,
    collectives=("send",),
    processes=4,
    trials=24,
)(context.ring_attention)
ring_attention.mistakes = """
range(1, n) => range(1, n - 1)
    | there is one step too few: keys move on n - 1 times to be on every rank
(me - step) % n => (me + step) % n
    | keys move on to the next rank, so those that arrive in step s began s ranks before this one
shares[me][:, None] >= shares[(me - step) % n] => shares[me][:, None] >= shares[me]
    | the mask of this rank's own keys is used for all; it depends on whose keys have arrived
out, lse = merge(out, lse, *attend(q, k, v, visible)) =>
    new_out, lse = attend(q, k, v, visible); out = out + new_out
    | outputs are added up, each of which has been divided by a sum of its own; merge them
k, v = pass_on(k, ranks), pass_on(v, ranks) => new_k, new_v = pass_on(k, ranks), pass_on(v, ranks)
    && *attend(q, k, v, visible) => *attend(q, new_k, new_v, visible)
    | each rank sends its own keys again and again; pass on what has arrived
n, me = ranks.count, ranks.number => n, me, kept = ranks.count, ranks.number, []
    && visible = shares => kept += [k, v]; visible = shares
    | all shares are kept; merge each as it comes, so that a rank holds only what passes
"""


# Zigzag


def drawn_chunks(generator: random.Random, size: int) -> tuple[int, int, int]:
    """The tokens of a chunk, the width of a head, and the ranks."""
    load_dispatch()
    return generator.randint(1, 1 + size // 4), generator.choice([2, 3]), generator.randint(2, 4)


def around_in_zigzag(ring: Callable, chunk: int, head_dim: int, ranks: Threads) -> Named:
    """Run a zigzag ring on one rank; return its results, what it sends and what it computes."""
    generator = random.Random(chunk + ranks.count)
    q, k, v = whole_numbers(generator, 3, 2 * ranks.count * chunk, head_dim).double() / 4
    mine = context.zigzag(len(q), ranks.count)[ranks.number]
    with FlopCounterMode(display=False) as counter:
        result = ring(q[mine], k[mine], v[mine], ranks)
    if isinstance(result, Tensor):
        raise TypeError("return two tensors, the output and the log-sum-exps, got one")
    found = Named(out=result[0], lse=result[1])
    found["elements that it sends"] = AtMost(ranks.elements_sent)
    # a score and its part of the output are 2 · head_dim FLOPs each
    found["scores that it computes"] = AtMost(counter.get_total_flops() / 4 / head_dim)
    return found


zigzag_ring = exercise(
    "core",
    drawn_chunks,
    harness=around_in_zigzag,
    ranks=True,
    collectives=("send",),
    processes=4,
    trials=12,
)(context.zigzag_ring)
zigzag_ring.mistakes = """
(me - step) % n < me => (me - step) % n > me
    | the two cases are swapped: a lower rank's early chunk comes before all of your tokens
(me - step) % n < me => (me + step) % n < me
    | keys move on to the next rank, so those that arrive in step s began s ranks before this one
attend(q, k[:half], v[:half]) => attend(q, k[half:], v[half:])
    | a lower rank's late chunk is taken, which comes after all of your tokens; take its early one
attend(q[half:], k, v) => attend(q[:half], k, v)
    | your early queries are given a higher rank's keys, all of which come after them
late = merge(out[half:], lse[half:], *attend(q[half:], k, v)) => late = attend(q[half:], k, v)
    | what the late queries have so far is replaced by what they see now; merge them
out, lse = merge(out, lse, *attend(q, k[:half], v[:half])) =>
    out, lse = merge(out, lse, *attend(q, k, v, (torch.arange(len(k)) < half).expand(len(q), -1)))
    && late = merge(out[half:], lse[half:], *attend(q[half:], k, v)) =>
    seen = (torch.arange(len(q)) >= half)[:, None].expand(-1, len(k));
    late = [x[half:] for x in merge(out, lse, *attend(q, k, v, seen))]
    | hidden scores are computed and then masked; of a lower rank's keys halve the keys, of a higher
    rank's the queries
"""


# Sequence parallelism


def mlp_on_shares(mlp: Callable, rows: int, d_model: int, units: int, ranks: Threads) -> Named:
    """The output and gradients that a rank has, for its tokens and its hidden units."""
    n, me = ranks.count, ranks.number
    generator = random.Random(rows)
    x, grad_y = whole_numbers(generator, 2, n * rows, d_model)
    w1 = whole_numbers(generator, n * units, d_model)
    w2 = whole_numbers(generator, d_model, n * units)
    y, backward = mlp(x.chunk(n)[me], w1.chunk(n)[me], w2.chunk(n, dim=1)[me], ranks)
    grad_x, grad_w1, grad_w2 = backward(grad_y.chunk(n)[me])
    found = Named(y=y, grad_x=grad_x, grad_w1=grad_w1, grad_w2=grad_w2)
    # x may be gathered once more in backward instead of kept
    most = 5 * x.numel()
    found["elements that it gathers and scatters"] = AtMost(max(most, ranks.elements_exchanged))
    return found


sequence_parallel_mlp = exercise(
    "core",
    {
        "rows": ints(1, 4),
        "d_model": choices(2, 3),
        "units": choices(2, 3),
        "ranks": choices(2, 3, 4),
    },
    harness=mlp_on_shares,
    ranks=True,
    collectives=("all_gather", "reduce_scatter"),
    same_calls=False,
    processes=2,
    trials=24,
)(context.sequence_parallel_mlp)
sequence_parallel_mlp.mistakes = """
y = scatter(h.relu() @ w2.T) => y = (h.relu() @ w2.T).chunk(ranks.count)[ranks.number]
    | y is what this rank's hidden units give; those of the other ranks are to be added
return scatter(grad_h @ w1), => return (grad_h @ w1).chunk(ranks.count)[ranks.number],
    | the gradient of x is that of this rank's hidden units alone; add those of the other ranks
x = gather(x) =>
    | x is not gathered: this rank's hidden units need the tokens of all ranks
grad_y = gather(grad_y) =>
    | grad_y is not gathered: y was scattered, and the gradient of that is an all-gather
x = gather(x) => own, x = x, gather(x) && grad_h.T @ x => grad_h.T @ own
    | the gradient of w1 is taken with this rank's tokens; it needs all of them, as gathered
(grad_y @ w2) * (h > 0) => grad_y @ w2
    | the ReLU is missing in backward: where h was not above 0, no gradient passes
"""


# Experts


def exchanged(exchange: Callable, longest: int, d_model: int, ranks: Threads) -> Named:
    """Exchange parts of 0 to `longest` rows; return what a rank gets and sends."""
    generator = random.Random(100 * longest + ranks.number)
    rows = [generator.randint(0, longest) for _ in range(ranks.count)]
    # as the lesson's experts have them
    parts = [whole_numbers(generator, count, d_model).double() for count in rows]
    received = exchange(parts, ranks)
    found = Named({f"from rank {rank}": part for rank, part in enumerate(received)})
    found["elements that it sends"] = AtMost(ranks.elements_sent)
    return found


all_to_all = exercise(
    "optional",
    {"longest": ints(1, 4), "d_model": choices(1, 2), "ranks": choices(2, 3, 4)},
    harness=exchanged,
    ranks=True,
    collectives=("send",),
    processes=4,
    trials=24,
)(context.all_to_all)
all_to_all.mistakes = """
received[rank] = ranks.receive(rank, like=like) =>
    received[rank] = ranks.receive(rank, like=parts[rank])
    | you expect as many rows from a rank as you send to it; let it say how many there are
ranks.send(torch.tensor([len(parts[rank])]), rank) => pass
    && rows = ranks.receive(rank, like=torch.tensor([0])).item() => rows = len(parts[rank])
    | nobody says how many rows will come; send their number first
like=torch.tensor([0]) => like=torch.zeros(1)
    | a number of rows is sent as a whole number and received as a float; `like` has the dtype of
    what is sent
parts[rank].new_empty( => torch.empty(
    | rows are received in the default dtype; `like` has the dtype of what is sent
return received => return [received[rank] for rank in others]
    | your own part is missing; it stays on this rank, and belongs in the result
for rank in range(ranks.count) if rank != ranks.number => for rank in range(ranks.count)
    | a rank also sends to itself; that part need not go anywhere
"""
