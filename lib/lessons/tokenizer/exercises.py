"""Exercises of notebook 01: from pre-tokens to training, encoding and better tokens."""

from __future__ import annotations

import functools
import random
import time
import timeit
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import regex

from lib.lessons.exercise import check_of, difference, exercise
from lib.lessons.tokenizer.texts import python_manual, small_ranks
from lib.tokenizer import bpe
from lib.tokenizer.bpe import Tokenizer, count_pretokens, train_from_counts
from lib.tokenizer.pretokenize import split_pretokens

check = check_of(__name__)
# The same for a notebook that goes on with the answer if it is right, or else with the solution.
take = check_of(__name__, returns=True)


# Merge a pair


def _draw_merge(generator: random.Random, size: int) -> tuple:
    # 0 is false
    tokens = generator.sample([0, 1, 256, 300], k=generator.choice([2, 3]))
    ids = generator.choices(tokens, k=generator.randint(0, size + 2))
    pair = generator.choices(tokens[:2], k=2)
    # a tuple, as words are in training, shows who changes what is given
    kind = generator.choice([list, tuple])
    return kind(ids), tuple(pair), 9


@exercise("warm-up", _draw_merge)
def merge_pair(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    merged, i = [], 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == tuple(pair):
            merged.append(new_id)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged


merge_pair.mistakes = """
i += 2 => i += 2 - (tuple(ids[i + 1 : i + 3]) == tuple(pair))
    | overlapping pairs are merged twice; in [1, 1, 1] the middle 1 belongs to one pair only
i += 2 => i += 1 | the second id of a merged pair stays; after a merge, step over both
i < len(ids) => i < len(ids) - 1 | the last id gets lost where no pair ends the list
tuple(ids[i : i + 2]) == tuple(pair) => ids[i : i + 2] == tuple(pair)
    | nothing is merged in a list; a list never equals a tuple
return merged => ids[:] = merged; return ids
    | the list that is given is changed; others need it, and it may be a tuple
tuple(ids[i : i + 2]) == tuple(pair) => list(ids[i : i + 2]) == tuple(pair)
    | nothing is merged; a list never equals a tuple
"""


# Training


def _draw_training(generator: random.Random, size: int) -> tuple:
    counts = {}
    for _ in range(size):
        word = "".join(generator.choices("abé", k=generator.randint(1, 2 + size)))
        # many words occur once, as in a text
        counts[word.encode()] = generator.choice([1, 1, 1, 2, 3, 4, 9])
    return counts, generator.randint(1, 3 * size)


@exercise("core", _draw_training, trials=60)
def learn_merges(counts: Mapping[bytes, int], num_merges: int) -> list[tuple[bytes, bytes]]:
    vocab = {byte: bytes([byte]) for byte in range(256)}
    words, merges = {tuple(word): count for word, count in counts.items()}, []
    for new_id in range(256, 256 + num_merges):
        pairs = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], vocab[pair[0]], vocab[pair[1]]))
        left, right = vocab[best[0]], vocab[best[1]]
        vocab[new_id] = left + right
        merges.append((left, right))
        words = {tuple(bpe.merge_pair(word, best, new_id)): count for word, count in words.items()}
    return merges


learn_merges.mistakes = """
(pairs[pair], vocab[pair[0]], vocab[pair[1]]) => pairs[pair]
    | among equally frequent pairs the first one found is merged; take the one whose bytes come last
    in the alphabet
(pairs[pair], vocab[pair[0]], vocab[pair[1]]) => (pairs[pair], pair)
    | among equally frequent pairs the one with the higher ids is merged; compare the bytes
pairs[pair] += count => pairs[pair] += 1 | each word counts once, and not as often as it occurs
merges.append((left, right)) => merges.append(best)
    | these are pairs of ids; return the bytes of both tokens
if not pairs: => if False: | where no pair is left, `max` has nothing to choose from; stop there
best = max(pairs, key=lambda pair: (pairs[pair], vocab[pair[0]], vocab[pair[1]])) =>
    best = min(pairs, key=lambda pair: (-pairs[pair], vocab[pair[0]], vocab[pair[1]]))
    | among equally frequent pairs the first in the alphabet is merged; take the last
"""


# Training that visits only what changes


@functools.cache
def _lesson_counts() -> Counter[bytes]:
    return count_pretokens(python_manual(100_000))


def training_seconds(trainer: Callable, num_merges: int = 3000) -> float:
    """CPU seconds for `num_merges` merges of 100 KB; estimated from fewer where it is slow."""
    counts, spent, done = _lesson_counts(), 0.0, num_merges // 100
    while done <= num_merges and spent < 0.5:
        # timeit keeps the garbage collector out of the measured time
        timer = timeit.Timer(functools.partial(trainer, counts, done), timer=time.process_time)
        spent, part, done = timer.timeit(1), done, 10 * done
    return spent * num_merges / part


