"""One sequence on several ranks equals one process; what the lesson's cells and figures rest on."""

import math

import pytest
import torch

from lib.lessons.mesh import context
from lib.lessons.mesh.context import attend, merge, ring_attention, zigzag, zigzag_ring
from lib.lessons.mesh.figures import show_work
from lib.lessons.ranks import run_on_threads
from tests.lessons.mesh.cells import functions_of


def cell_of(name):
    """The function `name` that a cell of the lesson begins with."""
    return functions_of(name, vars(context))[name]


def random_inputs(heads, tokens, head_dim, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    shape = (4, heads, tokens, head_dim)
    return scale * torch.randn(shape, dtype=torch.float64, generator=generator)


def some_shares(kind, tokens, ranks):
    if kind == "zigzag":
        return zigzag(tokens, ranks)
    order = torch.arange(tokens)
    if kind == "shuffled":
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    return [share.sort().values for share in order.chunk(ranks)]


def root_mean_square(tensors):
    return [tensor.square().mean().sqrt().item() for tensor in tensors]


@pytest.mark.parametrize("kind", ["consecutive", "zigzag", "shuffled"])
@pytest.mark.parametrize(("ranks", "heads", "tokens", "head_dim"), [(1, 1, 6, 3), (4, 2, 96, 16)])
def test_a_ring_equals_one_process_and_rounds_at_most_twice_as_much_as_pytorch(
    kind, ranks, heads, tokens, head_dim
):
    backward, shares = cell_of("ring_backward"), some_shares(kind, tokens, ranks)
    inputs = random_inputs(heads, tokens, head_dim)
    exact = context.in_one_process(*inputs)
    ring, _ = context.on_a_ring(ring_attention, backward, inputs, shares)
    for found, expected in zip(ring, exact):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    size = (heads, tokens, head_dim)
    off = context.rounding_errors(ring_attention, backward, shares, size)
    assert (off["ring"] <= 2 * off["PyTorch"]).all()


def test_weights_by_way_of_the_merged_log_sum_exp_round_more_where_scores_are_large(monkeypatch):
    def by_total(out, lse, new_out, new_lse):
        total = torch.logaddexp(lse, new_lse)
        return torch.exp(lse - total) * out + torch.exp(new_lse - total) * new_out, total

    def worst(scale):
        off = context.rounding_errors(
            ring_attention, backward, some_shares("consecutive", 96, 4), scale=scale
        )
        return (off["ring"] / off["PyTorch"]).max().item()

    # what the notebook says of three times as large inputs, and of its own sizes
    backward = cell_of("ring_backward")
    assert worst(3.0) == pytest.approx(1.3, abs=0.15)
    monkeypatch.setattr(context, "merge", by_total)
    assert worst(3.0) == pytest.approx(2.4, abs=0.25)
    assert max(worst(1.0), worst(2.0)) < 1.8


@pytest.mark.parametrize(("ranks", "chunk"), [(1, 2), (3, 1), (4, 6)])
def test_a_ring_that_computes_visible_halves_is_ring_attention(ranks, chunk):
    q, k, v, _ = random_inputs(1, 2 * ranks * chunk, 5)[:, 0]
    shares = zigzag(len(q), ranks)

    def both(me):
        own = [x[shares[me.number]] for x in (q, k, v)]
        return zigzag_ring(*own, me), ring_attention(*own, shares, me)

    for halves, whole in run_on_threads(both, ranks):
        for found, expected in zip(halves, whole):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("ranks", "chunk"), [(1, 5), (3, 1), (8, 5)])
def test_zigzag_gives_all_ranks_the_same_work_in_every_step(ranks, chunk):
    shares = zigzag(2 * ranks * chunk, ranks)
    assert sorted(torch.cat(shares).tolist()) == list(range(2 * ranks * chunk))
    for apart in range(ranks):  # in step s a rank has the keys of the one s before it
        pairs = {
            int((mine[:, None] >= shares[rank - apart]).sum()) for rank, mine in enumerate(shares)
        }
        assert len(pairs) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_of_the_keys_merge_to_the_whole_however_large_the_scores(dtype):
    q, k, v, _ = random_inputs(2, 24, 8, scale=8.0).to(dtype)
    whole = attend(q, k, v)
    assert whole[1].max() > 100
    parts = [attend(q, k[:, i : i + 5], v[:, i : i + 5]) for i in range(0, 24, 5)]
    joined = parts[0]
    for part in parts[1:]:
        joined = merge(*joined, *part)
    for mine, expected in zip(joined, whole):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-3)


def test_a_query_that_sees_no_key_changes_nothing():
    q, k, v, _ = random_inputs(1, 4, 3)
    out, lse = attend(q, k, v, torch.zeros(4, 4, dtype=torch.bool))
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    seen = attend(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(merge(*seen, out, lse), seen))


def test_a_figure_has_a_box_for_each_step_that_computes(drawn):
    show_work({"consecutive": [[3, 3], [0, 4]], "zigzag": [[3, 3], [2, 2]]})
    ends = [
        [path.get_extents().x1 for lane in axes.collections for path in lane.get_paths()]
        for axes in drawn[0].axes
    ]
    assert ends == [pytest.approx([0.6, 0.6, 0.6, 1.4]), pytest.approx([0.6, 1.0, 0.6, 1.0])]
