"""The sharded optimizer trains as one process does, and shares state, traffic and checkpoints."""

import inspect
import itertools

import pytest
import sharded_optimizer_cases as cases
import sharded_optimizer_training as training
import torch
from distributed_workers import run_cases
from torch import nn

from lib import distributed, optimizer
from lib.sharded_optimizer import ShardedOptimizer
from lib.sharded_optimizer_parts import balanced_owners

# four ranks on two cores are slow
OPTIMIZERS = {1: list(training.OPTIMIZERS), 2: list(training.OPTIMIZERS), 3: ["sgd"], 4: ["adamw"]}
OTHERS = {3: ["torch adamw", "adamw"], 4: ["sgd", "torch adamw"]}
TWO_RANKS = [
    "traffic",
    "elements_of_state",
    "frozen_do_not_count",
    "places",
    "closure",
    "gradients_move",
    "late_gradients",
    "twice",
    "overlap_begins_in_backward",
    "buckets_under_way",
    "exception_in_backward",
    "gathers_under_forward",
    "options_of_step",
    "learning_rate_tensor",
    "other_optimizers",
    "mixed_dtypes",
    "frozen",
    "group_between_backward_and_step",
    "refused",
    "state_dicts",
    "wrong_files",
    "masters_are_saved",
]
HOWS = {"parameters": {}, "flat": cases.LOCAL}

pytestmark = pytest.mark.usefixtures("quick_ranks")


