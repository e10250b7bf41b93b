"""Answers to the exercises of notebook 09."""

import itertools

from lib.lessons.ddp.costs import sent_bytes
from lib.lessons.zero1 import exercises
from tests.lessons.answers.table import right, right_edit, wrong, wrong_edit

right(exercises.sent_bytes)(sent_bytes)


@right(exercises.shard_boundaries)
def padded_one_by_one(num_elements, ranks, alignment):
    total = num_elements
    while total % ranks or (total // ranks) % alignment:
        total += 1
    return list(itertools.pairwise(range(0, total + 1, total // ranks)))


# an impossible result is told from a bad one
BALANCED, SHARDS = exercises.balanced_owners, exercises.shard_boundaries
for answered, words, result in (
    (BALANCED, "owners: yours 0, expected", []),
    (BALANCED, "an owner must be a whole number, got 0.0; divide with //", [0.0]),
    (SHARDS, "a boundary must be a whole number, got 8.0; divide with", [(0, 8.0)]),
    (SHARDS, "position 0: yours 7, expected [0, ", [7]),
):
    wrong(answered, words)(lambda *_, result=result: result)


@wrong(exercises.balanced_owners, "parameters with an owner: yours 0, expected")
def owners_that_are_not_there(sizes, ranks):
    return [5] * len(sizes)


@wrong(exercises.reshard, "elements, from 0 on, got read(0, 0, 1000000)")
def reads_beyond_the_file(read, *_):
    return read(0, 0, 10**6)


# a larger epsilon is no rounding, another order of roundings is
wrong_edit(exercises.zero1_step, "", "1e-8", "1e-6")
right_edit(
    exercises.zero1_step,
    "mine - lr * m_hat / (v_hat.sqrt() + eps)",
    "mine - lr / (1 - beta1**step) * m / (v.sqrt() / (1 - beta2**step) ** 0.5 + eps)",
)
wrong_edit(
    exercises.zero1_step,
    "numbers",
    "state.update(m=m, v=v, step=step)",
    "state.update(m=m, v=v, step=step, old=m)",
)
