"""Token arrays: complete or absent, resumed after an interruption, verified when loaded."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import lib.data.token_array
from lib.data.token_array import load_token_array, read_manifest, tokenize_file
from lib.tokenizer.bpe import Tokenizer
from lib.tokenizer.pretokenize import SEPARATOR

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


def set_blocks(monkeypatch, chunk_bytes, journal_bytes):
    monkeypatch.setattr(lib.data.token_array, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(lib.data.token_array, "JOURNAL_BYTES", journal_bytes)


def test_an_array_holds_the_ids_of_the_text(text_path, tmp_path, monkeypatch):
    set_blocks(monkeypatch, 512, 512)
    output, calls = tmp_path / "new" / "out.npy", []
    manifest = tokenize_file(make_tokenizer(), text_path, output, progress=calls.append)
    tokens = load_token_array(output, tokenizer=make_tokenizer(), verify=True)
    assert tokens.tolist() == make_tokenizer().encode(TEXT)
    assert tokens.dtype == np.uint16
    assert (manifest.num_tokens, manifest.source_bytes) == (len(tokens), len(TEXT.encode()))
    assert read_manifest(output) == manifest
    assert sum(calls) == len(TEXT.encode())
    assert sorted(os.listdir(output.parent)) == [".lock", "out.npy", "out.npy.json"]


@pytest.mark.parametrize(("chunk_bytes", "workers"), [(16, 3), (64, 1), (1 << 20, 3)])
def test_an_array_does_not_depend_on_chunks_and_workers(
    text_path, tmp_path, monkeypatch, chunk_bytes, workers
):
    set_blocks(monkeypatch, chunk_bytes, 500)
    tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy", workers=workers)
    # a plain .npy file
    assert np.load(tmp_path / "out.npy").tolist() == make_tokenizer().encode(TEXT)


def test_a_large_vocabulary_gives_four_bytes_per_id(text_path, tmp_path):
    vocab = make_tokenizer().vocab | {70_000: b"never"}
    tokenizer = Tokenizer(vocab, [], implementation="python")
    tokenize_file(tokenizer, text_path, tmp_path / "out.npy")
    assert load_token_array(tmp_path / "out.npy").dtype == np.uint32


def test_an_up_to_date_array_is_used_as_it_is_in_a_read_only_folder_too(
    text_path, tmp_path, monkeypatch
):
    manifest = tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy")

    def refuse(folder):
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(lib.data.token_array, "lock_folder", refuse)
    tokenizer = make_counting()
    assert tokenize_file(tokenizer, text_path, tmp_path / "out.npy") == manifest
    assert tokenizer.encoded == 0


@pytest.mark.parametrize("change", ["text", "tokenizer", "length", "ids"])
def test_an_array_is_made_again_when_what_it_came_from_changed(text_path, tmp_path, change):
    output = tmp_path / "out.npy"
    tokenize_file(make_tokenizer(), text_path, output)
    tokenizer = make_counting()
    if change == "text":
        text_path.write_text(TEXT.replace("cat", "dog"))
    elif change == "tokenizer":
        tokenizer = make_tokenizer(2)
    elif change == "length":
        output.write_bytes(output.read_bytes()[:-2])
    else:
        output.write_bytes(output.read_bytes()[:-2] + b"aa")
    tokenize_file(tokenizer, text_path, output)
    expected = tokenizer.encode(text_path.read_bytes().decode())
    assert load_token_array(output, tokenizer=tokenizer).tolist() == expected


# Interruptions


def interrupt(text_path, output, **attributes):
    tokenizer = make_counting(fails_after=len(TEXT.encode()) // 2, **attributes)
    with pytest.MonkeyPatch.context() as patch:
        set_blocks(patch, 64, 256)
        with pytest.raises(tokenizer.error):
            tokenize_file(tokenizer, text_path, output)


def test_an_interrupted_run_resumes_where_it_was(text_path, tmp_path):
    output = tmp_path / "out.npy"
    interrupt(text_path, output)
    assert not output.exists()
    with pytest.raises(ValueError, match=r"pickle|magic|header"):
        np.load(f"{output}.partial")
    # bytes written after the last journal entry are not trusted
    with open(f"{output}.partial", "ab") as file:
        file.write(b"torn page" * 1000)
    tokenizer, calls = make_counting(), []
    tokenize_file(tokenizer, text_path, output, progress=calls.append)
    assert calls[0] >= len(TEXT.encode()) // 2 - 512
    assert tokenizer.encoded == len(TEXT.encode()) - calls[0]
    assert load_token_array(output, verify=True).tolist() == make_tokenizer().encode(TEXT)


def damage_journal(path: Path, **done: int) -> None:
    """Change what the journal says is done, in bytes of text or tokens."""
    journal = json.loads(path.read_text())
    now = dict(zip(("bytes", "tokens"), journal["done"]))
    journal["done"] = [value + done.get(name, 0) for name, value in now.items()]
    path.write_text(json.dumps(journal))


@pytest.mark.parametrize(
    "change", ["text", "tokenizer", "journal", "shorter", "bytes", "tokens", "ids"]
)
def test_a_partial_file_of_something_else_is_begun_anew(text_path, tmp_path, change):
    output = tmp_path / "out.npy"
    interrupt(text_path, output)
    tokenizer = make_tokenizer()
    if change == "text":
        text_path.write_text(TEXT.replace("cat", "dog"))
    elif change == "tokenizer":
        tokenizer = make_tokenizer(2)
    elif change == "journal":
        Path(f"{output}.partial.json").write_text('{"bytes_')
    elif change in ("bytes", "tokens"):
        damage_journal(Path(f"{output}.partial.json"), **{change: -20})
    elif change == "ids":
        with open(f"{output}.partial", "r+b") as file:
            file.seek(300)
            file.write(b"xx")
    else:
        os.truncate(f"{output}.partial", 200)
    calls = []
    tokenize_file(tokenizer, text_path, output, progress=calls.append)
    assert calls[0] == 0
    expected = tokenizer.encode(text_path.read_bytes().decode())
    assert load_token_array(output, verify=True).tolist() == expected


def test_a_partial_file_that_cannot_be_resumed_is_removed(text_path, tmp_path):
    output = tmp_path / "out" / "out.npy"
    tokenizer = make_counting(fails_after=0)
    with pytest.raises(KeyboardInterrupt):
        tokenize_file(tokenizer, text_path, output)
    assert os.listdir(output.parent) == [".lock"]


KILLED = """
import sys, time
import lib.data.token_array
from tests.data.test_token_array import make_tokenizer, tokenize_file

