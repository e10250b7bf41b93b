"""Text that people wrote, and is on every machine; GPT-2's tokens and ids."""

from __future__ import annotations

import functools
import json
import lzma
import re
import sysconfig
from pathlib import Path

from lib.core.files import ROOT
from lib.tokenizer.bpe import count_pretokens, train_from_counts


@functools.cache
def python_manual(num_bytes: int = 10_000_000) -> str:
    """Return the beginning of Python's own documentation, about 1.3 MB of English in all.

    It is that of the Python that runs: the topics of `help()`, from the language reference, and
    then the documentation strings of the standard library. Nothing is downloaded or kept, and each
    version of Python has a text of its own.
    """
    from pydoc_data.topics import topics

    parts = [topics[name] for name in sorted(topics)]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if sum(map(len, parts)) >= num_bytes:
            break
        source = path.read_text(encoding="utf-8", errors="replace")
        # a string of several lines that begins a line is documentation
        parts += re.findall(r'^[ \t]*r?"""(.*?)"""', source, re.DOTALL | re.MULTILINE)
    text = "\n\n".join(parts).encode()[:num_bytes]
    return text.decode(errors="ignore")


@functools.cache
def small_ranks() -> dict[bytes, int]:
    """A vocabulary of 600 tokens in tiktoken's form, bytes -> id; a byte's id is not its value."""
    vocab, _ = train_from_counts(count_pretokens(python_manual(50_000)), 600)
    # like GPT-2, those of visible characters first
    byte_order = sorted(range(256), key=lambda byte: (not 33 <= byte <= 126, byte))
    in_order = [bytes([byte]) for byte in byte_order] + [vocab[i] for i in range(256, len(vocab))]
    return {token: token_id for token_id, token in enumerate(in_order)}


@functools.cache
def gpt2_ranks() -> dict[bytes, int]:
    """GPT-2's tokens in tiktoken's form, bytes -> id, from its merges in `artifacts/gpt2`.

    The ids are the 256 bytes, those of visible characters first, and then one for each merge.
    """
    with lzma.open(ROOT / "artifacts/gpt2/vocab.bpe.xz", "rt", encoding="utf-8") as file:
        _, *merges = file.read().splitlines()
    # the file writes each byte as a character: itself if it is visible, or else one from 256 on
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible}
    byte_of |= {chr(256 + number): byte for number, byte in enumerate(others)}
    tokens = [bytes([byte]) for byte in (*visible, *others)]
    for merge in merges:
        tokens.append(bytes(byte_of[character] for character in merge.replace(" ", "")))
    return {token: token_id for token_id, token in enumerate(tokens)}


def gpt2_ids() -> dict[str, list[int]]:
    """Texts that GPT-2's merges were not learned on -> the ids that tiktoken gives them."""
    path = ROOT / "artifacts/gpt2/ids.json"
    return json.loads(path.read_text(encoding="utf-8"))
