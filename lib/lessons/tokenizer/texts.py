"""Text that people wrote, and is on every machine; and a second opinion on ids, where one is."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lib.tokenizer.bpe import Tokenizer, count_pretokens, train_from_counts
from lib.tokenizer.pretokenize import GPT2_PATTERN, SEPARATOR

# Files that tiktoken downloads for GPT-2, named in its cache by the hash of their address.
GPT2_FILES = ("vocab.bpe", "encoder.json")
GPT2_ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


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


@dataclass(frozen=True)
class Peer:
    """Another encoder, with the vocabulary that it uses."""

    name: str
    encode: Callable[[str], list[int]]
    ranks: Mapping[bytes, int]
    special: Mapping[str, int]


def find_peer(tokenizer: Tokenizer) -> Peer:
    """tiktoken with GPT-2's vocabulary where its files are on this machine, or with `tokenizer`'s.

    `tokenizer` itself where tiktoken is not installed. Nothing is downloaded.
    """
    own = {token: i for i, token in tokenizer.vocab.items()}
    ranks = {token: i for token, i in own.items() if token.decode("latin-1") != SEPARATOR}
    special = dict(tokenizer.special_tokens)
    try:
        import tiktoken
    except ImportError:
        return Peer("lib: tiktoken is not installed", tokenizer.encode, ranks, special)
    # where tiktoken looks; an empty name switches its cache off
    cache = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    for name in ("DATA_GYM_CACHE_DIR", "TIKTOKEN_CACHE_DIR"):
        cache = os.environ.get(name, cache)
    hashes = [hashlib.sha1((GPT2_ADDRESS + name).encode()).hexdigest() for name in GPT2_FILES]
    if cache and all(Path(cache, name).exists() for name in hashes):
        encoding = tiktoken.get_encoding("gpt2")
        tokens = encoding.token_byte_values()
        ranks = {token: encoding.encode_single_token(token) for token in tokens}
        name, special = "tiktoken with GPT-2's vocabulary", {SEPARATOR: encoding.eot_token}
    else:
        encoding = tiktoken.Encoding(
            "lesson", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        name = f"tiktoken with the {len(ranks):,} tokens of this notebook"
    return Peer(name, partial(encoding.encode, allowed_special="all"), ranks, special)
