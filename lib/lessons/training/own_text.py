"""A text of the reader's own, which notebook 03 trains on: refused where nothing can come of it."""

from pathlib import Path

# So that the twentieth that is held out has more than one sequence.
LEAST_BYTES = 10_000


def check_own_text(path: str) -> str:
    """Return `path`, of a file that is long enough and UTF-8.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is too short, or not UTF-8.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"own_text must be the path of a text file, got {path!r}")
    data = Path(path).read_bytes()
    if len(data) < LEAST_BYTES:
        raise ValueError(
            f"own_text must have at least {LEAST_BYTES:,} bytes, got {len(data):,} in {path!r}"
        )
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"own_text must be UTF-8, got {path!r}, whose byte {error.start:,} is not; save it as "
            "UTF-8"
        ) from None
    return path
