"""The attention kernels for Hopper against the formula, in a simulator: no GPU, no Triton.

Whatever the order in which threads run and copies arrive, results are right, and there is no race
and no hang. Faults put into the source must be found.
"""

import dataclasses
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.flash_attention.cases import Case, formula, make_inputs, new_memory_is_nan, rotated
from tests.flash_attention.hopper_simulator import KernelError, simulated

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
    stages, is_ordered, kept = rng.choice([2, 3, 4]), rng.random() < 0.5, rng.choice([0, 1])
    schedule = (warpgroups, rng.choice([64, 128]), stages, is_ordered, is_persistent, kept)
    assert_forward_is_right(case, kernels, schedule)


@of_seeds(2, slow=40)
def test_backward(seed, is_causal, warpgroups, is_persistent):
    rng, case, kernels = drawn(seed, is_causal)
    of_queries, of_keys = (
        (warpgroups, 64, rng.choice(stages), False, is_persistent, rng.choice([0, 1, 2]))
        for stages in ([3, 4], [2, 3, 4])
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


# More tiles than stages, more items of work than programs, and parts of tiles
FULL = Case(450, 300, HEAD_DIM, is_causal=True, heads=4, key_heads=2, batch=1, scale=SCALE)
SCHEDULES = ((3, 64, 3, True), ((3, 64, 4), (2, 64, 4)))
PLANTED = {
    "a wait for a tile is missing": (
        "slot = wait_until_full(args.k_ring, step, CONFIG)\n    wait_for_turn",
        "slot = step % CONFIG.STAGES\n    wait_for_turn",
        r"k_tiles\[\d\] is read before the wait",
    ),
    "a slot is released before the matmul that reads it is done": (
        "    acc, grad_scores_operand = warpgroup_mma_wait(0, [acc, grad_scores_operand])\n"
        "    mbarrier.arrive(args.k_ring.empty.index(slot))\n",
        "    mbarrier.arrive(args.k_ring.empty.index(slot))\n"
        "    acc, grad_scores_operand = warpgroup_mma_wait(0, [acc, grad_scores_operand])\n",
        r"k_tiles\[\d\] is written before the wait",
    ),
    "a result is used before it has been computed": (
        "scores = warpgroup_mma_wait(1, [scores])",
        "scores = warpgroup_mma_wait(2, [scores])",
        "a matmul's result is used before",
    ),
    "a slot is not released": (
        "        mbarrier.arrive(args.q_ring.empty.index(previous))\n",
        "",
        r"_grad_keys_partition 0 waits for q_ring.full.*_load_for_keys 2 waits for q_ring.empty\[",
    ),
    "half of the bytes are expected": (
        "mbarrier.expect(full, 2 * args.q_desc.block_type.nbytes)",
        "mbarrier.expect(full, args.q_desc.block_type.nbytes)",
        "more bytes than expected|is read before the wait",
    ),
    "what was written is copied without a fence": (
        "    fence_async_shared()\n    barrier()\n    tma.async_copy_shared_to_global(desc",
        "    barrier()\n    tma.async_copy_shared_to_global(desc",
        "copied before a fence|announced before a fence",
    ),
    "a tile is written while it is copied": (
        "    # the previous copy out of the tile must be done\n    tma.store_wait(0)\n",
        "",
        "is written before a wait for the copy",
    ),
    "the first warpgroup waits for its own turn": (
        "(step ^ 1 if PART == 0 else step) & 1",
        "step & 1",
        r"_attend_partition 0 waits for turns\[0\]",
    ),
    "rows past the last are written": (
        "gl.store(lse_ptrs, lse, row < args.sizes.num_queries)",
        "gl.store(lse_ptrs, lse)",
        "offsets .* of 1800|written twice",
    ),
}


def assert_is_found(case: Case, old: str, new: str, message: str, schedules=None) -> None:
    """Results are right without a message, and wrong or an error with `old` as `new` otherwise."""

    def run_all() -> None:
        for seed in range(2):
            kernels = simulated(seed, [(old, new)] if message else [], multiprocessors=3)
            forward, backward = schedules or (
                kernels.forward_schedule(case.head_dim),
                kernels.backward_schedules(case.head_dim),
            )
            assert_forward_is_right(case, kernels, forward)
            assert_backward_is_right(case, kernels, backward)

    if not message:
        run_all()
        return
    with pytest.raises((KernelError, AssertionError), match=f"(?s){message}"):
        run_all()


@pytest.mark.parametrize("fault", [None, *PLANTED])
def test_faults_put_into_the_source_are_found(fault):
    assert_is_found(FULL, *PLANTED.get(fault, ("", "", "")), SCHEDULES)


WIDE_FULL = Case(200, 150, WIDE, is_causal=True, heads=4, key_heads=2, batch=1, scale=SCALE)
PLANTED_WIDE = {
    "a tile is released while results leave through it": (
        "    tma.store_wait(0)\n    barrier()\n    mbarrier.arrive(empty)\n",
        "    mbarrier.arrive(empty)\n",
        "left work behind|not close|is announced before|is written before",
    ),
    "two share the keys, and one is waited for": (
        "k_ring = make_ring(CONFIG.WARPGROUPS, SHARERS)",
        "k_ring = make_ring(CONFIG.WARPGROUPS, 1)",
        "one arrival too many|is written before|waits for|is read before",
    ),
    "P is read before it has been written": (
        "    mbarrier.wait(args.p_full.index(slot), step // CONFIG.STAGES & 1)\n",
        "",
        r"p_tiles\[\d\] is read before the wait",
    ),
    "the diagonal goes through one tile of keys": (
        "if CONFIG.IS_CAUSAL and CONFIG.KEYS < ROWS:",
        "if False:",
        "not close",
    ),
}


@pytest.mark.parametrize("fault", [None, *PLANTED_WIDE])
def test_faults_of_wide_heads_are_found(fault):
    assert_is_found(WIDE_FULL, *PLANTED_WIDE.get(fault, ("", "", "")))


def test_with_two_stages_dq_waits_forever():
    # which is why the launch requires 3
    kernels = simulated(0, [("min_stages=3", "min_stages=2")])
    with pytest.raises(KernelError, match=r"_grad_queries_partition 0 waits for k_ring.full\["):
        assert_backward_is_right(FULL, kernels, ((2, 64, 2), (2, 64, 2)))
