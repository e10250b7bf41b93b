"""A book of a few kilobytes, and what a config makes of it."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lib.data.prepare import TokenizeConfig, tokenize_corpus
from lib.tokenizer.pretokenize import SEPARATOR

STORY = f"The cat sat on the mat. “Là,” said the dog.\n{SEPARATOR}\n"


@contextmanager
def silent(name: str, num_bytes: int) -> Iterator:
    """A progress bar that shows nothing."""
    yield lambda count: None


def book_config(folder: Path) -> TokenizeConfig:
    """The config of a book in `folder` whose tokens go to `out` there."""
    path = folder / "book.txt"
    path.write_text("".join(f"{i} {STORY}" for i in range(100)), encoding="utf-8")
    return TokenizeConfig(
        corpus=str(path), vocab_size=300, data_dir=folder / "data", output=folder / "out"
    )


def tokenize(config: TokenizeConfig, **changes) -> dict[str, dict]:
    """Each step's row of the table, by its name."""
    rows = tokenize_corpus(dataclasses.replace(config, **changes), progress_bar=silent)
    return {row["step"]: row for row in rows}
