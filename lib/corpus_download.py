"""Downloads that go on where they were cut, and are checked against a known SHA-256."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lib.files import NO_SPACE, no_space_error

_BLOCK_BYTES = 1 << 18
_TIMEOUT_S = 30

Progress = Callable[[int], None]


@dataclass(frozen=True)
class RemoteFile:
    """A file on the web, and what it must be."""

    url: str
    num_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]


def download(file: RemoteFile, folder: Path, *, progress: Progress) -> Path:
    """Return the path of `file` in `folder`, downloaded with pooch unless it is there and right.

    What arrives is kept in `folder` under the file's name with ".part" until it is whole, so that a
    connection that breaks is taken up again there, at once or in the next call. `progress` is told
    the bytes just received, those of an earlier part first.

    Raises:
        ConnectionError: the file cannot be had; says where to put a copy by hand.
        ValueError: what arrived has another SHA-256; it is thrown away.
        OSError: the disk is full, or `folder` cannot be written.
    """
    # these take a third of a second to import, and most runs need no network
    import pooch
    import requests

    path, part = folder / file.name, folder / f"{file.name}.part"

    def fetch(url: str, output_path: str, _: object) -> None:
        _fetch(url, part, progress)
        os.replace(part, output_path)

    try:
        pooch.retrieve(
            file.url,
            known_hash=f"sha256:{file.sha256}",
            fname=file.name,
            path=folder,
            downloader=fetch,
        )
    except requests.RequestException as error:
        wrong = " The file that is there now is not the right one." if path.exists() else ""
        raise ConnectionError(
            f"cannot download {file.url} ({error}). Try again to go on where it stopped, or get "
            f"{file.name} on another machine and put it into {folder.resolve()} "
            f"({file.num_bytes:,} bytes, SHA-256 {file.sha256}).{wrong}"
        ) from error
    except OSError as error:
        if error.errno in NO_SPACE:
            raise no_space_error(error, part, file.num_bytes - _size(part)) from error
        raise
    return path


def _fetch(url: str, part: Path, progress: Progress) -> None:
    """Download the rest of `url` to `part`; try again for as long as each try brings something."""
    import requests

    progress(_size(part))
    while True:
        before = _size(part)
        try:
            return _append_rest(url, part, progress)
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
            if _size(part) <= before:
                raise


def _append_rest(url: str, part: Path, progress: Progress) -> None:
    """Ask for what `part` lacks (HTTP range request, RFC 9110 section 14) and append it."""
    import requests

    have = _size(part)
    # a range counts the bytes that are sent: they must be those of the file, not compressed
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S) as response:
        if have and response.status_code == requests.codes.range_not_satisfiable:
            # nothing is left; if `part` is not the right file, its hash will tell
            return
        response.raise_for_status()
        resumed = response.status_code == requests.codes.partial_content
        if have and not resumed:
            progress(-have)
        with open(part, "ab" if resumed else "wb") as output:
            for block in response.iter_content(_BLOCK_BYTES):
                output.write(block)
                progress(len(block))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
