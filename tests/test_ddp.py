"""Data-parallel wrappers: each trains as one process does, and keeps its contract."""

import ddp_cases as cases
import ddp_training as training
import pytest
import torch
from distributed_workers import run_cases
from torch import nn

from lib import ddp, distributed
from lib.ddp_buckets import Bucket, fill_buckets

OURS = ("naive", "flat", "overlap", "flashddp")
TWO_RANKS = [
    "messages",
    "nothing_is_sent_in_no_sync",
    "overlap_begins_in_backward",
    "orders_that_differ",
    "memory",
    "views_stay",
    "foreign_gradient_between",
    "zeroed_before_finish",
    "cast_later",
    "forgotten_finish",
    "double_backward",
    "exception_in_backward",
    "unfrozen",
    "sparse",
    "settings_that_differ",
    "mixed_dtypes",
    "state",
    "compiled",
    "ranges",
    "wrapped_again",
]

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def trained():
    """Results of `training.equality` on each rank, by world size; each size is launched once."""
    results = {}

    def get(world_size: int) -> list[dict]:
        if world_size not in results:
            size = world_size
            results[size] = launch(training.equality, size, size)
        return results[world_size]

    return get


@pytest.fixture(scope="module")
def two_ranks():
    """What each case gave on each of two ranks: {case: [on rank 0, on rank 1]}."""
    results = launch(run_cases, 2, "ddp_cases", TWO_RANKS)
    return {name: [result[name] for result in results] for name in TWO_RANKS}


def launch(fn, world_size: int, *args, backend: str = "gloo"):
    # long, since other programs may take the cores
    return distributed.launch(fn, world_size, *args, backend=backend, timeout=120)


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        pytest.param(size, way, marks=pytest.mark.slow if size == 4 else ())
        for size in (1, 2, 3, 4)
        for way in training.ways_to_train(size)
    ],
    ids=str,
)
def test_training_equals_that_of_one_process(trained, world_size, way):
    check_training(trained(world_size), way)


def check_training(results: list[dict], way: tuple[str, str, int]) -> None:
    results = [result[way] for result in results]
    error = max(error for error, _ in results)
    if way[0] in training.BFLOAT16:
        # five steps of 0.5 with gradients below 1 that are rounded to 8 bits
        assert 1e-6 < error < 5 * 0.5 * 2**-8
    else:
        # weights are of size 1 and below, and float32 has 24 bits
        assert error < 32 * 2**-24
    assert len({digest for _, digest in results}) == 1


def test_messages_of_each_wrapper(two_ranks):
    first, second = two_ranks["messages"]
    assert first == second
    lengths = {name: [length for length, _ in calls] for name, calls in first.items()}
    # three parameters of 24, 48 and 24 elements; behind them, who has gradients
    assert lengths == {
        "naive": [24, 48, 24, 3],
        "flat": [96, 3],
        "overlap": [24, 48, 24, 3],
        "flashddp": [72, 24, 3],
        "bfloat16": [96, 3],
    }


def test_bfloat16_halves_the_bytes(two_ranks):
    calls = two_ranks["messages"][0]
    assert {dtype for _, dtype in calls["bfloat16"]} == {torch.bfloat16}
    assert {dtype for _, dtype in calls["flashddp"]} == {torch.float32}


def test_no_sync_sends_nothing(two_ranks):
    assert two_ranks["nothing_is_sent_in_no_sync"] == [0, 0]


@pytest.mark.parametrize("name", OURS)
def test_all_reduces_begin_in_backward_where_they_overlap(two_ranks, name):
    # two gradients are there before the first layer's, which is the last
    expected = [2, 4] if name in ("overlap", "flashddp") else [0, 0]
    assert [result[name] for result in two_ranks["overlap_begins_in_backward"]] == [expected] * 2


def test_ranks_may_use_parameters_in_other_orders_or_not_at_all(two_ranks):
    for errors in two_ranks["orders_that_differ"]:
        assert len(errors) == 5
        assert max(max(values) for values in errors.values()) < 1e-6


