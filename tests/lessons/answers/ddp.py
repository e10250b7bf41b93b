"""Answers to the exercises of notebook 08."""

import functools

import torch

from lib.lessons.ddp import exercises
from lib.profiling.collectives import predicted_ms
from tests.lessons.answers.table import right, wrong

right(exercises.all_reduce_ms)(
    functools.wraps(predicted_ms)(functools.partial(predicted_ms, "all_reduce"))
)


def ring_of_slices(tensor, ranks, way):
    """Chunks of different lengths, to the next rank or to the one before."""
    n, me = ranks.count, way * ranks.number
    chunks = list(tensor.tensor_split(n))
    for step in range(2 * (n - 1)):
        out, into = (me - step) % n, (me - step - 1) % n
        ranks.send(chunks[out], (ranks.number + way) % n)
        arrived = ranks.receive((ranks.number - way) % n, like=chunks[into])
        chunks[into] = arrived + chunks[into] if step < n - 1 else arrived
    return torch.cat(chunks)


@right(exercises.ring)
def ring_to_the_next(tensor, ranks):
    return ring_of_slices(tensor, ranks, 1)


@right(exercises.ring)
def ring_to_the_one_before(tensor, ranks):
    return ring_of_slices(tensor, ranks, -1)


@wrong(exercises.ring, "rank 0, ranks that it sends to: yours 2, at most 1")
def by_way_of_rank_0(tensor, ranks):
    if ranks.number:
        ranks.send(tensor, 0)
        return ranks.receive(0, like=tensor)
    others = range(1, ranks.count)
    total = sum((ranks.receive(other, like=tensor) for other in others), tensor)
    for other in others:
        ranks.send(total, other)
    return total


@wrong(exercises.data_parallel, "return the function that ends a step, not None")
def returns_nothing(*given):
    return None


@wrong(exercises.add_hooks, "start takes the number of a bucket, got [")
def starts_a_bucket_itself(params, buckets, start):
    params[0].register_post_accumulate_grad_hook(lambda param: start(buckets[0]))
