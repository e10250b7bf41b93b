"""Token arrays: whole or absent, taken up after an interruption. Batches: every window once."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lib.token_array
from lib.data import (
    BatchSampler,
    get_batch,
    load_token_array,
    random_tokens,
    read_manifest,
    take_windows,
    tokenize_file,
)
from lib.tokenizer import SEPARATOR, Tokenizer

TEXT = f"the cat sat on the mat, then the cat left.\n{SEPARATOR}\ndon’t là 東京\n" * 50


def make_tokenizer(num_merges=3):
    merges = [(b"t", b"h"), (b"th", b"e"), (b" ", b"the")][:num_merges]
    tokens = [bytes([i]) for i in range(256)] + [left + right for left, right in merges]
    return Tokenizer(dict(enumerate(tokens)), merges, [SEPARATOR], implementation="python")


class CountingTokenizer(Tokenizer):
    """Counts the bytes it was asked to encode, and can fail after some."""

    encoded = 0
    fails_after = float("inf")
    error = KeyboardInterrupt

    def encode_stream(self, stream, **options):
        for num_bytes, ids in super().encode_stream(stream, **options):
            if self.encoded >= self.fails_after:
                raise self.error
            self.encoded += num_bytes
            yield num_bytes, ids


def make_counting(**attributes):
    tokenizer = make_tokenizer()
    tokenizer.__class__ = CountingTokenizer
    vars(tokenizer).update(attributes)
    return tokenizer


@pytest.fixture
def text_path(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8", newline="")
    return path


# --- from text to token arrays --------------------------------------------------------------------


def test_array_holds_the_ids_of_the_text(text_path, tmp_path):
    output = tmp_path / "new" / "out.npy"
    manifest = tokenize_file(make_tokenizer(), text_path, output, chunk_bytes=100)
    tokens = load_token_array(output, tokenizer=make_tokenizer(), verify=True)
    assert tokens.tolist() == make_tokenizer().encode(TEXT)
    assert tokens.dtype == np.uint16
    assert (manifest.num_tokens, manifest.source_bytes) == (len(tokens), len(TEXT.encode()))
    assert read_manifest(output) == manifest


def test_array_is_a_plain_npy_file(text_path, tmp_path):
    tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy")
    assert np.load(tmp_path / "out.npy").tolist() == make_tokenizer().encode(TEXT)


@pytest.mark.parametrize("chunk_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("workers", [1, 3])
def test_array_does_not_depend_on_chunks_and_workers(text_path, tmp_path, chunk_bytes, workers):
    options = {"chunk_bytes": chunk_bytes, "workers": workers, "journal_bytes": 100}
    tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy", **options)
    assert np.load(tmp_path / "out.npy").tolist() == make_tokenizer().encode(TEXT)


def test_large_vocabulary_gives_four_bytes_an_id(text_path, tmp_path):
    vocab = make_tokenizer().vocab | {70_000: b"never"}
    tokenizer = Tokenizer(vocab, [], implementation="python")
    tokenize_file(tokenizer, text_path, tmp_path / "out.npy")
    assert load_token_array(tmp_path / "out.npy").dtype == np.uint32


def test_empty_text_gives_an_empty_array(tmp_path):
    (tmp_path / "empty.txt").touch()
    manifest = tokenize_file(make_tokenizer(), tmp_path / "empty.txt", tmp_path / "out.npy")
    assert manifest.num_tokens == 0
    assert len(load_token_array(tmp_path / "out.npy", verify=True)) == 0


def test_only_the_array_its_manifest_and_the_lock_remain(text_path, tmp_path):
    output = tmp_path / "out" / "out.npy"
    tokenize_file(make_tokenizer(), text_path, output, chunk_bytes=64, journal_bytes=64)
    assert sorted(os.listdir(output.parent)) == [".lock", "out.npy", "out.npy.json"]


def test_progress_adds_up_to_the_text(text_path, tmp_path):
    told = []
    for _ in range(2):
        told.clear()
        tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy", progress=told.append)
        assert sum(told) == len(TEXT.encode())


def test_an_array_that_is_up_to_date_is_not_made_again(text_path, tmp_path):
    output = tmp_path / "out.npy"
    manifest = tokenize_file(make_tokenizer(), text_path, output)
    before = output.stat()
    tokenizer = make_counting()
    assert tokenize_file(tokenizer, text_path, output) == manifest
    assert tokenizer.encoded == 0
    assert output.stat() == before


def test_an_up_to_date_array_in_a_read_only_folder_is_taken_as_it_is(
    text_path, tmp_path, monkeypatch
):
    manifest = tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy")

    def refuse(folder):
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(lib.token_array, "lock_folder", refuse)
    assert tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy") == manifest


@pytest.mark.parametrize("change", ["text", "tokenizer", "array"])
def test_an_array_is_made_again_when_what_it_came_from_changed(text_path, tmp_path, change):
    output = tmp_path / "out.npy"
    tokenize_file(make_tokenizer(), text_path, output)
    tokenizer = make_counting()
    if change == "text":
        text_path.write_text(TEXT.replace("cat", "dog"))
    elif change == "tokenizer":
        tokenizer = make_tokenizer(2)
    else:
        output.write_bytes(output.read_bytes()[:-2])
    tokenize_file(tokenizer, text_path, output)
    expected = tokenizer.encode(text_path.read_bytes().decode())
    assert load_token_array(output, tokenizer=tokenizer).tolist() == expected


# --- interruptions --------------------------------------------------------------------------------


def interrupt(text_path, output, **attributes):
    tokenizer = make_counting(fails_after=len(TEXT.encode()) // 2, **attributes)
    with pytest.raises(tokenizer.error):
        tokenize_file(tokenizer, text_path, output, chunk_bytes=64, journal_bytes=256)


def test_an_interrupted_run_is_taken_up_where_it_was(text_path, tmp_path):
    output = tmp_path / "out.npy"
    interrupt(text_path, output)
    assert not output.exists()
    tokenizer, told = make_counting(), []
    tokenize_file(tokenizer, text_path, output, progress=told.append)
    assert told[0] >= len(TEXT.encode()) // 2 - 512
    assert tokenizer.encoded == len(TEXT.encode()) - told[0]
    assert load_token_array(output, verify=True).tolist() == make_tokenizer().encode(TEXT)


def test_bytes_written_after_the_last_journal_entry_are_not_trusted(text_path, tmp_path):
    output = tmp_path / "out.npy"
    interrupt(text_path, output)
    with open(f"{output}.partial", "ab") as file:
        file.write(b"torn page" * 1000)
    tokenize_file(make_tokenizer(), text_path, output)
    assert load_token_array(output, verify=True).tolist() == make_tokenizer().encode(TEXT)


@pytest.mark.parametrize("change", ["text", "tokenizer", "journal", "shorter"])
def test_what_was_begun_for_something_else_is_begun_anew(text_path, tmp_path, change):
    output = tmp_path / "out.npy"
    interrupt(text_path, output)
    tokenizer = make_tokenizer()
    if change == "text":
        text_path.write_text(TEXT.replace("cat", "dog"))
    elif change == "tokenizer":
        tokenizer = make_tokenizer(2)
    elif change == "journal":
        Path(f"{output}.partial.json").write_text('{"bytes_')
    else:
        os.truncate(f"{output}.partial", 200)
    told = []
    tokenize_file(tokenizer, text_path, output, progress=told.append)
    assert told[0] == 0
    expected = tokenizer.encode(text_path.read_bytes().decode())
    assert load_token_array(output, verify=True).tolist() == expected


def test_a_partial_file_that_nobody_can_go_on_from_is_removed(text_path, tmp_path):
    output = tmp_path / "out" / "out.npy"
    tokenizer = make_counting(fails_after=0)
    with pytest.raises(KeyboardInterrupt):
        tokenize_file(tokenizer, text_path, output)
    assert os.listdir(output.parent) == [".lock"]


def test_a_partial_file_cannot_be_loaded(text_path, tmp_path):
    output = tmp_path / "out.npy"
    interrupt(text_path, output)
    with pytest.raises(ValueError, match=r"pickle|magic|header"):
        np.load(f"{output}.partial")


KILLED = """
import sys, time
from tests.test_data import make_tokenizer, tokenize_file

