"""The flags of a command: their names in a config and those in it, short help, suggestions."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import re
import shutil
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any

# The most lines of a command's `--help`; `--help-all` has everything.
MOST_LINES = 60
MOST_COLUMNS = 110
# Lines of it above the flags.
HEAD = 10
# Names for the same thing, here and in other programs.
SYNONYMS = (
    ("checkpoint", "run", "model", "model_dir", "model_path"),
    ("steps", "iterations", "iters", "max_steps", "max_iters", "num_steps", "epochs"),
    ("custom_tiers", "contexts", "context_lengths", "lengths", "seq_lens", "sequence_lengths"),
    ("context_length", "block_size", "seq_len", "sequence_length", "max_seq_len"),
    ("learning_rate", "lr", "max_lr"),
    ("min_learning_rate", "min_lr"),
    ("max_grad_norm", "grad_clip", "clip"),
    ("gradient_accumulation_steps", "grad_accum", "accumulation"),
    ("d_model", "n_embd", "hidden_size", "dim", "embed_dim"),
    ("num_layers", "n_layer", "n_layers", "layers", "depth"),
    ("num_heads", "heads", "n_head", "n_heads"),
    ("corpus", "text", "input", "file", "dataset"),
    ("data", "tokens"),
    ("output", "out", "out_dir", "output_dir", "folder", "save"),
    ("prompts", "text", "start"),
    ("max_new_tokens", "length", "num_tokens", "max_tokens"),
    ("ddp_wrapper", "ddp", "parallel", "strategy"),
    ("sharded_optimizer", "zero", "zero1"),
    ("attention_kernel", "attention", "kernel"),
    ("notebooks", "notebook", "only"),
)


def field_paths(cls: type, prefix: str = "") -> dict[str, list[str]]:
    """Each field's name, in `cls` and the dataclasses in it -> its paths, with dots."""
    paths: dict[str, list[str]] = {}
    kinds = typing.get_type_hints(cls)
    for name in (field.name for field in dataclasses.fields(cls)):
        inner, kind = {name: [prefix + name]}, kinds[name]
        if dataclasses.is_dataclass(kind):
            inner = field_paths(typing.cast(type, kind), f"{prefix}{name}.")
        for key, found in inner.items():
            paths[key] = paths.get(key, []) + found
    return paths


def suggestion(name: str, found: dict[str, list[str]]) -> str | None:
    """The flag, of those `found` by `field_paths`, that somebody may have meant by `name`."""
    word = name.replace("-", "_")
    for words in SYNONYMS:
        if word in words and (same := [word for word in words if word in found]):
            return same[0]
    known = [*found, *(path for paths in found.values() for path in paths)]
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def short_help(config: object) -> str:
    """A line for each flag of a config: its name, its default, the first sentence of its doc.

    The configs in it follow. Where that takes more than MOST_LINES, the longest only name theirs.
    """
    columns = min(shutil.get_terminal_size((MOST_COLUMNS, 0)).columns, MOST_COLUMNS)
    blocks = list(_blocks(config, ""))
    shown = [_described(flags, columns) for _, flags in blocks]
    while sum(len(lines) + 2 for lines in shown) > MOST_LINES - HEAD:
        longest = max(range(1, len(shown)), key=lambda i: len(shown[i]) if shown[i] else 0)
        names = ", ".join(f"--{name}" for name, *_ in blocks[longest][1])
        wrapped = textwrap.wrap(names, columns - 2, break_on_hyphens=False)
        named = [f"  {line}" for line in wrapped]
        if len(named) >= len(shown[longest]):
            break
        shown[longest] = named
    texts = ["\n".join(filter(None, (title, *lines))) for (title, _), lines in zip(blocks, shown)]
    return "\n\n".join(filter(None, texts))


def _blocks(config: Any, title: str) -> Iterator[tuple[str, list[tuple[str, Any, str]]]]:
    """Yield the title of a config and its flags: name, default, doc; then those in it."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    docs = _field_docs(type(config))
    inner = {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}
    flags = [(name, value, docs[name]) for name, value in values.items() if name not in inner]
    yield title if flags else "", flags
    for name, value in inner.items():
        yield from _blocks(value, f"{name}: {docs[name]}")


def _described(flags: Sequence[tuple[str, Any, str]], columns: int) -> list[str]:
    """A line for each flag, cut where the screen ends."""
    words = [_with_default(name, value) for name, value, _ in flags]
    width = min(max(map(len, words), default=0), 34)
    lines = [f"  {word:{width}}  {doc}" for word, (*_, doc) in zip(words, flags)]
    return [line if len(line) <= columns else f"{line[: columns - 2]} …" for line in lines]


def _with_default(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--[no_]{name}" if value else f"--{name}"
    text = " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
    text = "" if value is None else f"{text[:14]}…" if len(text) > 15 else text
    return f"--{name} {text}".rstrip()


def _field_docs(cls: type) -> dict[str, str]:
    """The first sentence of the docstring below each field of a dataclass, or nothing."""
    docs = {field.name: "" for field in dataclasses.fields(cls)}
    for owner in reversed([each for each in cls.__mro__ if dataclasses.is_dataclass(each)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for field, doc in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                text = " ".join(str(ast.literal_eval(doc.value)).split())
                docs[ast.unparse(field.target)] = re.split(r"(?<=\.) (?=[A-Z0-9`])", text)[0]
    return docs