def test_gradients_take_their_own_memory_only(two_ranks):
    for result in two_ranks["memory"]:
        # 20, 35 and 21 elements of four bytes, each filled up to a multiple of 16 bytes, and one
        # for each of the three parameters that says who has a gradient
        assert result["gradients"] == 4 * (20 + 35 + 21)
        assert result["storages"] == [4 * (20 + 36 + 24 + 3)]
        assert result["addresses"] == [0, 0, 0]


def test_zero_grad_frees_the_buffer(two_ranks):
    assert all(result["was alive"] and result["is freed"] for result in two_ranks["memory"])


def test_gradients_that_are_set_to_zero_stay_views_without_a_copy(two_ranks):
    for result in two_ranks["views_stay"]:
        assert result["copies"] == 0
        assert result["same places"]
        assert result["error"] < 1e-6


@pytest.mark.parametrize("name", OURS)
def test_gradients_that_are_not_the_modules_are_left_alone(two_ranks, name):
    assert [result[name] for result in two_ranks["foreign_gradient_between"]] == [0.0, 0.0]


@pytest.mark.parametrize("name", OURS)
def test_gradients_may_be_dropped_before_finish(two_ranks, name):
    for result in two_ranks["zeroed_before_finish"]:
        left, *later = result[name]
        assert left == 0
        assert min(later) > 0


@pytest.mark.parametrize("name", OURS)
def test_a_module_may_be_cast_between_steps(two_ranks, name):
    for result in two_ranks["cast_later"]:
        assert result[name] == [torch.bfloat16] * 3


@pytest.mark.parametrize("name", OURS)
def test_a_forgotten_finish_is_an_error_at_the_next_forward(two_ranks, name):
    for results in two_ranks["forgotten_finish"]:
        first, second = results[name]
        assert first.startswith("RuntimeError: forward after a backward pass whose gradients were")
        assert second == "no error"


@pytest.mark.parametrize("name", OURS)
def test_a_second_backward_is_an_error_that_names_the_parameter(two_ranks, name):
    for results in two_ranks["double_backward"]:
        assert results[name].startswith("RuntimeError: the gradient of 2.weight grew again")
        assert results[name].endswith("no error")


def test_wrappers_go_on_after_an_exception_in_backward(two_ranks):
    for results in two_ranks["exception_in_backward"]:
        for first, error in results.values():
            assert first == "RuntimeError: in backward"
            assert error < 1e-6


def test_a_parameter_that_is_trained_later_is_named(two_ranks):
    for message in two_ranks["unfrozen"]:
        assert message.startswith("RuntimeError: parameter 1.weight was frozen when")


def test_sparse_gradients_are_refused(two_ranks):
    for message in two_ranks["sparse"]:
        assert message.startswith(
            "ValueError: the gradient of weight is torch.sparse_coo; right is"
        )


def test_settings_that_differ_between_ranks_are_named(two_ranks):
    for messages in two_ranks["settings_that_differ"]:
        for message, words in zip(
            messages,
            [
                "ValueError: bucket_cap_mb is 1 on rank 0, but 2 on rank 1",
                "ValueError: ddp_wrapper is NaiveDDP on rank 0, but FlatDDP on rank 1",
                "ValueError: 0.weight is float32 (5, 4) on cpu, trained on rank 0",
                "ValueError: ddp_wrapper is 'none', but the group has 2 ranks",
            ],
        ):
            assert message.startswith(words)


def test_parameters_of_several_dtypes(two_ranks):
    for errors in two_ranks["mixed_dtypes"]:
        assert len(errors) == len(training.WRAPPERS)
        assert max(errors.values()) < 1e-6


def test_the_state_is_that_of_the_module_compiled_or_not(two_ranks):
    for results in two_ranks["state"]:
        for *names, is_taken_over in results.values():
            assert names == ["0.weight", "1.weight", "2.weight"]
            assert is_taken_over


def test_hooks_work_with_compiled_modules(two_ranks):
    for errors in two_ranks["compiled"]:
        assert max(errors.values()) < 1e-6


def test_profilers_see_the_all_reduces(two_ranks):
    # those that overlap: one for each message, and the waiting for them
    for counts in two_ranks["ranges"]:
        assert counts == {"naive": 1, "flat": 1, "overlap": 4, "flashddp": 2}


