"""The race of notebook 12: its classes, its text, what an entry is given, and how it is judged.

An entry is one file with a generator, `recipe(race, seed)`. It builds a model, and after each
training step yields it with the number of tokens of that step. `VOCAB_SIZE`, a number at the top of
the file, is the vocabulary that the text is cut with.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import linecache
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lib.core.hardware import pick_device
from lib.core.settings import require
from lib.data.batches import get_batch
from lib.data.prepare import ProgressBar, TokenizeConfig, tokenize_corpus
from lib.data.token_array import load_token_array
from lib.lessons.notebook import workspace
from lib.tokenizer import Tokenizer
from lib.training.evaluation import bytes_of_token, evaluate

if TYPE_CHECKING:
    from IPython.display import Markdown

    from lib.model import TransformerLM

RECIPES = Path(__file__).parent / "recipes"
# Sequences that are judged at a time.
JUDGED_AT_ONCE = 16
DEFAULT_VOCAB_SIZE = 1024

Recipe = Callable[["Track", int], Iterator[tuple["TransformerLM", int]]]


@dataclass(frozen=True)
class RaceClass:
    """A class of races: text, target, ranks and limit."""

    name: str
    target: float
    """Bits per byte of held-out text that end a run."""

    ranks: int = 1
    """Processes that train together, one for each GPU."""

    corpus: str = "stories"
    corpus_bytes: int = 5_000_000
    judged_bytes: int = 24_000
    """About how much held-out text is judged."""

    judged_every: int = 40_960
    """Training tokens of all ranks from one judgment to the next."""

    limit: float = 900.0
    """Seconds after which a run ends without the target; of processor time on a CPU."""

    times_tokenizer: bool = False
    """Whether making tokens of the text counts, too."""


CLASSES = {
    one.name: one
    for one in (
        # a table of counts, pairs of tokens, reaches 1.49
        RaceClass("sprint", 0.60),
        RaceClass("pair", 0.30, ranks=2, corpus_bytes=20_000_000, limit=3600),
        # a loss of 1.45 nats a token with 10,000 tokens, of 4.1 bytes each, is 0.51
        RaceClass(
            "full",
            0.51,
            corpus="tinystories",
            judged_bytes=400_000,
            judged_every=4_194_304,
            limit=7200,
            times_tokenizer=True,
        ),
    )
}


class Judged(NamedTuple):
    """A point of a run: the model was judged."""

    tokens: float
    """That were trained on."""

    seconds: float
    """Training time; judging does not count."""

    bits: float
    """Per byte of the validation text."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """The part of a race that an entry is given: batches of the training text, and its device."""

    train_tokens: np.ndarray
    vocab_size: int
    device: torch.device
    rank: int = 0
    world_size: int = 1
    """Processes that train together; each draws batches of its own."""

    handed_out: list[int] = field(default_factory=list)
    """The tokens of each batch so far."""

    def batch(
        self, size: int, length: int, generator: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Training sequences from places that `generator` draws: x and y, both (size, length)."""
        x, y = get_batch(self.train_tokens, size, length, self.device, generator=generator)
        self.handed_out.append(x.numel())
        return x, y


