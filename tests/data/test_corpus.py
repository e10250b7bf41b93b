"""Corpora: made once, split without overlap, downloaded whole."""

import errno
import hashlib
import http.server
import json
import os
import re
import threading
import tracemalloc
from pathlib import Path

import pytest

from lib.data import corpus as corpus_module
from lib.data.corpus import Corpus, RemoteFile, download, prepare_corpus, split_own_text
from lib.data.stories import generate_stories
from lib.tokenizer.pretokenize import SEPARATOR


def test_prepared_stories_are_the_generated_ones(tmp_path):
    done = []
    made = prepare_corpus("stories", tmp_path, num_bytes=100_000, seed=4, progress=done.append)
    for split, size in (("train", 100_000), ("validation", 5_000)):
        text = getattr(made, split).read_bytes()
        assert text == "".join(generate_stories(size, seed=4, split=split)).encode()
        assert hashlib.sha256(text).hexdigest() == getattr(made, f"{split}_sha256")
    assert made.train == tmp_path / made.name / "train.txt"
    assert made.validation == tmp_path / made.name / "validation.txt"
    assert sum(done) == made.train.stat().st_size + made.validation.stat().st_size
    # and not made again
    done.clear()
    again = prepare_corpus("stories", tmp_path, num_bytes=100_000, seed=4, progress=done.append)
    assert (again, done) == (made, [])
    assert sorted(path.name for path in made.train.parent.iterdir()) == [
        "corpus.json",
        "train.txt",
        "validation.txt",
    ]


@pytest.mark.parametrize("change", ["altered", "missing"])
@pytest.mark.parametrize("name", ["train.txt", "validation.txt", "corpus.json"])
def test_an_altered_or_missing_file_is_made_again(tmp_path, name, change):
    made = prepare_corpus("stories", tmp_path, num_bytes=20_000)
    path = made.train.parent / name
    content = path.read_bytes()
    if change == "altered":
        path.write_bytes(content.replace(b"e", b"E", 1))
    else:
        path.unlink()
    assert prepare_corpus("stories", tmp_path, num_bytes=20_000) == made
    assert path.read_bytes() == content


def test_other_settings_get_another_folder(tmp_path):
    settings = [{"num_bytes": 10_000}, {"num_bytes": 9_000}, {"num_bytes": 10_000, "seed": 1}]
    settings += [{"num_bytes": 10_000, "validation_fraction": 0.2}]
    made = [prepare_corpus("stories", tmp_path, **setting) for setting in settings]
    assert len({one.train for one in made}) == len({one.train_sha256 for one in made[:3]}) + 1 == 4
    assert all(one.train.exists() for one in made)


@pytest.mark.parametrize("fraction", [0, 0.6])
def test_a_wrong_fraction_is_named(tmp_path, fraction):
    with pytest.raises(ValueError, match=f"validation_fraction must be .* got {fraction}"):
        prepare_corpus("stories", tmp_path, validation_fraction=fraction)


# The user's own text


def prepare(path: Path, tmp_path: Path, **arguments) -> tuple[bytes, bytes]:
    made = prepare_corpus(str(path), tmp_path / "data", **arguments)
    return made.train.read_bytes(), made.validation.read_bytes()


