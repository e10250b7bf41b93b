"""Token arrays: complete or absent, verified when loaded."""

import errno
import os
import threading

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


class Idle(Tokenizer):
    """The same tokenizer, which must not be asked to encode."""

    def encode_stream(self, stream, **options):
        raise AssertionError("encoded once more")


def make_idle():
    tokenizer = make_tokenizer()
    tokenizer.__class__ = Idle
    return tokenizer


@pytest.fixture
def text_path(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8", newline="")
    return path


@pytest.mark.parametrize(("chunk_bytes", "workers"), [(16, 3), (64, 1), (1 << 20, 3)])
def test_an_array_holds_the_ids_of_the_text(text_path, tmp_path, monkeypatch, chunk_bytes, workers):
    monkeypatch.setattr(lib.data.token_array, "CHUNK_BYTES", chunk_bytes)
    output, calls = tmp_path / "new" / "out.npy", []
    options = {"workers": workers, "progress": calls.append}
    manifest = tokenize_file(make_tokenizer(), text_path, output, **options)
    tokens = load_token_array(output, tokenizer=make_tokenizer(), verify=True)
    # a plain .npy file
    assert tokens.tolist() == np.load(output).tolist() == make_tokenizer().encode(TEXT)
    assert tokens.dtype == np.uint16
    assert (manifest.num_tokens, manifest.source_bytes) == (len(tokens), len(TEXT.encode()))
    assert read_manifest(output) == manifest
    assert calls[0] == 0
    assert sum(calls) == len(TEXT.encode())
    assert sorted(os.listdir(output.parent)) == [".lock", "out.npy", "out.npy.json"]


def test_a_large_vocabulary_gives_four_bytes_per_id(text_path, tmp_path):
    vocab = make_tokenizer().vocab | {70_000: b"never"}
    tokenizer = Tokenizer(vocab, [], implementation="python")
    tokenize_file(tokenizer, text_path, tmp_path / "out.npy")
    assert load_token_array(tmp_path / "out.npy").dtype == np.uint32


def test_an_empty_text_gives_an_empty_array(tmp_path):
    (tmp_path / "empty.txt").touch()
    manifest = tokenize_file(make_tokenizer(), tmp_path / "empty.txt", tmp_path / "out.npy")
    assert manifest.num_tokens == 0
    assert len(load_token_array(tmp_path / "out.npy", verify=True)) == 0


def test_an_up_to_date_array_is_used_as_it_is_in_a_read_only_folder_too(
    text_path, tmp_path, monkeypatch
):
    manifest = tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy")

    def refuse(folder):
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(lib.data.token_array, "lock_folder", refuse)
    assert tokenize_file(make_idle(), text_path, tmp_path / "out.npy") == manifest


@pytest.mark.parametrize("change", ["text", "tokenizer", "length", "ids", "manifest"])
def test_an_array_is_made_again_when_what_it_came_from_changed(text_path, tmp_path, change):
    output = tmp_path / "out.npy"
    tokenize_file(make_tokenizer(), text_path, output)
    tokenizer = make_tokenizer(2 if change == "tokenizer" else 3)
    if change == "text":
        text_path.write_text(TEXT.replace("cat", "dog"))
    elif change == "length":
        output.write_bytes(output.read_bytes()[:-2])
    elif change == "ids":
        output.write_bytes(output.read_bytes()[:-2] + b"aa")
    elif change == "manifest":
        (tmp_path / "out.npy.json").unlink()
    tokenize_file(tokenizer, text_path, output)
    expected = tokenizer.encode(text_path.read_bytes().decode())
    assert load_token_array(output, tokenizer=tokenizer).tolist() == expected


def test_an_interrupted_run_leaves_the_array_of_before_or_none(text_path, tmp_path, monkeypatch):
    monkeypatch.setattr(lib.data.token_array, "CHUNK_BYTES", 64)
    folder = tmp_path / "out"
    output, calls = folder / "out.npy", []

    def interrupt(num_bytes):
        calls.append(num_bytes)
        if len(calls) > 5:
            raise KeyboardInterrupt

    for existing in ([], ["out.npy", "out.npy.json"]):
        with pytest.raises(KeyboardInterrupt):
            tokenize_file(make_tokenizer(), text_path, output, progress=interrupt)
        assert sorted(os.listdir(folder)) == [".lock", *existing]
        before = tokenize_file(make_tokenizer(2), text_path, output)
    assert tokenize_file(make_tokenizer(2), text_path, output) == before


def test_no_array_stands_beside_the_manifest_of_another(text_path, tmp_path, monkeypatch):
    """Not even when the machine stops while one replaces another."""
    output = tmp_path / "out.npy"
    tokenize_file(make_tokenizer(2), text_path, output)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(lib.data.token_array, "write_atomically", stop)
    with pytest.raises(KeyboardInterrupt):
        tokenize_file(make_tokenizer(), text_path, output)
    assert not output.exists()


def test_a_second_writer_waits_and_uses_the_array_of_the_first(text_path, tmp_path):
    output, seen = tmp_path / "out.npy", []

    def start_second(num_bytes):
        if not seen:
            arguments = (make_idle(), text_path, output)
            seen.append(threading.Thread(target=tokenize_file, args=arguments))
            seen[0].start()
            seen[0].join(timeout=0.2)
            assert seen[0].is_alive()

    tokenize_file(make_tokenizer(), text_path, output, progress=start_second)
    seen[0].join()
    assert load_token_array(output, verify=True).tolist() == make_tokenizer().encode(TEXT)


def test_text_that_changes_meanwhile_is_rejected(text_path, tmp_path):
    def grow(num_bytes):
        with open(text_path, "a") as file:
            file.write("more ")

    with pytest.raises(ValueError, match=r"text\.txt changed while"):
        tokenize_file(make_tokenizer(), text_path, tmp_path / "out.npy", progress=grow)
    assert not (tmp_path / "out.npy").exists()


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


def test_a_missing_array_or_manifest_is_named(array_path):
    array_path.with_suffix(".npy.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"out\.npy has no manifest .*out\.npy\.json"):
        load_token_array(array_path)
    array_path.unlink()
    with pytest.raises(FileNotFoundError, match=r"out\.npy; `python -m lib tokenize`"):
        load_token_array(array_path)


OTHER = make_tokenizer(2)
LENGTH = r"out\.npy must have .* bytes by its manifest"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda b: b, {"tokenizer": OTHER}, f"{make_tokenizer().sha256}.*{OTHER.sha256}"),
        *((change, {}, LENGTH) for change in (lambda b: b[:-2], lambda b: b + b"12")),
        (lambda b: b[:50], {}, LENGTH),
        (lambda b: b[:-1] + bytes([b[-1] ^ 1]), {"verify": True}, r"out\.npy was altered"),
    ],
)
def test_an_array_of_another_tokenizer_length_or_content_is_rejected(
    array_path, change, options, message
):
    array_path.write_bytes(change(array_path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        load_token_array(array_path, **options)


def test_output_that_does_not_end_in_npy_is_rejected(text_path, tmp_path):
    with pytest.raises(ValueError, match=r"output_path must end in \.npy, got .*out\.bin"):
        tokenize_file(make_tokenizer(), text_path, tmp_path / "out.bin")
