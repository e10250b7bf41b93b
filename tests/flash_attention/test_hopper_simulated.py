"""The attention kernels for Hopper against the formula, in a simulator: no GPU, no Triton.

Whatever the order in which threads run and copies arrive, results are right, and there is no race
and no hang.
"""

import dataclasses
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.flash_attention.cases import Case, formula, make_inputs, new_memory_is_nan, rotated
from tests.flash_attention.hopper_simulator import simulated

SIZES = [(1, 1), (1, 300), (300, 1), (63, 65), (65, 63), (193, 191), (256, 256), (64, 129)]
LONGEST = 400
# narrower than the tiles, which then end in zeros
HEAD_DIM = 16
# results leave through tiles of operands, and two warpgroups share the keys
WIDE = 136
SCALE = 0.3


def assert_forward_is_right(case: Case, kernels: SimpleNamespace, schedule: tuple) -> None:
    q, k, v, _ = (x.detach() for x in make_inputs(case, torch.float64))
    with new_memory_is_nan():
        out, lse = kernels.flash_forward(
            q, k, v, case.is_causal, SCALE, schedule=kernels.Schedule(*schedule)
        )
    right_out, right_lse = formula(q, k, v, case)
    assert_close(out, right_out)
    # kept in float32
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-6, atol=1e-6)


def assert_backward_is_right(
    case: Case, kernels: SimpleNamespace, schedules: tuple[tuple, ...], is_rotated: bool = False
) -> None:
    *leaves, grad_out = make_inputs(case, torch.float64)
    angles = torch.zeros(max(case.queries, case.keys), case.head_dim // 2, dtype=torch.float64)
    if is_rotated:
        angles = torch.rand(angles.shape, generator=torch.Generator().manual_seed(1)).double() * 6
    q, k, v = rotated(leaves[0], angles), rotated(leaves[1], angles), leaves[2]
    out, lse = formula(q, k, v, case)
    right = torch.autograd.grad(out, leaves, grad_out)
    tensors = (grad_out, *(x.detach() for x in (q, k, v, out, lse)))
    settings = {"angles": (angles.cos(), angles.sin()) if is_rotated else None}
    of_kernels = tuple(kernels.Schedule(*schedule) for schedule in schedules)
    with new_memory_is_nan():
        settings |= {"schedules": of_kernels}
        grads = kernels.flash_backward(*tensors, case.is_causal, SCALE, **settings)
    for ours, theirs in zip(grads, right):
        assert_close(ours, theirs)


def assert_close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


def draw_case(rng: random.Random, is_causal: bool) -> Case:
    queries, keys = rng.choice([*SIZES, (rng.randint(1, LONGEST), rng.randint(1, LONGEST))])
    key_heads = rng.choice([1, 2])
    heads = key_heads * rng.choice([1, 2, 3])
    layout = rng.choice(["heads first", "tokens first", "amid NaN"])
    batch = rng.choice([1, 2])
    return Case(queries, keys, HEAD_DIM, is_causal, heads, key_heads, batch, SCALE, layout)


def drawn(seed: int, is_causal: bool) -> tuple[random.Random, Case, SimpleNamespace]:
    """The generator after its first draws, a case, and kernels for few programs."""
    rng = random.Random(seed)
    multiprocessors = rng.choice([1, 2, 5])
    return rng, draw_case(rng, is_causal), simulated(seed, multiprocessors=multiprocessors)


def of_seeds(number: int, slow: int):
    """Each mask, number of warpgroups and kind of grid, with a few seeds and many slow ones."""
    kinds = list(itertools.product([True, False], [2, 3], [True, False]))
    cases = [(i, *kinds[i % len(kinds)]) for i in range((number + slow) * len(kinds))]
    marks = [()] * number * len(kinds) + [pytest.mark.slow] * slow * len(kinds)
    params = [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks)]
    return pytest.mark.parametrize(("seed", "is_causal", "warpgroups", "is_persistent"), params)