def write_folder(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


@pytest.mark.parametrize(("fraction", "every"), [(0.05, 20), (0.25, 4), (0.5, 2)])
def test_documents_are_held_out_whole(tmp_path, fraction, every):
    documents = [f"\nDocument {i}.\r\n\r\nIt ends.\n" for i in range(40)]
    path = tmp_path / "many.txt"
    path.write_bytes((SEPARATOR.join(documents) + SEPARATOR + " \n").encode())
    train, validation = prepare(path, tmp_path, validation_fraction=fraction)
    assert validation.decode().split(SEPARATOR) == documents[every - 1 :: every]
    rest = [document for i, document in enumerate(documents) if i % every != every - 1]
    assert train.decode().split(SEPARATOR) == rest


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_one_document_is_cut_between_paragraphs(tmp_path, newline):
    lines = [f"Line {i}." + newline * (2 if i % 3 == 2 else 1) for i in range(300)]
    path = tmp_path / "one.txt"
    path.write_bytes("".join(lines).encode())
    train, validation = prepare(path, tmp_path, validation_fraction=0.1)
    assert train + validation == path.read_bytes()
    assert train.endswith((newline * 2).encode())
    assert 0.05 < len(validation) / len(train + validation) < 0.15


@pytest.mark.parametrize(
    ("text", "train", "validation"),
    [
        ("a line\nanother line\nlast line", "a line\nanother line\n", "last line"),
        ("a b c d e f g h", "a b c d e f ", "g h"),
        (f"One.{SEPARATOR}Two.", f"One.{SEPARATOR}", "Two."),
        ("Title\n\n" + "word " * 99, "Title\n\n" + "word " * 94, "word " * 5),
        ("\n\nOne.\nTwo.\n\n", "\n\nOne.\n", "Two.\n\n"),
        # a long text without spaces, between characters
        (
            "今天天气很好，我们去公园玩。" * 20,
            "今天天气很好，我们去公园玩。" * 19,
            "今天天气很好，我们去公园玩。",
        ),
    ],
)
def test_short_text_is_cut_where_it_can_be(tmp_path, text, train, validation):
    path = tmp_path / "short.txt"
    path.write_bytes(text.encode())
    fraction = 0.2 if text.startswith("a b") else 0.05
    parts = prepare(path, tmp_path, validation_fraction=fraction)
    assert parts == (train.encode(), validation.encode())


def test_a_folder_is_read_in_sorted_order(tmp_path):
    files = {f"{i:02}.txt": f"Text {i}\n" for i in range(20)}
    files |= {"sub/a.MD": "Markdown", "a/z.txt": "Deep", "skip.py": "no", "x.csv": "no"}
    folder = write_folder(tmp_path / "texts", files)
    train, validation = prepare(folder, tmp_path)
    documents = [f"Text {i}\n" for i in range(20)] + ["Deep", "Markdown"]
    assert train.decode().split(SEPARATOR) == documents[:19] + documents[20:]
    assert validation.decode() == documents[19]


def test_a_byte_order_mark_is_dropped_from_each_file(tmp_path):
    files = {"a.txt": "\ufeffOne \ufeff.\n", "b.txt": "\ufeffTwo.\n"}
    train, validation = prepare(write_folder(tmp_path / "texts", files), tmp_path)
    assert (train + validation).decode() == f"One \ufeff.\n{SEPARATOR}Two.\n"


@pytest.mark.parametrize("block_bytes", [1, 3, 7, 1 << 20])
def test_invalid_bytes_are_replaced_and_counted(tmp_path, monkeypatch, block_bytes, caplog):
    monkeypatch.setattr(corpus_module, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "bad.txt"
    path.write_bytes("Fine: é€😀\ufffd.\n".encode() + b"Bad: \xff and \xe2\x82.\nCut: \xf0\x9f")
    with caplog.at_level("WARNING"):
        train, validation = prepare(path, tmp_path)
    text = (train + validation).decode()
    assert text == "Fine: é€😀\ufffd.\nBad: \ufffd and \ufffd.\nCut: \ufffd"
    assert "bad.txt: 3 invalid UTF-8 sequences became U+FFFD" in caplog.text
    # nothing is said of a U+FFFD that was there
    caplog.clear()
    path.write_text("Grüße.\n\n\ufffd\n", encoding="utf-8")
    prepare(path, tmp_path)
    assert not caplog.text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le"])
def test_a_text_in_another_encoding_is_refused_with_its_path(tmp_path, encoding):
    path = tmp_path / "windows.txt"
    path.write_text("Once upon a time.\n" * 99, encoding=encoding)
    with pytest.raises(ValueError, match=r"windows\.txt must be UTF-8 text, but begins as UTF-16"):
        prepare_corpus(str(path), tmp_path / "data")


def test_a_name_that_is_not_utf8_is_a_name(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text("Once upon a time.\n" * 99)
    assert prepare_corpus(str(path), tmp_path / "data").train.read_text().startswith("Once")


@pytest.mark.parametrize("block_bytes", [1, 5, 64])
def test_block_size_does_not_change_the_parts(tmp_path, monkeypatch, block_bytes):
    text = SEPARATOR.join(["One <|endof", "text|> ", "\n", "Zwölf.\n\nMehr.\n"]) + "<|endoftext|"
    path = tmp_path / "mixed.txt"
    path.write_bytes(text.encode())
    whole = prepare(path, tmp_path, validation_fraction=0.4)
    monkeypatch.setattr(corpus_module, "BLOCK_BYTES", block_bytes)
    assert whole == prepare(path, tmp_path / "again", validation_fraction=0.4)


@pytest.mark.parametrize("separator", ["", SEPARATOR])
def test_memory_stays_flat(tmp_path, monkeypatch, separator):
    monkeypatch.setattr(corpus_module, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(corpus_module, "CUT_SEARCH_BYTES", 1 << 15)
    path = tmp_path / "long.txt"
    with path.open("w") as file:
        for i in range(30):
            file.write(f"{i} " * 50_000 + separator)
    assert path.stat().st_size >= 4_000_000
    tracemalloc.start()
    train, validation = tmp_path / "train", tmp_path / "validation"
    with train.open("wb") as left, validation.open("wb") as right:
        split_own_text([path], left, right, fraction=0.05, progress=lambda num_bytes: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_500_000
    assert min(train.stat().st_size, validation.stat().st_size) > 100_000


def test_files_of_one_name_do_not_collide(tmp_path):
    for folder in ("a", "b"):
        write_folder(tmp_path, {f"{folder}/notes.txt": f"In {folder}.\nTwo.\n"})
    made = [prepare_corpus(str(tmp_path / name / "notes.txt"), tmp_path) for name in ("a", "b")]
    assert made[0].train != made[1].train
    assert [one.train.read_text() for one in made] == ["In a.\n", "In b.\n"]
    assert all(one.name.startswith("notes-") for one in made)


def test_changed_sources_are_noticed_but_what_was_made_is_none(tmp_path):
    folder = write_folder(tmp_path / "texts", {"a.txt": "One.\n\nTwo.\n"})
    first = prepare_corpus(str(folder), folder / "data")
    assert prepare_corpus(str(folder), folder / "data") == first
    write_folder(folder, {"b.txt": "Three.\n"})
    second = prepare_corpus(str(folder), folder / "data")
    assert second.name == first.name
    assert second.validation_sha256 != first.validation_sha256
    assert json.loads((second.train.parent / "corpus.json").read_text())["recipe"]["files"]


@pytest.mark.parametrize(
    ("files", "source", "error", "message"),
    [
        ({}, "none.txt", FileNotFoundError, "'tinystories', or an existing file or folder, got"),
        ({"texts/a.py": "x"}, "texts", FileNotFoundError, "texts' holds no .txt or .md file"),
        ({"empty.txt": ""}, "empty.txt", ValueError, "empty.txt' holds no text"),
        ({"blank.txt": " \n\n"}, "blank.txt", ValueError, "blank.txt' holds no text"),
        ({"texts/a.txt": "", "texts/b/c.md": ""}, "texts", ValueError, "texts' holds no text"),
        ({"word.txt": "word\n"}, "word.txt", ValueError, "word.txt' is too short to split"),
    ],
)
def test_useless_sources_are_rejected(tmp_path, files, source, error, message):
    write_folder(tmp_path, files)
    with pytest.raises(error, match=re.escape(message)):
        prepare_corpus(str(tmp_path / source), tmp_path / "data")
    data = tmp_path / "data"
    assert not [path for path in data.rglob("*") if path.is_file()]


# Downloads


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `content`, with ranges; breaks each answer off after the next number of `cuts`."""

    content = b""
    cuts: tuple[int, ...] = ()
    ranges = True
    requests: tuple = ()

    def do_GET(self):
        cls = type(self)
        cls.requests += (self.headers.get("Range"),)
        start = 0
        if self.ranges and self.headers.get("Range"):
            start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
        if self.path == "/missing.txt":
            return self.send_error(404)
        if start >= len(self.content):
            return self.send_error(416)
        body = self.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if cls.cuts:
            body, cls.cuts = body[: cls.cuts[0]], cls.cuts[1:]
        self.wfile.write(body)
        self.close_connection = True
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """The class of a running server: set what it serves; its address is in `url`."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    handler = type("OneServer", (Server,), {"content": b"Once upon a time. " * 2_000})
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.url = f"http://127.0.0.1:{running.server_port}/stories.txt"
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    yield handler
    running.shutdown()
    running.server_close()


@pytest.fixture
def remote(server, monkeypatch) -> RemoteFile:
    monkeypatch.setattr(corpus_module, "DOWNLOAD_BYTES", 1_000)
    digest = hashlib.sha256(server.content).hexdigest()
    return RemoteFile(server.url, len(server.content), digest)


def fetch(remote: RemoteFile, folder: Path) -> list[int]:
    done: list[int] = []
    path = download(remote, folder, progress=done.append)
    assert path == folder / "stories.txt"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == remote.sha256
    assert [file.name for file in folder.iterdir()] == ["stories.txt"]
    return done


def test_a_download_arrives_complete_and_only_once(server, remote, tmp_path):
    assert sum(fetch(remote, tmp_path)) == remote.num_bytes
    assert fetch(remote, tmp_path) == []
    assert server.requests == (None,)


def test_a_download_resumes_where_it_was_cut_at_once_and_in_the_next_run(server, remote, tmp_path):
    server.cuts = (10_000, 5_000, 0)
    with pytest.raises(ConnectionError, match="Try again to resume"):
        fetch(remote, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["stories.txt.part"]
    done = fetch(remote, tmp_path)
    assert done[0] == 15_000
    assert sum(done) == remote.num_bytes
    assert server.requests == (None, "bytes=10000-", *["bytes=15000-"] * 2)
    # a part that is complete already is taken
    (tmp_path / "stories.txt").rename(tmp_path / "stories.txt.part")
    assert fetch(remote, tmp_path) == [remote.num_bytes]


def test_a_server_without_ranges_starts_over(server, remote, tmp_path):
    server.cuts, server.ranges = (10_000,), False
    assert sum(fetch(remote, tmp_path)) == remote.num_bytes


def test_wrong_content_is_rejected_and_deleted(server, remote, tmp_path):
    right, server.content = server.content, server.content.replace(b"time", b"Time")
    with pytest.raises(ValueError, match="does not match the known hash"):
        fetch(remote, tmp_path)
    assert not list(tmp_path.iterdir())
    server.content = right
    fetch(remote, tmp_path)


@pytest.mark.parametrize("where", ["http://127.0.0.1:9/stories.txt", "missing"])
def test_an_offline_error_says_what_to_put_where(server, remote, tmp_path, where):
    url = server.url.replace("stories", "missing") if where == "missing" else where
    lost = RemoteFile(url, 12_345, "0" * 64)
    with pytest.raises(ConnectionError) as error:
        download(lost, tmp_path, progress=lambda num_bytes: None)
    message = str(error.value)
    for part in (url, lost.name, str(tmp_path), "12,345 bytes", "0" * 64):
        assert part in message


def test_a_full_disk_while_downloading_says_so(remote, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(corpus_module, "_append_rest", full)
    with pytest.raises(OSError, match=r"no space left to write .*stories\.txt\.part"):
        fetch(remote, tmp_path)


def test_tinystories_are_the_two_files(server, remote, tmp_path, monkeypatch):
    valid = RemoteFile(server.url.replace("stories", "valid"), remote.num_bytes, remote.sha256)
    monkeypatch.setattr(corpus_module, "TINYSTORIES", {"train": remote, "validation": valid})
    folder = tmp_path / "tinystories"
    assert prepare_corpus("tinystories", tmp_path) == Corpus(
        name="tinystories",
        train=folder / "stories.txt",
        validation=folder / "valid.txt",
        train_sha256=remote.sha256,
        validation_sha256=remote.sha256,
    )