def launch(fn, world_size: int, *args):
    # long, since other programs may take the cores
    return distributed.launch(fn, world_size, *args, backend="gloo", timeout=120)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """What each of four ranks found; they also train in smaller groups."""
    return launch(training.four_ranks, 4, OPTIMIZERS, tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def other_optimizers():
    return launch(training.equality, 4, OTHERS)


@pytest.fixture(scope="module")
def two_ranks():
    """What each case gave on each of two ranks: {case: [on rank 0, on rank 1]}."""
    results = launch(run_cases, 2, "sharded_optimizer_cases", TWO_RANKS)
    return {name: [result[name] for result in results] for name in TWO_RANKS}


def ways(optimizers: dict[int, list[str]]) -> list[tuple[int, str, str]]:
    sizes = ((size, name) for size, names in optimizers.items() for name in names)
    return [(*which, way) for which, way in itertools.product(sizes, training.WAYS)]


def check_training(results: list[dict], way: tuple[int, str, str]) -> None:
    found = [result["training"][way] for result in results if way in result["training"]]
    assert len(found) == way[0]
    # weights are of size 1 and below, and float32 has 24 bits
    assert max(result["error"] for result in found) < 16 * 2**-24
    assert max(result["norm error"] for result in found) < 16 * 2**-24
    assert len({result["digest"] for result in found}) == 1


@pytest.mark.parametrize("way", ways(OPTIMIZERS), ids=str)
def test_training_equals_that_of_one_process(four_ranks, way):
    check_training(four_ranks, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ways(OTHERS), ids=str)
def test_training_equals_that_of_one_process_with_further_optimizers(other_optimizers, way):
    check_training(other_optimizers, way)


def test_one_rank_trains_bit_for_bit_as_without_sharding(four_ranks):
    alone = {k: v for k, v in four_ranks[3]["training"].items() if k[0] == 1}
    assert len(alone) == len(training.OPTIMIZERS) * len(training.WAYS)
    assert {result["error"] for result in alone.values()} == {0.0}


def test_all_shards_together_are_the_state_of_one_process(four_ranks):
    whole = four_ranks[3]["training"]
    for way in ways(OPTIMIZERS):
        found = [result["training"].get(way, {"elements": 0})["elements"] for result in four_ranks]
        assert sum(found) == whole[(1, *way[1:])]["elements"]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("way", training.WAYS)
def test_bfloat16_training_equals_that_of_float32_masters(four_ranks, size, name, way):
    assert four_ranks[3]["low precision"][size, name, way] == 0


@pytest.mark.parametrize("saved", ["parameters", "flat, overlapped"])
def test_resuming_is_exact_at_the_same_number_of_ranks(four_ranks, saved):
    assert [result["resumed"][saved, 4, saved] for result in four_ranks] == [0.0] * 4


@pytest.mark.parametrize("saved", ["parameters", "flat, overlapped"])
@pytest.mark.parametrize("loaded", ["parameters", "flat, overlapped"])
@pytest.mark.parametrize("size", [4, 2, 1])
def test_four_ranks_resume_on_other_numbers_and_strategies(four_ranks, saved, loaded, size):
    errors = [r["resumed"].get((saved, size, loaded)) for r in four_ranks[4 - size :]]
    assert max(errors) < 16 * 2**-24


@pytest.mark.parametrize("saved", ["parameters", "flat, overlapped"])
def test_four_ranks_resume_without_sharding(four_ranks, saved):
    assert max(result["resumed"][saved, "unsharded"] for result in four_ranks) < 16 * 2**-24


def test_flat_shards_send_what_one_all_reduce_does(two_ranks):
    first, second = two_ranks["traffic"]
    assert first == second
    # a reduce-scatter and an all-gather of all are the halves of an all-reduce of all; the three
    # numbers say which parameters have gradients
    assert first["flat"] == {"reduce_scatter": 96, "all_gather": 96, "all_reduce": 3}
    assert first["averaged"] == {"all_gather": 96}
    assert first["parameters"] == {"broadcast": 96}


def test_state_is_divided_to_the_element(two_ranks):
    first, second = two_ranks["elements_of_state"]
    # parameters of 24, 48 and 24 elements, and of 15, 35 and 7
    even, odd = (4, 6, 8, 3), (3, 5, 7, 1)
    for strategy in ("parameters", "flat"):
        assert [first[strategy, even], second[strategy, even]] == [48, 48]
    assert [first["parameters", odd], second["parameters", odd]] == [35, 22]
    # slices of 32 with gaps of 1 behind each parameter, the second with a tail of 4
    assert [first["flat", odd], second["flat", odd]] == [31, 26]


def test_frozen_parameters_do_not_unbalance_the_others(two_ranks):
    assert two_ranks["frozen_do_not_count"] == [8, 8]


def test_parameters_become_aligned_views_and_keep_values_and_identity(two_ranks):
    for result in two_ranks["places"]:
        assert result == {
            "values": True,
            "identities": True,
            "storages": 1,
            "aligned": True,
            "contiguous": True,
        }


def test_closures_are_called_once_with_gradients_on(two_ranks):
    for results in two_ranks["closure"]:
        for calls, is_positive, error in results.values():
            assert calls == [True]
            assert is_positive
            assert error < 1e-6


def test_gradients_move_into_the_shards_and_stay_there_until_zero_grad(two_ranks):
    for results in two_ranks["gradients_move"]:
        for error, are_gone in results.values():
            assert error < 1e-6
            assert are_gone


def test_gradients_that_come_after_their_norm_are_an_error(two_ranks):
    for first, then, overlapped, after in two_ranks["late_gradients"]:
        assert first.startswith("RuntimeError: a backward pass between the gradients' norm and")
        assert overlapped.startswith("RuntimeError: the gradient of a parameter of shape (3, 8)")
        assert then == after == "no error"


def test_no_sync_sends_nothing_and_adds_up(two_ranks):
    for sent, _, error in two_ranks["twice"]:
        assert sent == {}
        assert error < 1e-6


def test_a_second_backward_is_an_error_where_it_overlaps(two_ranks):
    for _, message, _ in two_ranks["twice"]:
        assert message.startswith("RuntimeError: the gradient of a parameter of shape (3, 8) grew")


def test_reduce_scatters_begin_in_backward_from_the_second_step_on(two_ranks):
    # the second step's begin after the 96 of the first; the first layer has 24
    assert two_ranks["overlap_begins_in_backward"] == [[0, 96 + 72]] * 2


def test_the_gradients_of_two_buckets_at_most_are_held_while_they_are_sent(two_ranks):
    assert two_ranks["buckets_under_way"] == [[0, 1, 2, 2, 2]] * 2


def test_training_goes_on_after_an_exception_in_backward(two_ranks):
    for message, error in two_ranks["exception_in_backward"]:
        assert message == "RuntimeError: in backward"
        assert error < 1e-6


@pytest.mark.parametrize("name", ["plain", "compiled"])
def test_all_gathers_run_under_the_forward_of_chosen_modules(two_ranks, name):
    for results in two_ranks["gathers_under_forward"]:
        under_way, error = results[name]
        # buckets are in reverse order, and the last layer was not chosen
        assert under_way == [False, True, True]
        assert error < 1e-6


def test_options_of_step_reach_the_inner_optimizer(two_ranks):
    for results in two_ranks["options_of_step"]:
        assert set(map(tuple, results.values())) == {(0.0, 0.0)}


def test_a_learning_rate_tensor_stays_the_same(two_ranks):
    assert max(two_ranks["learning_rate_tensor"]) < 1e-6


def test_optimizers_with_other_state(two_ranks):
    for errors in two_ranks["other_optimizers"]:
        assert len(errors) == 6
        assert max(errors.values()) == 0


def test_parameters_of_several_dtypes(two_ranks):
    for errors in two_ranks["mixed_dtypes"]:
        assert max(errors.values()) < 1e-6


def test_parameters_may_be_frozen_and_trained_later(two_ranks):
    for errors in two_ranks["frozen"]:
        assert len(errors) == 3
        assert max(errors.values()) < 1e-6


def test_groups_may_be_added_between_backward_and_step(two_ranks):
    for errors in two_ranks["group_between_backward_and_step"]:
        assert len(errors) == 3
        assert max(errors.values()) < 1e-6


def test_what_cannot_be_trained_is_refused_by_name(two_ranks):
    for messages in two_ranks["refused"]:
        for message, words in zip(
            messages,
            [
                "RuntimeError: a parameter of shape (3, 8) was given other memory after",
                "ValueError: the gradient of a parameter of shape (5, 4) is torch.sparse_coo",
                "ValueError: strategy is flat on rank 0, but parameters on rank 1",
                "ValueError: parameter 0 is float32 (5, 4), trained on rank 0, but float32 (6, 4)",
                "ValueError: parameter 3 is float32 (2, 3), trained on rank 0, but float32 (3, 3)",
                "ValueError: lr is -1.0; right is: 0 or more",
            ],
            strict=True,
        ):
            assert message.startswith(words)


def test_state_dicts_hold_one_rank_and_load_there_bit_for_bit(two_ranks):
    for rank, results in enumerate(two_ranks["state_dicts"]):
        for resumed, from_plain, of_rank_0, elements in results.values():
            assert resumed == 0
            assert from_plain == 0
            assert elements == 96
            if rank == 0:
                assert of_rank_0 == "no error"
            else:
                assert of_rank_0.endswith("right is: the files of all ranks, through load_shards")


def test_files_that_are_not_of_one_save_are_refused(two_ranks):
    for names, none, fits, mixed, missing, shapes, unwritable in two_ranks["wrong_files"]:
        # those of three ranks are gone
        assert names == ["shard-00000-of-00002.pt", "shard-00001-of-00002.pt"]
        assert none == "FileNotFoundError: no file shard-*-of-*.pt in FOLDER"
        assert fits == "no error"
        assert mixed == "ValueError: the shards in FOLDER are of 2 saves; right is: one"
        assert missing == "FileNotFoundError: FOLDER lacks shard-00000-of-00002.pt"
        assert shapes.startswith("ValueError: FOLDER has parameter 2 of shape (3, 8); right is")
        assert unwritable.startswith("NotADirectoryError: ")


def test_masters_are_saved_and_cut_anew_bit_for_bit(two_ranks):
    for results in two_ranks["masters_are_saved"]:
        assert len(results) == 4
        assert all(results.values())


def test_a_rank_that_dies_in_the_step_ends_the_job_and_is_named():
    with pytest.raises(distributed.WorkerError, match="rank 1 of 2 was ended by SIGKILL"):
        launch(cases.dies_in_step, 2)


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_a_single_rank_is_left_alone(how):
    module = cases.stack()
    params = list(module.parameters())
    addresses = [param.data_ptr() for param in params]
    made = cases.made_of(module, cases.ADAMW, **how)
    assert made.inner.param_groups[0]["params"] == params
    cases.backward(module)
    grads = [param.grad for param in params]
    made.clip_grad_norm(1.0)
    made.step()
    assert all(param.grad is grad for param, grad in zip(params, grads))
    assert [param.data_ptr() for param in params] == addresses
    assert not any(param._post_accumulate_grad_hooks for param in params)


def test_schedulers_find_what_they_look_for():
    made = cases.made_of(cases.stack(), {"optimizer_cls": torch.optim.AdamW})
    torch.optim.lr_scheduler.OneCycleLR(made, max_lr=1.0, total_steps=10)
    assert made.param_groups[0]["lr"] < 1e-1
    assert made.param_groups[0]["betas"][0] != 0.9


def test_own_arguments_are_none_of_any_optimizer():
    own = set(inspect.signature(ShardedOptimizer).parameters) - {
        "params",
        "optimizer_cls",
        "kwargs",
    }
    classes = [cls for cls in vars(torch.optim).values() if inspect.isclass(cls)]
    assert len(classes) > 10
    for cls in (optimizer.AdamW, *classes):
        assert not own & inspect.signature(cls).parameters.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "zero"}, "strategy is 'zero'; right is: one of parameters, flat"),
        ({"reduces_gradients": True}, "reduces_gradients is True with strategy 'parameters'"),
        ({"strategy": "flat", "overlap": True}, "overlap is True, reduces_gradients False"),
        ({"strategy": "flat", "bucket_cap_mb": 0}, "bucket_cap_mb is 0; right is: above 0"),
        (
            {"strategy": "flat", "optimizer_cls": torch.optim.Adafactor},
            "optimizer_cls is Adafactor, .* right is: strategy 'parameters'",
        ),
        ({"optimizer_cls": torch.optim.LBFGS}, "optimizer_cls is LBFGS, .* right is: another"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        cases.made_of(cases.stack(), {"optimizer_cls": torch.optim.SGD, "lr": 0.1} | options)


def test_owners_are_balanced_largest_first_and_ties_go_to_the_lower_rank():
    loads = [0, 0, 0]
    assert balanced_owners([2, 9, 4, 4, 3], loads) == [2, 0, 1, 2, 1]
    assert loads == [9, 7, 6]
    assert balanced_owners([1, 1], loads) == [2, 1]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_largest_load_is_within_a_parameter_of_the_mean(ranks):
    generator = torch.Generator().manual_seed(ranks)
    sizes = torch.randint(1, 1000, (60,), generator=generator).tolist()
    loads = [0] * ranks
    owners = balanced_owners(sizes, loads)
    for rank in range(ranks):
        assert loads[rank] == sum(size for size, owner in zip(sizes, owners) if owner == rank)
    assert max(loads) <= sum(sizes) / ranks + max(sizes)


def test_a_whole_that_cannot_be_cut_is_refused():
    module = nn.Linear(4, 6, bias=False)
    made = ShardedOptimizer(module.parameters(), torch.optim.Adafactor, lr=0.1)
    module(torch.ones(1, 4)).sum().backward()
    made.step()
    saved = made.state_dict()
    saved["ranges"] = {0: (0, 12)}
    with pytest.raises(ValueError, match="elements 0 to 24 of parameter 0 were asked for, of whi"):
        made.load_state_dict(saved)


@pytest.mark.gpu
def test_training_on_gpus_equals_that_of_one_process():
    ranks = min(4, torch.cuda.device_count())
    optimizers = {size: list(training.OPTIMIZERS) for size in range(1, ranks + 1)}
    results = distributed.launch(training.equality, ranks, optimizers, backend="nccl", timeout=120)
    for way in ways(optimizers):
        check_training(results, way)


@pytest.mark.gpu
def test_two_gpus_train_as_one_process():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for results in distributed.launch(cases.on_gpus, 2, backend="nccl", timeout=120):
        assert len(results) == 4
        assert max(max(errors) for errors in results.values()) < 1e-5
