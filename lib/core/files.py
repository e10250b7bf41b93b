"""Files that are either whole or absent: atomic writes, locks, hashes, errors of a full disk."""

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

# The root folder of the workbook.
ROOT = Path(__file__).resolve().parents[2]
# A folder that the workbook made has this file, which says what it is.
MARK = ".workbook"
# A socket's path has at most 107 bytes, or 103 on macOS, and its name takes up to 32 of them.
LONGEST_FOLDER_FOR_SOCKETS = 70
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
log = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Yield a binary file that appears as `path` only once it is complete and on disk.

    The bytes go to a temporary file in the same folder (made if missing), which is flushed to disk
    and renamed at the end of the block. If the block raises, the temporary file is deleted and
    `path` is left as it was.

    Raises:
        OSError: `path` cannot be written; the message names it, and on a full disk the free space.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    make_folder(path.parent)
    try:
        with open(partial, "xb") as file:
            yield file
            sync(file)
        os.replace(partial, path)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise no_space_error(error, path) from error
        if error.filename in (None, os.fspath(partial)):
            # a write names no file, and nobody knows the other name
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Write `content` (text as UTF-8, line endings unchanged) to `path`, whole or not at all."""
    with atomic_write(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def folder_for_sockets() -> str:
    """The folder for temporary files, or /tmp if the paths of sockets there would be too long."""
    folder = tempfile.gettempdir()
    is_short = len(os.fsencode(folder)) <= LONGEST_FOLDER_FOR_SOCKETS or os.name != "posix"
    return folder if is_short else "/tmp"


def make_folder(folder: str | os.PathLike) -> None:
    """Make `folder` if it is missing, and check that files can be written to it.

    Raises:
        OSError: it cannot be made or written to; the message names it and says why.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder)) from error
    except OSError as error:
        reason = f"cannot be written to ({error.strerror})"
        raise OSError(error.errno, reason, str(folder)) from error


def user_cache() -> Path:
    """The folder `workbook` in the user's cache folder.

    Raises:
        OSError: the user has no home folder, and XDG_CACHE_HOME names no other.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise FileNotFoundError("there is no home folder: set XDG_CACHE_HOME") from error
    return base / "workbook"


def claim_folder(
    folder: str | os.PathLike, kind: str, *, setting: str, is_ours: bool = False
) -> None:
    """Make `folder` if it is missing, and mark it as `kind` before anything else is in it.

    So a folder that an interruption left incomplete is recognized, and can be written to again.

    Args:
        kind: what it is, with its article, such as "a report".
        setting: the name of the setting that `folder` comes from, for the message.
        is_ours: take the folder even with files and without a mark.

    Raises:
        ValueError: it has files and no mark of that kind, and so may be somebody's work.
    """
    folder = Path(folder)
    if not is_ours and not is_claimed(folder, kind) and folder.exists() and any(folder.iterdir()):
        found = f"{folder}, which has files and no {MARK} that says so"
        raise ValueError(f"{setting} must be new, empty or {kind}, got {found}")
    write_atomically(folder / MARK, kind + "\n")


def is_claimed(folder: Path, kind: str) -> bool:
    """Whether `claim_folder` marked `folder` as `kind`."""
    mark = folder / MARK
    return mark.is_file() and mark.read_bytes() == f"{kind}\n".encode()


@contextlib.contextmanager
def lock_folder(folder: str | os.PathLike) -> Iterator[None]:
    """Lock `folder` against other processes that lock it; a process that dies releases its lock.

    Waits for the lock, and logs that it waits. Leaves a file `.lock` behind.
    """
    make_folder(folder)
    with _locked(Path(folder) / ".lock", folder):
        yield


@contextlib.contextmanager
def lock_file(path: str | os.PathLike) -> Iterator[None]:
    """Lock the file at `path` like `lock_folder`; leaves a file `.NAME.lock` beside it."""
    path = Path(path)
    make_folder(path.parent)
    with _locked(path.with_name(f".{path.name}.lock"), path):
        yield


@contextlib.contextmanager
def _locked(lock_path: Path, what: str | os.PathLike) -> Iterator[None]:
    lock = FileLock(lock_path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("waiting for another process that writes to %s", what)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def sha256_file(path: str | os.PathLike) -> str:
    """Compute the SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(file: BinaryIO) -> None:
    """Wait until everything written to `file` is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: str | os.PathLike) -> None:
    """Wait until renames in `folder` are on disk (on systems that can open folders)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        # a file system that has nothing to wait for; any other failure is one
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def no_space_error(error: OSError, path: Path, bytes_needed: int | None = None) -> OSError:
    """Make an `OSError` like `error` that names the file, its size and the free space.

    Args:
        bytes_needed: what `path` needs beyond what it already holds; None if unknown.
    """
    free = shutil.disk_usage(path.parent).free
    needs = f"it needs about {bytes_needed / 1e6:,.1f} MB more and " if bytes_needed else ""
    return OSError(
        error.errno,
        f"no space left to write {path}: {needs}{free / 1e6:,.1f} MB are free in {path.parent}",
    )
