"""Files that are either whole or absent, and the hashes that say what is in them."""

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Yield a binary file that takes the name `path` only once it is whole and on disk.

    The bytes go to a temporary name in the same folder (made when missing), are flushed to the
    disk, and are renamed at the end of the block. When the block raises, the temporary file goes
    and whatever stood at `path` before stays.

    Raises:
        OSError: names `path` when it cannot be written, and the free space when the disk is full.
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
        raise
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Write `content` (text as UTF-8, line ends as they are) to `path` whole or not at all."""
    with atomic_write(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_folder(folder: str | os.PathLike) -> None:
    """Make `folder`, if it is missing, and see now whether files can be written to it.

    Raises:
        OSError: names `folder` and says why it cannot be made or written to.
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


@contextlib.contextmanager
def lock_folder(folder: str | os.PathLike) -> Iterator[None]:
    """Keep other processes that ask for the same (also after a crash of one) out of `folder`.

    Waits until the folder is free, and says so in the log. Leaves a file `.lock` behind.
    """
    make_folder(folder)
    with _locked(Path(folder) / ".lock", folder):
        yield


@contextlib.contextmanager
def lock_file(path: str | os.PathLike) -> Iterator[None]:
    """`lock_folder` for the file at `path` alone; leaves a file `.NAME.lock` beside it."""
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


def sha256_file(path: str | os.PathLike, *, progress: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of the file at `path` in hex; `progress` is told the bytes just read."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            if progress:
                progress(len(block))
    return digest.hexdigest()


def sync(file: BinaryIO) -> None:
    """Wait until everything written to `file` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: str | os.PathLike) -> None:
    """Wait until renames in `folder` are on the disk (where the system can open folders)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def no_space_error(error: OSError, path: Path, bytes_needed: int | None = None) -> OSError:
    """An `OSError` like `error` that says which file did not fit, how much it needs, what is free.

    Args:
        bytes_needed: what `path` needs beyond what it holds already; None when not known.
    """
    free = shutil.disk_usage(path.parent).free
    needs = f"it needs about {bytes_needed / 1e6:,.1f} MB more and " if bytes_needed else ""
    return OSError(
        error.errno,
        f"no space left to write {path}: {needs}{free / 1e6:,.1f} MB are free in {path.parent}",
    )
