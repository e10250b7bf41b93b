"""Batches: random ones, and a sampler that visits every sequence once per epoch."""

import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lib.data.batches import BatchSampler, get_batch, random_tokens, read_sequences, take_sequences


# the second has room for one sequence alone
@pytest.mark.parametrize("dataset", [np.arange(65_436, 65_536, dtype=np.uint16), np.arange(8)])
def test_targets_are_the_inputs_moved_by_one(dataset):
    x, y = get_batch(dataset, 32, 7, "cpu")
    assert x.shape == y.shape == (32, 7)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x + 1, y)
    assert torch.equal(x, x[:, :1] + torch.arange(7))
    assert int(dataset[0]) <= x.min()


def test_a_seed_draws_the_same_batch_again():
    data = np.arange(100)
    first, again, other = (get_batch(data, 8, 4, "cpu", generator=s)[0] for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (np.ones(9), "ndarray of float64, shape (9,)"),
        (np.ones((9, 9), np.int32), "ndarray of int32, shape (9, 9)"),
        (torch.ones(9, dtype=torch.int64), "Tensor of torch.int64"),
        ([1] * 9, "list of no dtype"),
    ],
)
def test_data_that_is_no_row_of_ids_is_rejected(data, words):
    message = f"dataset must be a one-dimensional NumPy array of integers, got {words}"
    with pytest.raises(ValueError, match=re.escape(message)):
        get_batch(data, 2, 4, "cpu")


def test_numpys_integers_give_a_position_that_json_takes():
    sampler = make_sampler((np.int64(1000), np.int64(10)), np.int64(4), seed=np.int64(0))
    assert sampler.next_starts().tolist() == make_sampler((1000, 10), 4).next_starts().tolist()
    sampler.load_state_dict(json.loads(json.dumps(sampler.state_dict())))


def test_every_offset_is_drawn_about_equally_often():
    dataset = np.arange(100)
    generator = np.random.default_rng(0)
    counts = Counter()
    for _ in range(1000):
        counts.update(get_batch(dataset, 32, 7, "cpu", generator=generator)[0][:, 0].tolist())
    assert set(counts) == set(range(93))
    expected = 32_000 / 93
    assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5


@pytest.mark.parametrize("make", [get_batch, lambda d, b, c, _: BatchSampler(len(d), c, b, seed=0)])
def test_a_context_longer_than_the_data_is_rejected(make):
    with pytest.raises(ValueError, match="context_length 5 needs 6 tokens, but the data has 5"):
        make(np.arange(5), 1, 5, "cpu")


def test_a_batch_must_have_whole_sizes():
    for size in (0, 2.0, None):
        message = re.escape(f"must be a whole number, at least 1, got {size!r}")
        with pytest.raises(ValueError, match=f"batch_size {message}"):
            get_batch(np.arange(9), size, 4, "cpu")
        with pytest.raises(ValueError, match=f"context_length {message}"):
            get_batch(np.arange(9), 2, size, "cpu")


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_on_the_cpu():
    starts = np.arange(0, 64, 8)
    for gpu, cpu in zip(*(take_sequences(np.arange(100), starts, 8, d) for d in ("cuda", "cpu"))):
        assert gpu.is_cuda
        assert torch.equal(gpu.cpu(), cpu)


# The sampler

sizes = st.tuples(st.integers(2, 400), st.integers(1, 12)).filter(lambda s: s[0] > s[1])


def make_sampler(size, batch_size=1, **options):
    return BatchSampler(*size, batch_size, **({"seed": 0} | options))


barely_longer = st.tuples(st.integers(6, 15), st.just(5))


