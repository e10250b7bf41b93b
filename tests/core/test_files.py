"""Files that are whole or absent, locks, errors of a full disk, hashes."""

import contextlib
import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from lib.core.files import (
    ROOT,
    atomic_write,
    claim_folder,
    is_claimed,
    lock_file,
    lock_folder,
    make_folder,
    no_space_error,
    sha256_file,
    sync_folder,
    write_atomically,
)


def test_a_file_appears_once_it_is_whole_with_the_umasks_permissions(tmp_path):
    path, plain = tmp_path / "new/folder/file.txt", tmp_path / "plain"
    with atomic_write(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"half"
    # a reader of the old file is not disturbed
    with open(path, "rb") as reader:
        write_atomically(path, "a\r\nb\n€")
        assert reader.read() == b"half"
    assert path.read_bytes() == "a\r\nb\n€".encode()
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode


def test_an_error_leaves_the_old_file_and_no_remains_and_names_the_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.writelines([b"new", None])
    with pytest.raises(OSError, match=r"bad: .*file'"), atomic_write(path):
        raise OSError(errno.EIO, "bad")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_written_to_is_rejected_by_name(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match=r"not a folder.*file'"):
        write_atomically(tmp_path / "file" / "below", b"")

    def refuse(dir):
        raise PermissionError(errno.EACCES, "Permission denied", str(dir / "x"))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(PermissionError, match=r"cannot be written to .*denied.*here'"):
        make_folder(tmp_path / "here")


def test_a_lock_covers_its_file_alone_and_waiting_is_logged(tmp_path, caplog):
    def wait():
        with lock_file(tmp_path / "a.jsonl"):
            pass

    with lock_file(tmp_path / "a.jsonl"):
        with lock_file(tmp_path / "b.jsonl"), lock_folder(tmp_path):
            pass
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(5)
    assert not waiting.is_alive()
    assert caplog.messages == [f"waiting for another process that writes to {tmp_path / 'a.jsonl'}"]


def test_a_lock_is_free_again_after_its_holder_was_killed(tmp_path):
    code = (
        "import os, signal, sys; from lib.core.files import lock_folder\n"
        "with lock_folder(sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    with lock_folder(tmp_path):
        pass


def test_a_full_disk_names_the_file_and_what_is_needed_and_free(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(OSError, match=rf"{path}.* MB are free") as caught, atomic_write(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []
    error = no_space_error(OSError(errno.ENOSPC, ""), tmp_path / "x", 12_345_678)
    assert "12.3 MB more" in str(error)


def test_sha256_is_that_of_the_content(tmp_path):
    content = os.urandom(3_000_001)
    (tmp_path / "file").write_bytes(content)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_a_folder_is_taken_once_marked_and_never_with_somebodys_files(tmp_path):
    for _ in range(2):
        claim_folder(tmp_path / "new", "a report", setting="output")
        (tmp_path / "new/page.html").touch()
    assert is_claimed(tmp_path / "new", "a report")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/thesis.tex").touch()
    for name, kind in (("new", "a bundle"), ("own", "a report")):
        with pytest.raises(ValueError, match=f"output must be new, empty or {kind}, got .*{name}"):
            claim_folder(tmp_path / name, kind, setting="output")
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(("code", "is_raised"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_a_folder_whose_disk_fails_is_not_taken_for_written(tmp_path, monkeypatch, code, is_raised):
    def fail(handle):
        raise OSError(code, "planted")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="planted") if is_raised else contextlib.nullcontext():
        sync_folder(tmp_path)