@of_seeds(2, slow=40)
def test_forward(seed, is_causal, warpgroups, is_persistent):
    rng, case, kernels = drawn(seed, is_causal)
    stages, is_ordered, is_kept = rng.choice([2, 3, 4]), rng.random() < 0.5, rng.random() < 0.5
    schedule = (warpgroups, rng.choice([64, 128]), stages, is_ordered, is_persistent, is_kept)
    assert_forward_is_right(case, kernels, schedule)


@of_seeds(2, slow=40)
def test_backward(seed, is_causal, warpgroups, is_persistent):
    rng, case, kernels = drawn(seed, is_causal)
    of_queries, of_keys = (
        (groups, 64, rng.choice(stages), False, is_persistent, rng.random() < 0.5)
        for groups, stages in ((warpgroups, [3, 4]), (2, [2, 3, 4]))
    )
    assert_backward_is_right(case, kernels, (of_queries, of_keys), is_rotated=rng.random() < 0.5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))]
)
def test_wide_heads(seed, is_causal):
    rng, case, kernels = drawn(seed, is_causal)
    case = dataclasses.replace(case, head_dim=WIDE)
    assert_forward_is_right(case, kernels, kernels.forward_schedule(WIDE))
    schedules = [
        schedule._replace(is_persistent=rng.random() < 0.7)
        for schedule in kernels.backward_schedules(WIDE)
    ]
    assert_backward_is_right(case, kernels, tuple(schedules), is_rotated=rng.random() < 0.5)


def test_the_diagonal_of_wide_heads_goes_through_two_tiles_of_keys():
    case = Case(200, 150, WIDE, heads=4, key_heads=2, batch=1, scale=SCALE)
    kernels = simulated(0)
    assert_backward_is_right(case, kernels, kernels.backward_schedules(WIDE))


@pytest.mark.parametrize(
    ("sizes", "is_causal"), [((63, 63), True), ((70, 150), False), ((200, 70), True)], ids=str
)
def test_a_key_of_minus_infinity_has_no_gradient(sizes, is_causal):
    case = Case(*sizes, HEAD_DIM, is_causal, batch=1, scale=SCALE)
    q, k, v, grad_out = (x.detach().abs() for x in make_inputs(case, torch.float64))
    hidden, seen = 2, torch.arange(case.keys) != 2
    k[:, :, hidden] = -torch.inf
    # as of one that is finite
    leaves = [x.requires_grad_() for x in (k.clamp(min=-1e9), v.clone())]
    right_out, lse = formula(q, *leaves, case)
    kernels = simulated(0)
    with new_memory_is_nan():
        out, _ = kernels.flash_forward(q, k, v, is_causal, SCALE)
        grads = kernels.flash_backward(grad_out, q, k, v, out, lse.detach(), is_causal, SCALE)
    assert_close(out, right_out.detach())
    for ours, right in zip(grads[1:], torch.autograd.grad(right_out, leaves, grad_out)):
        assert_close(ours[:, :, seen], right[:, :, seen])
        assert not ours[:, :, hidden].any()


def test_where_all_scores_are_minus_infinity_there_are_zeros():
    q, v = (torch.ones(1, 1, 70, HEAD_DIM).double() for _ in range(2))
    k = torch.zeros(1, 1, 70, HEAD_DIM).double()
    k[:, :, 0] = -torch.inf
    kernels = simulated(0)
    with new_memory_is_nan():
        out, lse = kernels.flash_forward(q, k, v, True, SCALE)
        _, _, grad_v = kernels.flash_backward(v, q, k, v, out, lse, True, SCALE)
    assert_close(out[0, 0, :, 0], torch.tensor([0.0] + 69 * [1.0]).double())
    assert lse[0, 0, 0] == -torch.inf
    assert not grad_v[0, 0, 0].any()
    # every other query shares its 1 out
    torch.testing.assert_close(grad_v.sum().item(), 69.0 * HEAD_DIM)