lib.data.token_array.CHUNK_BYTES, lib.data.token_array.JOURNAL_BYTES = 64, 256
done = 0

def hang_half_way(num_bytes):
    global done
    done += num_bytes
    if done > 2000:
        time.sleep(60)

tokenize_file(make_tokenizer(), *sys.argv[1:], progress=hang_half_way)
"""


def test_a_killed_run_resumes_and_gives_the_same_array(text_path, tmp_path):
    output = tmp_path / "out.npy"
    journal = Path(f"{output}.partial.json")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(text_path), str(output)],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
    )
    while process.poll() is None:
        if journal.exists() and json.loads(journal.read_bytes())["done"][0] > 1000:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    assert process.wait() == -signal.SIGKILL, process.stderr.read().decode()
    assert not output.exists()
    calls = []
    tokenize_file(make_tokenizer(), text_path, output, progress=calls.append)
    assert calls[0] > 1000
    tokenize_file(make_tokenizer(), text_path, tmp_path / "whole.npy")
    assert output.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert read_manifest(output) == read_manifest(tmp_path / "whole.npy")


def test_a_second_writer_waits_and_uses_the_array_of_the_first(text_path, tmp_path):
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


def test_text_that_changes_meanwhile_is_rejected(text_path, tmp_path):
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
    write = lib.data.token_array.write_atomically

    def stop(path, content):
        if Path(path).name == "out.npy.json":
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(lib.data.token_array, "write_atomically", stop)
    with pytest.raises(KeyboardInterrupt):
        tokenize_file(make_tokenizer(), text_path, output)
    with pytest.raises(FileNotFoundError, match=r"out\.npy has no manifest .*out\.npy\.json"):
        load_token_array(output)


# Full disk


@pytest.mark.parametrize("journal_bytes", [1 << 30, 1 << 15])
def test_a_full_disk_names_the_file_and_what_it_needs(tmp_path, monkeypatch, journal_bytes):
    set_blocks(monkeypatch, 4096, journal_bytes)
    text, output = TEXT * 200, tmp_path / "out.npy"
    (tmp_path / "text.txt").write_text(text)
    error = OSError(errno.ENOSPC, "No space left on device")
    tokenizer = make_counting(fails_after=len(text.encode()) // 2, error=error)
    with pytest.raises(OSError, match=r"out\.npy: it needs about .* MB more") as caught:
        tokenize_file(tokenizer, tmp_path / "text.txt", output)
    assert caught.value.errno == errno.ENOSPC
    assert not output.exists()
    # without a journal nothing is kept, and the whole array still needs space
    whole = 2 * len(make_tokenizer().encode(text)) / 1e6
    is_kept = Path(f"{output}.partial").exists()
    assert is_kept == (journal_bytes == 1 << 15)
    needed = float(re.search(r"about ([\d.]+) MB", str(caught.value))[1])
    assert needed == pytest.approx(whole / 2 if is_kept else whole, abs=0.06)


# Loading


@pytest.fixture
def array_path(text_path, tmp_path):
    tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy")
    return tmp_path / "out.npy"


def test_a_loaded_array_is_mapped_and_read_only(array_path):
    tokens = load_token_array(array_path)
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_a_missing_array_says_how_to_make_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npy; `python -m lib tokenize`"):
        load_token_array(tmp_path / "none.npy")


def test_an_array_of_another_tokenizer_is_rejected(array_path):
    other = make_tokenizer(2)
    with pytest.raises(ValueError, match=f"{make_tokenizer().sha256}.*{other.sha256}"):
        load_token_array(array_path, tokenizer=other)


@pytest.mark.parametrize("change", [lambda b: b[:-2], lambda b: b + b"12", lambda b: b[:50]])
def test_an_array_of_another_length_is_rejected(array_path, change):
    array_path.write_bytes(change(array_path.read_bytes()))
    with pytest.raises(ValueError, match=r"out\.npy must have .* bytes by its manifest"):
        load_token_array(array_path)


def test_altered_ids_are_found_when_asked_for(array_path):
    content = bytearray(array_path.read_bytes())
    content[-1] ^= 1
    array_path.write_bytes(content)
    with pytest.raises(ValueError, match=r"out\.npy was altered"):
        load_token_array(array_path, verify=True)