done = 0

def hang_half_way(num_bytes):
    global done
    done += num_bytes
    if done > 2000:
        time.sleep(60)

tokenize_file(make_tokenizer(), *sys.argv[1:], chunk_bytes=64, journal_bytes=256,
              progress=hang_half_way)
"""


def test_a_killed_run_is_taken_up_and_gives_the_same_array(text_path, tmp_path):
    output = tmp_path / "out.npy"
    journal = Path(f"{output}.partial.json")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(text_path), str(output)],
        cwd=Path(__file__).parents[1],
        stderr=subprocess.PIPE,
    )
    while process.poll() is None:
        if journal.exists() and json.loads(journal.read_bytes())["done"][0] > 1000:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    assert process.wait() == -signal.SIGKILL, process.stderr.read().decode()
    assert not output.exists()
    told = []
    tokenize_file(make_tokenizer(), text_path, output, progress=told.append)
    assert told[0] > 1000
    tokenize_file(make_tokenizer(), text_path, tmp_path / "whole.npy")
    assert output.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert read_manifest(output) == read_manifest(tmp_path / "whole.npy")


def test_a_second_writer_waits_and_takes_what_the_first_made(text_path, tmp_path):
    output = tmp_path / "out.npy"
    second, seen = make_counting(), []

    def start_second(num_bytes):
        if not seen:
            seen.append(threading.Thread(target=tokenize_file, args=(second, text_path, output)))
            seen[0].start()
            seen[0].join(timeout=0.2)
            assert seen[0].is_alive()

    tokenize_file(make_tokenizer(), text_path, output, progress=start_second)
    seen[0].join()
    assert second.encoded == 0
    assert load_token_array(output, verify=True).tolist() == make_tokenizer().encode(TEXT)


def test_text_that_changes_meanwhile_is_refused(text_path, tmp_path):
    def grow(num_bytes):
        with open(text_path, "a") as file:
            file.write("more ")

    with pytest.raises(ValueError, match=r"text\.txt changed while"):
        tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy", progress=grow)
    assert not (tmp_path / "out.npy").exists()


def test_an_array_without_its_manifest_is_not_trusted(text_path, tmp_path, monkeypatch):
    """As when the machine stops between the two renames at the end."""
    output = tmp_path / "out.npy"
    tokenize_file(make_tokenizer(2), text_path, output)
    write = lib.token_array.write_atomically

    def stop(path, content):
        if Path(path).name == "out.npy.json":
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(lib.token_array, "write_atomically", stop)
    with pytest.raises(KeyboardInterrupt):
        tokenize_file(make_tokenizer(), text_path, output)
    with pytest.raises(FileNotFoundError, match=r"out\.npy has no manifest .*out\.npy\.json"):
        load_token_array(output)


# --- full disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal_bytes", [1 << 30, 1 << 15])
def test_a_full_disk_is_told_with_the_file_and_what_it_needs(tmp_path, journal_bytes):
    text, output = TEXT * 200, tmp_path / "out.npy"
    (tmp_path / "text.txt").write_text(text)
    error = OSError(errno.ENOSPC, "No space left on device")
    tokenizer = make_counting(fails_after=len(text.encode()) // 2, error=error)
    with pytest.raises(OSError, match=r"out\.npy: it needs about .* MB more") as caught:
        tokenize_file(
            tokenizer, tmp_path / "text.txt", output, chunk_bytes=4096, journal_bytes=journal_bytes
        )
    assert caught.value.errno == errno.ENOSPC
    assert not output.exists()
    # without a journal nothing is kept, and the whole array has yet to find its place
    whole = 2 * len(make_tokenizer().encode(text)) / 1e6
    is_kept = Path(f"{output}.partial").exists()
    assert is_kept == (journal_bytes == 1 << 15)
    needed = float(re.search(r"about ([\d.]+) MB", str(caught.value))[1])
    assert needed == pytest.approx(whole / 2 if is_kept else whole, abs=0.06)


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs")
def test_on_a_disk_that_is_really_full_nothing_half_written_is_taken_for_whole(tmp_path):
    disk, text_path = tmp_path / "disk", tmp_path / "text.txt"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        text_path.write_text(TEXT * 60)
        output = disk / "out.npy"
        options = {"chunk_bytes": 1 << 14, "journal_bytes": 1 << 15}
        with pytest.raises(OSError, match=r"out\.npy: it needs about 0\.\d MB more"):
            tokenize_file(make_tokenizer(), text_path, output, **options)
        with pytest.raises(FileNotFoundError):
            load_token_array(output)
        # with more room, the same call goes on
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        told = []
        tokenize_file(make_tokenizer(), text_path, output, progress=told.append, **options)
        assert told[0] > 0
        loaded = load_token_array(output, verify=True)
        assert loaded.tolist() == make_tokenizer().encode(TEXT * 60)
        del loaded
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- loading --------------------------------------------------------------------------------------


@pytest.fixture
def array_path(text_path, tmp_path):
    tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy")
    return tmp_path / "out.npy"


def test_loaded_array_is_mapped_and_read_only(array_path):
    tokens = load_token_array(array_path)
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_missing_array_says_how_to_make_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npy; `python -m lib tokenize`"):
        load_token_array(tmp_path / "none.npy")


def test_array_of_another_tokenizer_is_refused_by_its_name(array_path):
    other = make_tokenizer(2)
    with pytest.raises(ValueError, match=f"{make_tokenizer().sha256}.*{other.sha256}"):
        load_token_array(array_path, tokenizer=other)


@pytest.mark.parametrize("change", [lambda b: b[:-2], lambda b: b + b"12", lambda b: b[:50]])
def test_array_of_another_length_is_refused(array_path, change):
    array_path.write_bytes(change(array_path.read_bytes()))
    with pytest.raises(ValueError, match=r"out\.npy has .* bytes; its manifest tells of .* ids"):
        load_token_array(array_path)


def test_altered_ids_are_found_when_asked_for(array_path):
    content = bytearray(array_path.read_bytes())
    content[-1] ^= 1
    array_path.write_bytes(content)
    with pytest.raises(ValueError, match=r"out\.npy was altered"):
        load_token_array(array_path, verify=True)


def test_output_that_does_not_end_in_npy_is_refused(text_path, tmp_path):
    with pytest.raises(ValueError, match=r"out\.bin'; right is: a name ending in \.npy"):
        tokenize_file(make_tokenizer(), text_path, tmp_path / "out.bin")


# --- batches --------------------------------------------------------------------------------------


def test_targets_are_the_inputs_moved_by_one():
    dataset = np.arange(100, dtype=np.uint16)
    x, y = get_batch(dataset, 32, 7, "cpu")
    assert x.shape == y.shape == (32, 7)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x + 1, y)
    assert torch.equal(x, x[:, :1] + torch.arange(7))


def test_every_place_is_drawn_about_equally_often():
    dataset = np.arange(100)
    generator = np.random.default_rng(0)
    counts = Counter()
    for _ in range(1000):
        counts.update(get_batch(dataset, 32, 7, "cpu", generator=generator)[0][:, 0].tolist())
    assert set(counts) == set(range(93))
    expected = 32_000 / 93
    assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5


def test_same_generator_state_gives_the_same_batch():
    batches = [
        get_batch(np.arange(1000), 4, 8, "cpu", generator=np.random.default_rng(3))[0]
        for _ in range(2)
    ]
    assert torch.equal(*batches)


def test_ids_above_the_signed_range_survive():
    x, _ = get_batch(np.full(10, 65535, np.uint16), 1, 4, "cpu")
    assert x.tolist() == [[65535] * 4]


def test_data_of_one_window_gives_that_window():
    x, y = get_batch(np.arange(5), 2, 4, "cpu")
    assert x.tolist() == [[0, 1, 2, 3]] * 2
    assert y.tolist() == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize("make", [get_batch, lambda d, b, c, _: BatchSampler(len(d), c, b, seed=0)])
def test_context_longer_than_the_data_is_refused(make):
    with pytest.raises(
        ValueError, match="context_length is 5, which needs 6 tokens; the data has 5"
    ):
        make(np.arange(5), 1, 5, "cpu")


def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises((RuntimeError, AssertionError)):
        get_batch(np.arange(100), 1, 7, "cuda:99")


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_on_the_cpu():
    starts = np.arange(0, 64, 8)
    for gpu, cpu in zip(*(take_windows(np.arange(100), starts, 8, d) for d in ("cuda", "cpu"))):
        assert gpu.is_cuda
        assert torch.equal(gpu.cpu(), cpu)


# --- the sampler ----------------------------------------------------------------------------------

sizes = st.tuples(st.integers(2, 400), st.integers(1, 12)).filter(lambda s: s[0] > s[1])


def make_sampler(size, batch_size=1, **options):
    return BatchSampler(*size, batch_size, **({"seed": 0} | options))


@given(size=sizes, seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_an_epoch_visits_each_window_once_and_none_overlap(size, seed, epoch):
    sampler = make_sampler(size, seed=seed)
    sampler.windows_seen = epoch * sampler.num_windows
    starts = sorted(int(sampler.next_starts()[0]) for _ in range(sampler.num_windows))
    assert (np.diff(starts) == size[1]).all()
    assert starts[0] >= 0
    assert starts[-1] + size[1] < size[0]


def test_windows_stay_inside_of_data_that_is_hardly_longer_than_one():
    for num_tokens in range(6, 16):
        for seed in range(30):
            start = int(make_sampler((num_tokens, 5), seed=seed).next_starts()[0])
            assert 0 <= start <= num_tokens - 6


@given(size=sizes)
def test_an_epoch_leaves_out_less_than_two_windows(size):
    sampler = make_sampler(size)
    left_out = size[0] - 1 - sampler.num_windows * size[1]
    assert 0 <= left_out < 2 * size[1]


@settings(max_examples=50)
@given(size=sizes, batch_size=st.integers(1, 3), world_size=st.integers(1, 4))
def test_ranks_together_see_what_one_process_would(size, batch_size, world_size):
    num_windows = make_sampler(size).num_windows
    if batch_size * world_size > num_windows:
        return
    one = make_sampler(size, batch_size * world_size)
    ranks = [
        make_sampler(size, batch_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for _ in range(2 * num_windows // (batch_size * world_size) + 2):
        together = np.concatenate([sampler.next_starts() for sampler in ranks])
        assert together.tolist() == one.next_starts().tolist()


@settings(max_examples=50)
@given(size=sizes, before=st.integers(0, 200))
def test_a_saved_position_is_taken_up_exactly(size, before):
    sampler = make_sampler(size)
    for _ in range(before):
        sampler.next_starts()
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = [sampler.next_starts().tolist() for _ in range(5)]
    taken_up = make_sampler(size)
    taken_up.next_starts()
    taken_up.load_state_dict(state)
    assert [taken_up.next_starts().tolist() for _ in range(5)] == expected


def test_training_goes_on_with_another_number_of_ranks():
    one = make_sampler((1000, 10), 4)
    one.next_starts()
    ranks = [make_sampler((1000, 10), 2, rank=rank, world_size=2) for rank in range(2)]
    for sampler in ranks:
        sampler.load_state_dict(one.state_dict())
    together = np.concatenate([sampler.next_starts() for sampler in ranks])
    assert together.tolist() == one.next_starts().tolist()


@pytest.mark.parametrize("other", [{"seed": 1}, {"size": (999, 10)}, {"size": (1000, 9)}])
def test_a_position_in_other_data_is_refused(other):
    state = make_sampler((1000, 10)).state_dict()
    with pytest.raises(
        ValueError, match=r"the saved position has (seed|num_tokens|context_length)"
    ):
        make_sampler(**({"size": (1000, 10)} | other)).load_state_dict(state)


def test_epochs_and_seeds_differ_in_order_and_offset():
    def epoch(seed, number):
        sampler = make_sampler((10_000, 10), seed=seed)
        sampler.windows_seen = number * sampler.num_windows
        return [int(sampler.next_starts()[0]) for _ in range(sampler.num_windows)]

    orders = [epoch(0, 0), epoch(0, 1), epoch(1, 0)]
    assert len({order[0] % 10 for order in orders}) > 1
    # two random orders of 1,000 agree in one place on average
    for a in orders:
        for b in orders:
            agreements = sum(i // 10 == j // 10 for i, j in zip(a, b))
            assert agreements < 10 or a is b


def test_every_order_of_a_few_windows_comes_equally_often():
    counts = Counter()
    for seed in range(4800):
        sampler = BatchSampler(41, 8, 4, seed=seed)
        counts[tuple(sampler.next_starts() // 8)] += 1
    assert sampler.num_windows == 4
    assert len(counts) == 24
    # 99.99th percentile of chi-squared with 23 degrees of freedom
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 56


def test_offsets_cover_every_alignment():
    offsets = Counter(int(make_sampler((100, 7), seed=s).next_starts()[0]) % 7 for s in range(700))
    assert set(offsets) == set(range(7))


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
        ({"rank": 2, "world_size": 2}, "rank is 2; right with world_size 2: 0 to 1"),
        ({"rank": -1}, "rank is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        (
            {"batch_size": 50, "world_size": 2},
            r"batch_size 50 \* world_size 2 = 100 windows a step, but 1,000 tokens give only 99",
        ),
    ],
)
def test_impossible_samplers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_sampler((1000, 10), **options)


# --- random tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_random_tokens_fit_their_type(vocab_size, dtype):
    tokens = random_tokens(100_000, vocab_size, seed=0)
    assert tokens.dtype == dtype
    assert 0.99 * vocab_size < tokens.max() < vocab_size


def test_random_tokens_depend_on_the_seed_alone():
    tokens = random_tokens(2_000_000, 7, seed=5)
    assert np.array_equal(tokens[:1000], random_tokens(1000, 7, seed=5))
    assert not np.array_equal(tokens[:1000], random_tokens(1000, 7, seed=6))
    assert np.ptp(np.bincount(tokens)) < 5 * (2_000_000 / 7) ** 0.5