@given(size=sizes | barely_longer, seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_an_epoch_visits_each_window_once_and_none_overlap(size, seed, epoch):
    sampler = make_sampler(size, seed=seed)
    sampler.windows_seen = epoch * sampler.num_sequences
    starts = sorted(int(sampler.next_starts()[0]) for _ in range(sampler.num_sequences))
    assert (np.diff(starts) == size[1]).all()
    assert starts[0] >= 0
    assert starts[-1] + size[1] < size[0]
    # less than two windows are left out
    assert 0 <= size[0] - 1 - sampler.num_sequences * size[1] < 2 * size[1]


@settings(max_examples=60)
@given(
    size=sizes,
    batch=st.integers(1, 3),
    world_size=st.integers(1, 4),
    before=st.integers(0, 200),
)
def test_ranks_together_go_on_from_a_saved_position_as_one_process(size, batch, world_size, before):
    num_sequences = make_sampler(size).num_sequences
    assume(batch * world_size <= num_sequences)
    one = make_sampler(size, batch * world_size)
    ranks = [make_sampler(size, batch, rank=i, world_size=world_size) for i in range(world_size)]
    for _ in range(before):
        one.next_starts()
    if before:
        state = json.loads(json.dumps(one.state_dict()))
        for sampler in ranks:
            sampler.next_starts()
            sampler.load_state_dict(state)
    for _ in range(2 * num_sequences // (batch * world_size) + 2):
        together = np.concatenate([sampler.next_starts() for sampler in ranks])
        assert together.tolist() == one.next_starts().tolist()


@pytest.mark.parametrize("other", [{"seed": 1}, {"size": (999, 10)}, {"size": (1000, 9)}])
def test_a_position_in_other_data_is_rejected(other):
    state = make_sampler((1000, 10)).state_dict()
    with pytest.raises(ValueError, match=r"(seed|num_tokens|context_length) must be .* as in the"):
        make_sampler(**({"size": (1000, 10)} | other)).load_state_dict(state)


def test_epochs_and_seeds_differ_in_order_and_offset():
    def epoch(seed, number):
        sampler = make_sampler((10_000, 10), seed=seed)
        sampler.windows_seen = number * sampler.num_sequences
        return [int(sampler.next_starts()[0]) for _ in range(sampler.num_sequences)]

    orders = [epoch(seed, number) for seed in range(10) for number in range(2)]
    # every alignment comes up
    assert len({order[0] % 10 for order in orders}) > 6
    # two random orders of 1,000 agree at one index on average
    for a in orders:
        for b in orders:
            agreements = sum(i // 10 == j // 10 for i, j in zip(a, b))
            assert agreements < 10 or a is b


def test_every_order_of_a_few_windows_comes_equally_often():
    counts = Counter()
    for seed in range(2400):
        sampler = BatchSampler(41, 8, 4, seed=seed)
        counts[tuple(sampler.next_starts() // 8)] += 1
    assert sampler.num_sequences == 4
    assert len(counts) == 24
    # 99.99th percentile of chi-squared with 23 degrees of freedom
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 56


def test_order_is_the_same_on_every_platform_and_version():
    sampler = BatchSampler(100_000, 128, 6, seed=1234)
    assert sampler.next_starts().tolist() == [51584, 87040, 84608, 94976, 51328, 98944]


def test_a_huge_array_costs_no_memory():
    sampler = BatchSampler(10**14, 128, 4, seed=0)
    sampler.windows_seen = 10**11
    starts = sampler.next_starts()
    assert len(set(starts.tolist())) == 4
    assert (starts < 10**14).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
        ({"rank": -1}, "rank must be a whole number, at least 0, got -1"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, at least 1, got 2.5"),
        ({"seed": 1.5}, "seed must be a whole number, at least 0, got 1.5"),
        (
            {"batch_size": 50, "world_size": 2},
            r"batch_size 50 \* world_size 2 = 100 sequences per step, but 1,000 tokens give only",
        ),
    ],
)
def test_impossible_samplers_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        make_sampler((1000, 10), **options)


# Random tokens


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_random_tokens_fit_their_type(vocab_size, dtype):
    tokens = random_tokens(100_000, vocab_size, seed=0)
    assert tokens.dtype == dtype
    assert 0.99 * (vocab_size - 1) <= tokens.max() < vocab_size
    with pytest.raises(ValueError, match="vocab_size must be a whole number, at least 1, got 0"):
        random_tokens(1, 0, seed=0)


def test_random_tokens_depend_on_the_seed_alone():
    tokens = random_tokens(2_000_000, 7, seed=5)
    assert np.array_equal(tokens[:1000], random_tokens(1000, 7, seed=5))
    assert not np.array_equal(tokens[:1000], random_tokens(1000, 7, seed=6))
    around_the_end_of_a_block = tokens[(1 << 20) - 3 : (1 << 20) + 3]
    assert around_the_end_of_a_block.tolist() == [5, 1, 0, 5, 6, 2]
    assert np.ptp(np.bincount(tokens, minlength=7)) < 5 * (2_000_000 / 7) ** 0.5


@pytest.mark.parametrize("starts", [[-3], [98], [0.0]])
def test_a_sequence_must_begin_and_end_in_the_array(starts):
    with pytest.raises(ValueError, match="starts must be whole numbers from 0 to 97"):
        read_sequences(np.arange(100), np.array(starts), 2, "cpu")
