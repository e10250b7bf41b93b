"""Notebook outputs: tokens as boxes, a slider through merges, code from `lib`, tables, progress."""

from __future__ import annotations

import base64
import html
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from lib.core.records import to_markdown
from lib.core.terminal import progress_bar as progress_bar
from lib.lessons.explorer import explorer, markup
from lib.tokenizer.bpe import merge_pair
from lib.tokenizer.pretokenize import special_token_pattern, split_pretokens, split_special

if TYPE_CHECKING:
    from IPython.display import HTML, Markdown
    from ipywidgets import VBox

    from lib.tokenizer.bpe import Tokenizer


DRAWINGS = Path(__file__).parent / "drawings"
# Dark letters on light backgrounds, readable in a light and a dark theme.
BACKGROUNDS = ("#bfe0f5", "#fbe3b0", "#c9ead6", "#f3cfe0", "#e3dcf6", "#f9d3bf", "#dfe6b8")
BOX = (
    "display:inline-block;margin:1px 0;padding:1px 3px;border:1px solid #8a8f98;border-radius:4px;"
    "color:#1b1f24;font:13px/1.35 ui-monospace,monospace;white-space:pre;background:"
)
TEXT = "white-space:pre-wrap;max-width:40rem;margin:.3em 0 1em"
NEW = ";border-color:#D55E00;box-shadow:0 0 0 1px #D55E00;font-weight:700"


