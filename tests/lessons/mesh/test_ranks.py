"""A pipeline on processes: the gradients of one process, its bubble and memory on the clock."""

import time

import pytest
import torch
import torch.distributed as dist

from lib.lessons.mesh.exercises import run_stage
from lib.lessons.mesh.ranks import run_on_ranks, with_sends_that_wait
from lib.lessons.mesh.toys import Stage, gradients_alone
from lib.lessons.ranks import Processes, run_on_processes
from tests.lessons.mesh.cells import gpipe_orders, one_f_one_b_orders

P, M = 2, 3


@pytest.mark.parametrize(
    ("make", "held"), [(gpipe_orders, [M, M]), (one_f_one_b_orders, [2, 1])], ids=["GPipe", "1F1B"]
)
def test_a_pipeline_is_one_process_to_the_last_bit_with_the_bubble_and_memory_as_derived(
    make, held
):
    ran = run_on_ranks(run_stage.solve, make(P, M), M)
    found = [gradient for stage in ran for gradient in stage.gradients]
    assert all(torch.equal(a, b) for a, b in zip(found, gradients_alone(M), strict=True))
    spans = [span for stage in ran for span in stage.spans]
    assert max(end for *_, end in spans) == pytest.approx(3 * (M + P - 1))
    assert sum(end - start for *_, start, end in spans) == pytest.approx(3 * M * P)
    assert [stage.held_bytes / stage.bytes_of_one for stage in ran] == held


def test_1f1b_hangs_where_a_send_waits_for_its_receive_and_gpipe_does_not():
    assert with_sends_that_wait(run_stage.solve, gpipe_orders(P, M), M) == "runs"
    assert with_sends_that_wait(run_stage.solve, one_f_one_b_orders(P, M), M) == (
        "the ranks wait for one another forever: rank 0 sends to rank 1, rank 1 sends to rank 0"
    )


def test_a_rank_that_starts_late_is_waited_for():
    def late(events, stage, loss, micro_batches, ranks):
        time.sleep(1.2 * ranks.number)
        run_stage.solve(events, stage, loss, micro_batches, ranks)

    assert with_sends_that_wait(late, gpipe_orders(P, M), M) == "runs"


def test_ranks_of_a_group_send_and_add_up_among_themselves():
    def in_columns(ranks):
        group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        column, own = Processes(group), torch.tensor([float(ranks.number)])
        column.send(own, 1 - column.number)
        received = column.receive(1 - column.number, like=own)
        column.wait_for_messages()
        found = [received, column.broadcast(own), column.all_reduce(own), column.all_gather(own)]
        found.append(column.reduce_scatter(torch.cat([own, 10 * own])))
        return (column.number, column.count), [one.tolist() for one in found]

    for rank, (place, found) in enumerate(run_on_processes(in_columns, 4)):
        first, other = rank % 2, (rank + 2) % 4
        both = first + first + 2.0
        scattered = both if rank < 2 else 10 * both
        assert place == (rank // 2, 2)
        assert found == [[other], [first], [both], [first, first + 2.0], [scattered]]


def test_stages_that_do_not_divide_the_blocks_are_refused():
    with pytest.raises(ValueError, match="stages must divide the 8 blocks, got 3"):
        Stage(0, 3)


def test_a_stage_on_processes_has_parameters_and_tensors_with_a_history_can_be_gathered():
    def own_gradients(events, stage, loss, micro_batches, ranks):
        assert len(list(stage.parameters())) > 0
        run_stage.solve(events, stage, loss, micro_batches, ranks)

    run_on_ranks(own_gradients, gpipe_orders(P, 1), 1)

    def gather(ranks):
        part = torch.ones(2, requires_grad=True) * (1 + ranks.number)
        return ranks.all_gather(part).tolist(), ranks.reduce_scatter(part).tolist()

    assert run_on_processes(gather, 2) == [([1, 1, 2, 2], [3]), ([1, 1, 2, 2], [3])]