@dataclass(frozen=True, kw_only=True)
class Race(Track):
    """A track with its judge, who keeps the held-out text."""

    validation_tokens: np.ndarray
    """One more than there are targets."""

    bytes_of_token: np.ndarray
    """Bytes of text of each token id."""

    target: float
    """Bits per byte on the validation tokens that end a run."""

    judged_every: int
    """Training tokens from one judgment to the next."""

    limit: float
    """Seconds of training after which a run ends without the target."""

    def clock(self) -> float:
        """The time in seconds, once the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def judge(self, model: TransformerLM) -> float:
        """The bits per byte of `model` on the validation tokens.

        The text is cut into sequences as long as the model's context.

        Raises:
            ValueError: they are not finite.
        """
        return bits_of(model, self.validation_tokens, self.bytes_of_token, self.device)

    def rules(self) -> dict[str, Any]:
        """The settings that two runs must share to be compared."""
        targets = self.validation_tokens[1:]
        return {
            "target": self.target,
            "judged_every": self.judged_every,
            "validation_bytes": int(self.bytes_of_token[targets].sum()),
        }


def bits_of(
    model: TransformerLM, tokens: np.ndarray, sizes: np.ndarray, device: torch.device
) -> float:
    """The bits per byte of `model` on `tokens`.

    Raises:
        ValueError: they are not finite.
    """
    found = evaluate(model, tokens, sizes, batch_size=JUDGED_AT_ONCE, device=device)
    bits = found.bits_per_byte
    require(math.isfinite(bits), f"the model is at {bits} bits per byte; try a lower rate")
    return bits


def prepare(which: RaceClass, vocab_size: int, progress_bar: ProgressBar) -> TokenizeConfig:
    """Make the text of a class and its tokens, unless they are there."""
    text = TokenizeConfig(
        corpus=which.corpus,
        corpus_bytes=which.corpus_bytes,
        vocab_size=vocab_size,
        data_dir=workspace() / "data",
    )
    tokenize_corpus(text, progress_bar=progress_bar)
    return text


def race_on(which: RaceClass, text: TokenizeConfig) -> Race:
    """The race of a class on the tokens in `text.output_dir`.

    The first `which.judged_bytes` of the held-out text are judged, whatever the vocabulary.
    """
    tokenizer = Tokenizer.load(text.output_dir)
    train, held_out = (
        load_token_array(text.output_dir / f"{part}.npy", tokenizer=tokenizer)
        for part in ("train", "validation")
    )
    sizes = bytes_of_token(tokenizer)
    ends = np.cumsum(sizes[held_out[: which.judged_bytes]])
    count = int(np.searchsorted(ends, which.judged_bytes)) + 1
    return Race(
        train_tokens=train,
        vocab_size=len(sizes),
        device=pick_device("auto"),
        validation_tokens=held_out[:count],
        bytes_of_token=sizes,
        target=which.target,
        judged_every=which.judged_every,
        limit=which.limit,
    )


def vocab_size_of(source: str) -> int:
    """The `VOCAB_SIZE` at the top of an entry's file.

    Raises:
        ValueError: it is not a number from 257 to 32,768, or the file is no Python.
    """
    try:
        lines = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno} of the entry: {error.msg}") from None
    for line in lines:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "VOCAB_SIZE":
            size = line.value.value if isinstance(line.value, ast.Constant) else None
            if isinstance(size, int) and 257 <= size <= 32_768:
                return size
            given = ast.unparse(line.value)
            raise ValueError(f"VOCAB_SIZE must be a number from 257 to 32768, got {given}")
    return DEFAULT_VOCAB_SIZE


def at_target(curve: Sequence[tuple], target: float) -> Judged | None:
    """Where the line through the judged points first reaches `target`; None if it does not."""
    before = None
    for point in map(Judged._make, curve):
        if point.bits <= target:
            if before is None:
                return point
            share = (before.bits - target) / (before.bits - point.bits)
            return Judged(*(a + share * (b - a) for a, b in zip(before, point)))
        before = point
    return None


# Recipes as text


def program_of(source: str) -> str:
    """The program of a file, without comments, spaces and docstring."""
    module = ast.parse(source)
    return ast.dump(ast.Module(module.body[bool(ast.get_docstring(module)) :], []))


def changes(source: str) -> tuple[str, list[str]]:
    """The recipe of ours that `source` is nearest to, and the lines that differ from it."""
    found = {}
    for file in sorted(RECIPES.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if program_of(text) != program_of(source):
            found[file.stem] = diff(text, source)
    return min(found.items(), key=lambda named: len(named[1]))


def edited(source: str, *changes: Mapping[str, str]) -> str:
    """`source` with texts replaced: old -> new, each old text occurring once.

    Raises:
        ValueError: an old text does not occur exactly once.
    """
    for old, new in (pair for change in changes for pair in change.items()):
        count = source.count(old)
        require(count == 1, f"{old!r} must occur once in the recipe, found {count} times")
        source = source.replace(old, new)
    return source


def compiled(source: str, names: Mapping[str, Any], name: str) -> Any:
    """The function `name` that `source` defines; its source can be read again."""
    file = f"<{name} {hashlib.sha256(source.encode()).hexdigest()[:8]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = dict(names)
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


def source_of(recipe: Recipe) -> str:
    """The source of `recipe`, as it is in its cell."""
    return textwrap.dedent(inspect.getsource(recipe))


def digest(source: str) -> str:
    """A short hash of an entry's source."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def diff(before: str, after: str) -> list[str]:
    """The lines that differ between two sources."""
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def show_diff(before: str, after: str) -> Markdown:
    """The lines that differ between two sources, for a notebook."""
    from IPython.display import Markdown

    return Markdown("```diff\n" + "\n".join(diff(before, after)) + "\n```")