@dataclass(frozen=True)
class MergeStep:
    """A text after some merges."""

    rank: int | None
    """Index of the last merge in the tokenizer's list; None before the first."""

    pretokens: list[list[bytes]]
    """The tokens of each pre-token."""

    joined: bytes | None
    """The token that this merge made."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.pretokens))


def merge_steps(text: str, tokenizer: Tokenizer) -> list[MergeStep]:
    """The text as bytes, and then after each merge of `tokenizer` that joins something in it."""
    ranks = {pair: rank for rank, pair in enumerate(tokenizer.merges)}
    pretokens = []
    pattern = special_token_pattern(list(tokenizer.special_tokens))
    for ordinary, special in split_special(text, pattern):
        pretokens += [
            [bytes([byte]) for byte in pretoken.encode()] for pretoken in split_pretokens(ordinary)
        ]
        pretokens += [[special.encode()]] if special is not None else []
    steps = [MergeStep(None, pretokens, None)]
    while known := {pair for pretoken in pretokens for pair in pairwise(pretoken) if pair in ranks}:
        pair = min(known, key=ranks.__getitem__)
        joined = b"".join(pair)
        pretokens = [merge_pair(pretoken, pair, joined) for pretoken in pretokens]
        steps.append(MergeStep(ranks[pair], pretokens, joined))
    return steps


def merge_stepper(text: str, tokenizer: Tokenizer) -> VBox:
    """A slider through the merges that build the tokens of `text`.

    Tokens that the last merge made have a bold frame. Merges of the tokenizer that join nothing in
    this text are skipped.
    """
    steps = merge_steps(text, tokenizer)
    last = len(steps) - 1

    def show(merges: int) -> dict[str, Any]:
        return markup(_step_html(merges, steps[merges], tokenizer), "tokens in boxes")

    some = sorted({last // 8, last // 4, last // 2, last} - {0})
    still = [(number,) for number in some]
    return explorer(show, merges=range(last + 1), still=still, min_height="6.5em")


def _step_html(number: int, step: MergeStep, tokenizer: Tokenizer) -> str:
    merges = "1 merge" if number == 1 else f"{number} merges"
    caption = f"After {merges}: {step.num_tokens} tokens"
    if step.rank is not None:
        left, right = (_code(part) for part in tokenizer.merges[step.rank])
        place = f"number {step.rank + 1:,} of {len(tokenizer.merges):,} learned"
        caption = f"{caption}. The last one, {place}: {left} + {right} → {_code(step.joined)}"
    boxes = " ".join(
        "".join(_box(token, token == step.joined) for token in pretoken)
        for pretoken in step.pretokens
    )
    return (
        f'<div style="margin:4px 0 2px">{caption}</div>'
        f'<div style="line-height:1.9;margin-bottom:10px">{boxes}</div>'
    )


def _code(token: bytes) -> str:
    return f"<code>{html.escape(visible(token))}</code>"


def _box(token: bytes, is_new: bool = False, title: str = "") -> str:
    # the same token has the same color everywhere
    background = BACKGROUNDS[sum(token) % len(BACKGROUNDS)]
    hint = f' title="{html.escape(title)}"' if title else ""
    style = BOX + background + (NEW if is_new else "")
    return f'<span style="{style}"{hint}>{html.escape(visible(token))}</span>'


def visible(token: bytes) -> str:
    """Make a token readable: spaces as dots, line ends as arrows, partial characters in hex.

    >>> visible(b" caf"), visible(b"\\xc3")
    ('·caf', 'C3')
    """
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return token.hex(" ").upper()
    text = text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍")
    return "".join(c if c.isprintable() or c == "\u200d" else f"U+{ord(c):04X}" for c in text)


def show_tokens(tokens: Iterable[bytes], titles: Iterable[str] = ()) -> HTML:
    """Show byte strings as colored boxes in a row; `titles` are their tooltips."""
    from IPython.display import HTML

    tokens = list(tokens)
    titles = list(titles) or [""] * len(tokens)
    boxes = "".join(_box(token, title=title) for token, title in zip(tokens, titles))
    return HTML(f'<div style="line-height:1.9">{boxes}</div>')


def show_encoding(text: str, tokenizer: Tokenizer) -> HTML:
    """Show the tokens of `text` as boxes with their ids as tooltips."""
    ids = tokenizer.encode(text)
    return show_tokens([tokenizer.vocab[i] for i in ids], [f"id {i}" for i in ids])


@dataclass(frozen=True, repr=False)
class WrappedText:
    """A text whose lines wrap between words in a notebook."""

    text: str

    def _repr_html_(self) -> str:
        return f'<div style="{TEXT}">{html.escape(self.text)}</div>'

    def __repr__(self) -> str:
        return self.text


def show_drawing(name: str) -> HTML:
    """Show lib/lessons/drawings/`name`.svg; on a phone it scrolls: its text would be too small.

    It is an image, with the words of its `aria-label` beside it: a notebook that JupyterLab does
    not trust yet shows those, and of tags of SVG it would show only the texts, run together.
    """
    from IPython.display import HTML

    svg = (DRAWINGS / f"{name}.svg").read_text(encoding="utf-8").replace("\n", "")
    root = ElementTree.fromstring(svg)
    words, style = (html.escape(root.get(name, "")) for name in ("aria-label", "style"))
    data = base64.b64encode(svg.encode()).decode()
    # the keyboard scrolls only what it can reach
    return HTML(
        f'<div style="overflow-x:auto" tabindex="0"><img alt="{words}" style="{style}" '
        f'src="data:image/svg+xml;base64,{data}"></div>'
    )


def show_growing(text: str) -> Callable[[int, str], None]:
    """Display `text`, and return a function that adds to it: `on_text` of `generate_text`."""
    from IPython.display import display

    handle = display(WrappedText(text), display_id=True)

    def add(row: int, piece: str) -> None:
        nonlocal text
        text += piece
        # None outside a notebook
        if handle is not None:
            handle.update(WrappedText(text))

    return add


def show_table(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | Sequence[str] | None = None
) -> Markdown:
    """`lib.core.records.to_markdown`, shown as a table."""
    from IPython.display import Markdown

    return Markdown(to_markdown(rows, columns))


def show_source(function: Callable, first: str = "", last: str = "") -> Markdown:
    """Show the source of `function`; `first` and `last` as in `show_excerpt`."""
    file = f"{function.__module__.replace('.', '/')}.py"
    lines, line = inspect.getsourcelines(function)
    return show_excerpt("".join(lines), file, function.__qualname__, first, last, line=line)


def show_excerpt(
    source: str,
    file: str,
    name: str,
    first: str = "",
    last: str = "",
    *,
    line: int = 1,
    language: str = "python",
) -> Markdown:
    """Show `source`, or the part of it from a line that contains `first` to one that contains
    `last`, under the name of its function and a link to its file.

    In JupyterLab and in the report, the link leads to the first line shown.

    Args:
        file: relative to the workbook, whose folders of notebooks are one below it.
        line: the number of the first line of `source` in that file.
        language: of its colors.
    """
    from IPython.display import Markdown

    lines = source.splitlines()
    start = _line_with(lines, first, 0) if first else 0
    stop = _line_with(lines, last, start) if last else len(lines) - 1
    code = textwrap.dedent("\n".join(lines[start : stop + 1]))
    # JupyterLab counts lines from 0
    link = f"[`{file}`](../{file}#line={line + start - 1})"
    return Markdown(f"{link}, `{name}`:\n\n```{language}\n{code}\n```")


def _line_with(lines: Sequence[str], text: str, start: int) -> int:
    for number in range(start, len(lines)):
        if text in lines[number]:
            return number
    raise ValueError(f"no line from line {start + 1} on contains {text!r}")
