"""The cost of layouts against what the other lessons compute, and the search over all."""

import dataclasses

import pytest

from lib.lessons.mesh import layouts as module
from lib.lessons.mesh.layouts import MACHINES, MODELS, Layout, cost, fastest, fits, layouts
from lib.lessons.mesh.schedules import play
from lib.model.config import model_preset
from lib.model.costs import flops_by_part, flops_per_token
from lib.profiling.collectives import Link
from lib.profiling.memory_formula import RESERVED_BYTES, rank_memory
from tests.lessons.mesh.cells import functions_of, one_f_one_b_orders

ONE_HOST, FAST, SLOW = MACHINES.values()
XL, SEQUENCES = MODELS["xl"]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("model", "length", "checkpoints"),
    [("xl", 1024, False), ("2.7b", 4096, False), ("8b", 32768, False), ("8b", 32768, True)],
)
def test_data_parallel_memory_is_that_of_rank_memory(model, length, checkpoints, stage):
    config = dataclasses.replace(model_preset(model), context_length=length)
    wrapper = "none" if stage == 1 else "flashddp"
    settings = {"stage": stage, "checkpoints": checkpoints, "ddp_wrapper": wrapper}
    expected = rank_memory(config, ranks=8, **settings).peak + RESERVED_BYTES
    found = cost(config, ONE_HOST, Layout(dp=8, zero=stage, checkpoints=checkpoints), 8).num_bytes
    assert found == pytest.approx(expected, rel=0.06)


def test_computing_takes_the_models_flops_without_hidden_scores_and_a_pass_more_with_checkpoints():
    plain, again = (
        cost(XL, ONE_HOST, Layout(dp=8, checkpoints=checkpoints), 8).parts["computing"]
        for checkpoints in (False, True)
    )
    # a causal mask hides half of the scores, and backward computes those that it needs once more
    scores = flops_by_part(XL)["attention"] / 2
    matmuls = flops_per_token(XL, backward=False) - 2 * scores
    forward = (matmuls + scores) * XL.context_length / 4e14
    assert plain == pytest.approx(3 * forward + 0.5 * scores * XL.context_length / 4e14)
    assert again - plain == pytest.approx(forward)


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1024, 2048, 8192])
def test_a_ring_hides_from_the_tokens_on_that_notebook_11_derives_and_waits_for_the_last_hop(
    cp, tokens
):
    config = dataclasses.replace(model_preset("8b"), context_length=cp * tokens)
    link, d, blocks = ONE_HOST.cluster.inside, config.d_model, config.num_layers
    hop = link.latency_us / 1e6 + 4 * tokens * d / (link.bandwidth_gbs * 1e9)
    step = 2 * tokens**2 * d / ONE_HOST.flops_per_s
    shows = (cp - 1) * (max(0, hop - step) + max(0, 2 * hop - 2.5 * step)) + hop
    layout = Layout(dp=8 // cp, cp=cp)
    found = cost(config, ONE_HOST, layout, layout.dp).parts["context"]
    assert found == pytest.approx(blocks * shows)
    # 2 F / beta, and a little more for the latency
    hides = 2 * ONE_HOST.flops_per_s / (link.bandwidth_gbs * 1e9)
    assert (found == pytest.approx(blocks * hop)) == (tokens > hides)


@pytest.mark.parametrize("place", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (2, 64), (4, 8), (4, 64), (8, 8), (8, 32)])
def test_a_pipelines_step_is_that_of_1f1b_played_with_its_messages(place, pp, m):
    layout = Layout(dp=64 // pp, pp=pp, micro_batches=m)
    parts = cost(XL, place, layout, layout.dp * m).parts
    one = parts["computing"] / m
    link = place.link(pp, layout.dp)
    hop = link.latency_us / 1e6 + 2 * XL.context_length * XL.d_model / (link.bandwidth_gbs * 1e9)
    played = play(
        one_f_one_b_orders(pp, m),
        micro_batches=m,
        forward_ms=one / 3,
        backward_ms=2 * one / 3,
        message_ms=hop,
    ).ms
    found = parts["computing"] + parts["pipeline"]
    assert played <= found * (1 + 1e-9)
    assert found <= played + 2 * hop


def test_1f1b_holds_as_many_micro_batches_as_there_are_stages_and_no_more():
    two, eight, sixteen, many = (
        cost(XL, FAST, Layout(dp=8, pp=8, micro_batches=m), 8 * m).num_bytes for m in (2, 8, 16, 64)
    )
    assert two < eight == sixteen == many


def test_fsdp_hides_its_messages_from_the_tokens_on_that_notebook_09_derives():
    link = FAST.link(size=64, stride=1)
    enough = 1.5 * 63 / 64 * FAST.flops_per_s / (link.bandwidth_gbs * 1e9)
    assert XL.context_length < enough < 2 * XL.context_length
    shows = [
        cost(XL, FAST, Layout(dp=64, zero=3), 64 * rows).parts["data"] / rows for rows in (1, 2)
    ]
    assert shows[0] > 5 * shows[1]


def test_a_group_inside_a_host_has_its_link_and_groups_that_leave_it_share_the_network():
    host = FAST.cluster
    assert FAST.link(size=8, stride=1) == FAST.link(size=1, stride=8) == host.inside
    assert FAST.link(size=8, stride=8).bandwidth_gbs == host.network.bandwidth_gbs / 8
    # a ring through all ranks enters and leaves each host once
    slow = SLOW.cluster.network
    assert SLOW.link(size=64, stride=1) == Link(slow.latency_us, slow.bandwidth_gbs)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(dp=4), "dp · tp · pp · cp must be 8, got 4"),
        (Layout(dp=8, micro_batches=3), "dp · micro_batches must divide the 16 sequences, got 8"),
    ],
)
def test_a_layout_that_does_not_go_into_the_machine_is_named(layout, message):
    with pytest.raises(ValueError, match=message):
        cost(XL, ONE_HOST, layout, 16)


def test_the_fastest_layout_fits_and_no_other_that_fits_is_faster():
    best = fastest(XL, FAST, 64)
    assert best is not None
    assert fits(XL, FAST, best, 64)
    least = cost(XL, FAST, best, 64).step_s
    others = [one for one in layouts(XL, FAST, 64) if fits(XL, FAST, one, 64)]
    assert len(others) > 100
    assert all(cost(XL, FAST, one, 64).step_s >= least for one in others)
    assert fastest(MODELS["8b"][0], dataclasses.replace(ONE_HOST, card_gb=4.0), 64) is None


@pytest.mark.parametrize("larger", [1, 2, 4, 8])
@pytest.mark.parametrize("place", MACHINES)
def test_the_lessons_tree_is_no_more_than_half_slower_with_larger_batches_too(place, larger):
    tree = functions_of("first_that_fits", vars(module))["tree"]
    for config, sequences in MODELS.values():
        chosen, best = (
            find(config, MACHINES[place], larger * sequences) for find in (tree, fastest)
        )
        took, least = (
            cost(config, MACHINES[place], one, larger * sequences).step_s for one in (chosen, best)
        )
        assert took <= least * (1.5 if place == "8 hosts, 100 Gbit/s" else 1.001)
        # as the lesson says
        if (config, larger, place) == (XL, 4, "8 hosts, 100 Gbit/s"):
            assert took > 1.4 * least