def test_a_module_can_be_wrapped_again(two_ranks):
    assert two_ranks["wrapped_again"] == [[96, 3]] * 2


def test_ranks_can_have_a_group_of_their_own(trained):
    results = [result["subgroup"] for result in trained(3)]
    # weights of the group's first rank, and gradients 1 and 2
    assert results == [None, [1.0, 1.5] * 5, [1.0, 1.5] * 5]


@pytest.mark.parametrize("name", ddp.WRAPPERS)
def test_a_single_rank_is_left_alone(name):
    module = cases.stack()
    model = ddp.wrap(name, module)
    x = torch.ones(2, 4)
    assert torch.equal(model(x), module(x))
    with model.no_sync():
        model(x).sum().backward()
    grads = [param.grad for param in module.parameters()]
    before = [grad.clone() for grad in grads]
    model.finish_gradient_synchronization()
    assert all(param.grad is grad for param, grad in zip(module.parameters(), grads))
    assert all(torch.equal(grad, copy) for grad, copy in zip(grads, before))
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())
    assert model.module is module


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="'zero'; right is: one of none, naive, flat, overlap"):
        ddp.wrap("zero", nn.Linear(1, 1))


def test_wrong_caps_and_dtypes_are_named():
    with pytest.raises(ValueError, match="bucket_cap_mb is 0; right is: above 0"):
        ddp.BucketedDDP(nn.Linear(1, 1), bucket_cap_mb=0)
    with pytest.raises(ValueError, match=r"reduce_dtype is torch\.int8; right is: None"):
        ddp.TorchDDP(nn.Linear(1, 1), reduce_dtype=torch.int8)


def lengths_of(sizes_mb: list[float], cap_mb: float | None) -> list[list[float]]:
    params = [nn.Parameter(torch.empty(int(size * 2**18), device="meta")) for size in sizes_mb]
    cap = None if cap_mb is None else cap_mb * 2**20
    buckets = fill_buckets(params, cap_bytes=cap)
    return [[param.nbytes / 2**20 for param in bucket.params] for bucket in buckets]


def test_buckets_fill_in_order_within_their_cap_and_the_first_is_small():
    assert lengths_of([0.5, 0.5, 0.5, 1, 2, 2, 1], 4) == [[0.5, 0.5], [0.5, 1, 2], [2, 1]]


def test_a_parameter_above_the_cap_has_its_own_bucket():
    assert lengths_of([8, 1, 1, 8, 1], 2) == [[8], [1, 1], [8], [1]]


def test_without_a_cap_there_is_one_bucket():
    assert lengths_of([8, 1, 1], None) == [[8, 1, 1]]


def test_a_bucket_has_one_dtype_and_they_come_in_the_order_of_their_last_parameters():
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    params = [nn.Parameter(torch.empty(4, dtype=dtype)) for dtype in dtypes]
    buckets = fill_buckets(params)
    assert [bucket.params[0].dtype for bucket in buckets] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packing_keeps_gradients_and_aligns_them(dtype):
    shapes = [(3,), (), (2, 5), (0,), (4, 4)]
    params = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
    grads = [torch.randn(shape).to(dtype) for shape in shapes]
    # as a transposed weight has
    grads[4] = grads[4].T
    for param, grad in zip(params, grads):
        param.grad = grad
    (buffer,) = Bucket(params).tensors()
    for param, grad in zip(params, grads):
        assert torch.equal(param.grad, grad)
        assert param.grad.storage_offset() * buffer.element_size() % 16 == 0
    buffer.fill_(7)
    assert all((param.grad == 7).all() for param in params)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_on_gpus_equals_that_of_one_process(world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    results = launch(training.equality, world_size, world_size, backend="nccl")
    for way in training.ways_to_train(world_size):
        check_training(results, way)


@pytest.mark.gpu
def test_two_gpus_train_as_one_process_and_average_in_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for result in distributed.launch(cases.on_gpus, 2, backend="nccl", timeout=120):
        assert result["operations"] == {"AVG"}
        assert max(result["errors"].values()) < 1e-5