@exercise(
    "optional",
    _draw_training,
    trials=60,
    measure=training_seconds,
    unit="s",
    # a search through all pairs for each merge takes 10 times as long, the naive loop 80 times
    at_most=25,
)
def train_fast(counts: Mapping[bytes, int], num_merges: int) -> list[tuple[bytes, bytes]]:
    vocab = {byte: bytes([byte]) for byte in range(256)}
    words, weights = [list(word) for word in counts], list(counts.values())
    pair_counts, holders = Counter(), defaultdict(set)
    for i, word in enumerate(words):
        for pair in pairwise(word):
            pair_counts[pair] += weights[i]
            holders[pair].add(i)

    def entry(pair):
        # the smallest comes first: the highest count, then the greatest bytes
        left, right = ([-byte for byte in vocab[token]] + [1] for token in pair)
        return -pair_counts[pair], left, right, pair

    heap = [entry(pair) for pair in pair_counts]
    heapify(heap)
    merges = []
    while heap and len(merges) < num_merges:
        negative, _, _, pair = heappop(heap)
        if -negative != pair_counts[pair]:
            continue  # its count has changed since
        new_id = len(vocab)
        vocab[new_id] = vocab[pair[0]] + vocab[pair[1]]
        merges.append((vocab[pair[0]], vocab[pair[1]]))
        changes = Counter()
        for i in holders[pair]:
            for old in pairwise(words[i]):
                changes[old] -= weights[i]
            words[i] = bpe.merge_pair(words[i], pair, new_id)
            for new in pairwise(words[i]):
                changes[new] += weights[i]
                holders[new].add(i)
        for changed, change in changes.items():
            pair_counts[changed] += change
            if change and pair_counts[changed]:
                heappush(heap, entry(changed))
    return merges


train_fast.mistakes = """
[-byte for byte in vocab[token]] + [1] => [-byte for byte in vocab[token]]
    | of two tokens of which one begins the other, the shorter comes first; put a 1 behind the
    negative bytes
if change and => if change > 0 and
    | a pair whose count falls gets no new entry, and is lost; push one at every change
if -negative != pair_counts[pair]: => if not negative:
    | an old entry is taken for a new one; skip it where its count is no longer right
if change and pair_counts[changed]: => if change:
    | pairs are merged that no word holds any more; push no entry whose count is 0
changes[old] -= weights[i] => changes[old] -= 0 | a pair that is merged away keeps its count
holders[new].add(i) => pass
    | words that got a pair by a merge are forgotten; they hold it, too
"""


# Encode from ranks alone, as tiktoken does

AWKWARD = (
    *("The", " cat", " sat", " on", " the", " mat", "'s", "'ll", " 2026", "3.14", "def f(x):"),
    *(" ", "   ", "\n", "\r\n\t", "é", "日本語", "👩‍👩‍👧", "\x00", "\u00a0"),
)


def _draw_awkward(generator: random.Random, size: int) -> tuple:
    # words that nobody has seen, where the order of the merges decides
    words = ["".join(generator.choices("atheinrosdl", k=9)) for _ in AWKWARD]
    text = "".join(generator.choices((*AWKWARD, *words), k=generator.randint(0, size)))
    return text, Ranks(small_ranks())


class Ranks(dict):
    """A vocabulary that does not fill the page when a check shows it."""

    def __repr__(self) -> str:
        return f"<{len(self)} tokens>"

    def __deepcopy__(self, memo: dict) -> Ranks:
        return self


@exercise("core", _draw_awkward, trials=100)
def encode_text(text: str, ranks: Mapping[bytes, int]) -> list[int]:
    ids = []
    for pretoken in split_pretokens(text):
        parts = [bytes([byte]) for byte in pretoken.encode()]
        while True:
            joined = [left + right for left, right in pairwise(parts)]
            known = [token for token in joined if token in ranks]
            if not known:
                break
            at = joined.index(min(known, key=ranks.get))
            parts[at : at + 2] = [joined[at]]
        ids += [ranks[part] for part in parts]
    return ids


encode_text.mistakes = """
min(known => max(known | the token learned last comes first; take the lowest rank
min(known, key=ranks.get) => known[0]
    | tokens are built from left to right; the lowest rank comes first, wherever it is
joined.index(min(known, key=ranks.get)) =>
    len(joined) - 1 - joined[::-1].index(min(known, key=ranks.get))
    | of two places for the same token, the right one is merged first; take the leftmost
in split_pretokens(text) => in [text]
    | merges cross the borders of pre-tokens; split the text first
ranks[part] for part in parts => ranks[part] if len(part) > 1 else part[0] for part in parts
    | a byte's own value is taken for its id; ranks has the ids of single bytes, too
"""


# GPT-4's pre-tokens

