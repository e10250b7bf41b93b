"""The memory of a rank in notebook 09, and the settings that were measured."""

import pytest

from lib.lessons.zero1.explorers import PRECISIONS, STAGES, memory_kinds, stage_memory, verdict
from lib.lessons.zero1.figures import KINDS
from lib.model.config import model_preset
from lib.model.costs import num_parameters, parameters_by_part
from lib.profiling.memory_formula import RankMemory

SMALL = model_preset("small")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_kinds_add_up_to_what_the_formula_counts(precision, name, ranks):
    memory = stage_memory(SMALL, ranks, name, precision)
    kinds = memory_kinds(SMALL, memory, ranks, is_sharded=name != "DDP")
    assert list(kinds) == list(KINDS)
    counted = (memory.parameters, memory.gradients, memory.optimizer_state, memory.activations)
    assert sum(kinds.values()) == sum(counted) + memory.communication + memory.gathered
    assert min(kinds.values()) >= 0


def test_masters_are_four_bytes_for_each_weight_that_has_two():
    memory = stage_memory(SMALL, 1, "DDP", "bfloat16 parameters")
    kinds = memory_kinds(SMALL, memory, 1, is_sharded=False)
    matrices = num_parameters(SMALL) - parameters_by_part(SMALL)["norms"]
    assert kinds["master weights"] == 4 * matrices
    assert kinds["Adam's moments"] == 8 * num_parameters(SMALL)


def test_stages_divide_one_thing_after_another():
    held = [stage_memory(SMALL, 8, name, "bfloat16 parameters") for name in STAGES]
    fields = ("optimizer_state", "gradients", "parameters")
    whole = {field: getattr(held[0], field) for field in fields}
    divided = [[getattr(m, field) < whole[field] / 7 for field in fields] for m in held]
    assert divided == [
        [False, False, False],
        [True, False, False],
        [True, True, False],
        [True, True, False],
        [True, True, True],
    ]


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (15 * 10**9, "peak 15 GB, fits into 16 GB"),
        (15 * 10**9 + 1, "fits into 24 GB"),
        (140 * 10**9, "fits into 141 GB"),
        (141 * 10**9, "too much for 141 GB"),
    ],
)
def test_the_smallest_card_that_holds_peak_and_reserve_is_named(num_bytes, words):
    assert words in verdict(RankMemory(num_bytes, 0, 0, 0))