# Letters in two cases and two alphabets, digits, white space of each kind, and the rest.
PIECES = (
    *("a", "Bc", "é", "日本", "cat", "7", "20", "2026", "Ⅳ", "'s", "'LL", "'t", "'Llama", "'"),
    *(" ", " ", "  ", "\t", "\n", "\n", "\r\n", " \n ", "!", "...", "==", "(", "_"),
)


def _draw_text(generator: random.Random, size: int) -> tuple:
    pieces = generator.choices(PIECES, k=generator.randint(0, 1 + size))
    # two published versions of the pattern differ only in white space that ends the text
    return ("".join([*pieces, generator.choice(["cat", "7", "!", "'s"])]),)


def _describe_pieces(yours: Any, expected: list[str]) -> str:
    found = difference(yours, expected)
    if isinstance(yours, list) and any(piece == "" or isinstance(piece, tuple) for piece in yours):
        found += "\n  `findall` returns the groups of a pattern that has any; write (?:…) for (…)."
    return found


@exercise("optional", _draw_text, describe=_describe_pieces)
def split_gpt4(text: str) -> list[str]:
    pattern = (
        r"'(?i:[sdmt]|ll|ve|re)"
        r"|[^\r\n\p{L}\p{N}]?\p{L}+"
        r"|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s"
    )
    return regex.findall(pattern, text)


split_gpt4.mistakes = r"""
\p{N}{1,3} => \p{N}+ | a run of digits stays whole; cut it after every third
|\p{N}{1,3} => | ?\p{N}{1,3}
    | digits take a space with them, as in GPT-2; here only letters and others do
(?i: => (?: | contractions in capitals are not seen
[^\r\n\p{L}\p{N}]?\p{L}+ => [ ]?\p{L}+
    | only a space may go before letters; any one character that is neither letter, digit nor line
    end may
]+[\r\n]* => ]+ | line ends do not go with the other characters before them
r"|\s+(?!\S)" => r"" | white space keeps its last character from the word that follows
"""


# Better tokens


class Excerpt(str):
    """A text that does not fill the page when a check shows it."""

    def __repr__(self) -> str:
        return f"<{len(self):,} characters of the manual>"


def plain_training(text: str, size: int) -> Collection[bytes]:
    return train_from_counts(count_pretokens(text), size)[0].values()


@functools.cache
def _plain(text: str, size: int) -> int:
    """How many tokens plain training needs for text that it has not seen."""
    return fewest_tokens(_unseen(2000), plain_training(text, size))


def _unseen(num_bytes: int) -> bytes:
    """The manual right behind what is given to train on."""
    return python_manual(100_000 + num_bytes)[100_000:].encode()


def fewest_tokens(data: bytes, tokens: Collection[bytes]) -> int:
    """The smallest number of `tokens` that make up `data`, by dynamic programming."""
    tokens = {*tokens}
    lengths = sorted({len(token) for token in tokens})
    fewest = [0] * (len(data) + 1)  # of the first n bytes
    for end in range(1, len(data) + 1):
        fewest[end] = 1 + min(
            fewest[end - length] for length in lengths if data[max(0, end - length) : end] in tokens
        )
    return fewest[-1]


def obeys_rules(choose: Callable, text: str, size: int) -> dict[str, bool]:
    """Whether the tokens that `choose` returns are within the rules."""
    tokens = set(choose(text, size))
    rules = {
        "every token is of type bytes": all(type(token) is bytes for token in tokens),
        "all 256 bytes are there": all(bytes([byte]) in tokens for byte in range(256)),
        "no more than `size`": len(tokens) <= size,
    }
    if all(rules.values()):
        needed = fewest_tokens(_unseen(2000), tokens)
        rules["at most 20% worse than plain training"] = needed <= 1.2 * _plain(text, size)
    return rules


def tokens_needed(choose: Callable) -> float:
    """How many of the reader's tokens, chosen from 100 KB, the next 20 KB of the manual take."""
    return fewest_tokens(_unseen(20_000), choose(python_manual(100_000), 1024))


@exercise(
    "open",
    lambda generator, size: (Excerpt(python_manual(100_000)[: 2000 * size]), 512 + 20 * size),
    harness=obeys_rules,
    trials=3,
    measure=tokens_needed,
    unit="tokens",
    baseline=plain_training,
)
def choose_tokens(text: str, size: int) -> Collection[bytes]:
    vocab, merges = train_from_counts(count_pretokens(text), size + size // 3)
    used = Counter(Tokenizer(vocab, merges, implementation="python").encode(text))
    often = sorted(range(256, len(vocab)), key=used.__getitem__, reverse=True)
    kept = [*range(256), *often[: size - 256]]
    return {vocab[token_id] for token_id in kept}


choose_tokens.mistakes = """
*range(256), => *range(255), | a byte is missing: every text must be expressible
size - 256 => size | there are more tokens than `size`
{vocab[token_id] => {vocab[token_id].decode("latin-1") | these are texts; tokens are of type bytes
reverse=True => reverse=False | the tokens that are used least are kept
"""
