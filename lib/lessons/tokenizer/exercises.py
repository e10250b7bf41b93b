"""Exercises of notebook 01: from pre-tokens to training, encoding, streams and better tokens."""

from __future__ import annotations

import functools
import inspect
import io
import random
import re
import time
import timeit
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import regex

from lib.lessons.exercise import Exercise, check, difference, edited
from lib.lessons.tokenizer.texts import python_manual, small_ranks
from lib.tokenizer.bpe import Tokenizer, count_pretokens, merge_pair, train_from_counts
from lib.tokenizer.pretokenize import SEPARATOR, split_pretokens

# 1. Merge a pair


def _draw_merge(generator: random.Random, size: int) -> tuple:
    # 0 is false; 1, 11 and 111 look alike as text; two ints of 300 are equal, yet two objects
    tokens = generator.sample(["0", "1", "11", "111", "256", "300"], k=generator.choice([2, 3]))
    ids = generator.choices(tokens, k=generator.randint(0, size + 2))
    pair = generator.choices(tokens[:2], k=2)
    # a tuple, as words are in training, shows who changes what is given
    kind = generator.choice([list, tuple])
    return kind(map(int, ids)), tuple(map(int, pair)), 9


def _merge_overlapping(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    merged, was_pair = [], False
    for i, token in enumerate(ids):
        is_pair = tuple(ids[i : i + 2]) == tuple(pair)
        if is_pair:
            merged.append(new_id)
        elif not was_pair:
            merged.append(token)
        was_pair = is_pair
    return merged


def _merge_in_place(ids: list[int], pair: tuple, new_id: int) -> list[int]:
    for i in range(len(ids)):
        if tuple(ids[i : i + 2]) == tuple(pair):
            ids[i : i + 2] = [new_id]
    return ids


def solve_merge_pair(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    merged, i = [], 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == tuple(pair):
            merged.append(new_id)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged


MERGE_PAIR = Exercise(
    solve_merge_pair,
    _draw_merge,
    {
        "overlapping pairs are merged twice; in [1, 1, 1] the middle 1 belongs to one pair only": (
            _merge_overlapping
        ),
        "the second id of a merged pair stays; after a merge, step over both": ("i += 2", "i += 1"),
        "the merging runs from right to left; [1, 1, 1] becomes [9, 1], not [1, 9]": (
            "    return merged",
            "    return merge_pair(ids[::-1], pair[::-1], new_id)[::-1]",
        ),
        "only the first pair is merged; go on to the end of the list": (
            "            i += 2",
            "            return [*merged, *ids[i + 2 :]]",
        ),
        "the last id gets lost where no pair ends the list": ("i < len(ids)", "i < len(ids) - 1"),
        "the pair is also merged the other way round; (1, 2) is not (2, 1)": (
            "== tuple(pair)",
            "in (tuple(pair), tuple(pair[::-1]))",
        ),
        "nothing is merged; a list slice never equals a tuple": (
            "tuple(ids[i : i + 2]) == tuple(pair)",
            "ids[i : i + 2] == tuple(pair)",
        ),
        "the list that is given is changed; others need it, and it may be a tuple": _merge_in_place,
    },
)


# 2. GPT-4's pre-tokens

# Letters in two cases and two alphabets, digits, white space of each kind, and the rest.
PIECES = (
    *("a", "Bc", "é", "日本", "cat", "7", "20", "2026", "Ⅳ", "'s", "'LL", "'t", "'Llama", "'"),
    *(" ", " ", "  ", "\t", "\n", "\n", "\r\n", " \n ", "!", "...", "==", "(", "_"),
)


def _draw_text(generator: random.Random, size: int) -> tuple:
    return ("".join(generator.choices(PIECES, k=generator.randint(0, 1 + size))),)


def split_gpt4(text: str) -> list[str]:
    pattern = (
        r"'(?i:[sdmt]|ll|ve|re)"
        r"|[^\r\n\p{L}\p{N}]?\p{L}+"
        r"|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s+\Z"
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s+"
    )
    return regex.findall(pattern, text)


def _describe_pieces(yours: Any, expected: list[str]) -> str:
    found = difference(yours, expected)
    if isinstance(yours, list) and any(piece == "" or isinstance(piece, tuple) for piece in yours):
        found += "\n  `findall` returns the groups of a pattern that has any; write (?:…) for (…)."
    return found


SPLIT_GPT4 = Exercise(
    split_gpt4,
    _draw_text,
    {
        "a run of digits stays whole; cut it after every third": (r"\p{N}{1,3}", r"\p{N}+"),
        "digits take a space with them, as in GPT-2; here only letters and others do": (
            r"|\p{N}{1,3}",
            r"| ?\p{N}{1,3}",
        ),
        "contractions in capitals are not seen": ("(?i:", "(?:"),
        "contractions in mixed case, such as `'Ll`, are not seen": (
            "(?i:[sdmt]|ll|ve|re)",
            "(?:[sdmtSDMT]|ll|ve|re|LL|VE|RE)",
        ),
        "only a space may go before letters; any one character that is neither letter, digit nor "
        "line end may": (r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?\p{L}+"),
        "a line end goes before letters; it may not": (r"[^\r\n\p{L}\p{N}]?", r"[^\p{L}\p{N}]?"),
        "line ends do not go with the other characters before them": (r"]+[\r\n]*", "]+"),
        "white space up to a line end is no piece of its own": (
            r"""        r"|\s*[\r\n]+"
""",
            "",
        ),
        "white space at the end of the text is cut behind its last line end; it stays whole": (
            r"""        r"|\s+\Z"
""",
            "",
        ),
        "white space keeps its last character from the word that follows": (
            r"""        r"|\s+(?!\S)"
""",
            "",
        ),
        "white space before text is lost; a single one that no rule has taken is a piece": (
            r"""        r"|\s+"
""",
            "",
        ),
        "these are GPT-2's pieces": lambda text: split_pretokens(text),
    },
    "core",
    describe=_describe_pieces,
)


# 3. Training that visits only what changes


def _draw_training(generator: random.Random, size: int) -> tuple:
    counts = {}
    for _ in range(size):
        word = "".join(generator.choices("abé", k=generator.randint(1, 2 + size)))
        counts[word.encode()] = generator.randint(1, 9)
    return counts, generator.randint(1, 3 * size)


def train(counts: Mapping[bytes, int], num_merges: int) -> list[tuple[bytes, bytes]]:
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
            words[i] = merge_pair(words[i], pair, new_id)
            for new in pairwise(words[i]):
                changes[new] += weights[i]
                holders[new].add(i)
        for changed, change in changes.items():
            pair_counts[changed] += change
            if change and pair_counts[changed]:
                heappush(heap, entry(changed))
    return merges


def naive_train(counts: Mapping[bytes, int], num_merges: int) -> list[tuple[bytes, bytes]]:
    """The loop of the lesson: it counts all pairs again for each merge."""
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
        words = {tuple(merge_pair(word, best, new_id)): count for word, count in words.items()}
    return merges


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


# how the naive loop decides between equally frequent pairs
TIES = "(pairs[pair], vocab[pair[0]], vocab[pair[1]])"
TRAIN = Exercise(
    train,
    _draw_training,
    {
        "among equally frequent pairs the first one found is merged; take the one whose bytes come "
        "last in the alphabet": edited(naive_train, TIES, "pairs[pair]"),
        "among equally frequent pairs the one with the higher ids is merged; compare the bytes": (
            edited(naive_train, TIES, "(pairs[pair], pair)")
        ),
        "among equally frequent pairs the oldest one is merged; take the one whose bytes come last "
        "in the alphabet": (
            "return -pair_counts[pair], left, right, pair",
            "return -pair_counts[pair], list(pair_counts).index(pair), right, pair",
        ),
        "of two tokens of which one begins the other, the shorter comes first; put a 1 behind the "
        "negative bytes": (" + [1] for token", " for token"),
        "these are pairs of ids; return the bytes of both tokens": (
            "merges.append((vocab[pair[0]], vocab[pair[1]]))",
            "merges.append(pair)",
        ),
        "a pair whose count falls gets no new entry, and is lost; push one at every change": (
            "if change and",
            "if change > 0 and",
        ),
        "an old entry is taken for a new one; skip it where its count is no longer right": (
            "if -negative != pair_counts[pair]:",
            "if not negative:",
        ),
        "pairs are merged that no word holds any more; push no entry whose count is 0": (
            "if change and pair_counts[changed]:",
            "if change:",
        ),
        "each word counts once, and not as often as it occurs": (
            "list(counts.values())",
            "[1] * len(counts)",
        ),
        "a pair that is merged away keeps its count": (
            "                changes[old] -= weights[i]",
            "                changes[old] -= 0",
        ),
        "new pairs are not counted": (
            "                changes[new] += weights[i]",
            "                changes[new] += weights[i] if new in changes else 0",
        ),
        "one merge too few is learned": (
            "len(merges) < num_merges",
            "len(merges) < num_merges - 1",
        ),
        "pairs are merged that no word holds any more; stop when the highest count is 0": edited(
            naive_train,
            "pairs = Counter()",
            "pairs = Counter(dict.fromkeys(pairs, 0)) if merges else Counter()",
        ),
        "words that got a pair by a merge are forgotten; they hold it, too": (
            "                holders[new].add(i)",
            "                pass",
        ),
    },
    "core",
    trials=60,
    measure=training_seconds,
    unit="s",
    # a search through all pairs for each merge takes 10 times as long, the naive loop 80 times
    at_most=25,
)


# 4. Better tokens


class Excerpt(str):
    """A text that does not fill the page when a check shows it."""

    def __repr__(self) -> str:
        return f"<{len(self):,} characters of the manual>"


def choose_tokens(text: str, size: int) -> Collection[bytes]:
    vocab, merges = train_from_counts(count_pretokens(text), size + size // 3)
    used = Counter(Tokenizer(vocab, merges, implementation="python").encode(text))
    often = sorted(range(256, len(vocab)), key=used.__getitem__, reverse=True)
    kept = [*range(256), *often[: size - 256]]
    return {vocab[token_id] for token_id in kept}


def plain_training(text: str, size: int) -> Collection[bytes]:
    return train_from_counts(count_pretokens(text), size)[0].values()


def allowed(choose: Callable) -> Callable[[str, int], dict[str, bool]]:
    """Return `choose` as a function that says whether its tokens are within the rules."""

    @functools.wraps(choose)
    def run(text: str, size: int) -> dict[str, bool]:
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

    return run


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


def tokens_needed(choose: Callable) -> float:
    """How many of the reader's tokens, chosen from 100 KB, the next 20 KB of the manual take."""
    chosen = inspect.unwrap(choose)(python_manual(100_000), 1024)
    return fewest_tokens(_unseen(20_000), chosen)


CHOOSE_TOKENS = Exercise(
    allowed(choose_tokens),
    lambda generator, size: (Excerpt(python_manual(100_000)[: 2000 * size]), 512 + 20 * size),
    {
        "a byte is missing: every text must be expressible": allowed(
            edited(choose_tokens, "*range(256), ", "*range(255), ")
        ),
        "there are more tokens than `size`": allowed(edited(choose_tokens, "size - 256", "size")),
    },
    "open",
    trials=3,
    measure=tokens_needed,
    unit="tokens",
    baseline=plain_training,
)


# 5. The vocabulary that suits a model


def _draw_curve(generator: random.Random, size: int) -> tuple:
    sizes = generator.sample([2**n for n in range(8, 18)], k=1 + size // 2)
    exponent = generator.uniform(0.05, 0.3)
    curve = {V: round(V**exponent, 2) for V in sizes}
    return curve, 10_000 * generator.randint(1, 1000), generator.choice([64, 128, 512, 2048])


def best_vocabulary(bytes_per_token: Mapping[int, float], N: int, d: int) -> int:
    return min(bytes_per_token, key=lambda V: (N + V * d) / bytes_per_token[V])


BEST_VOCABULARY = Exercise(
    best_vocabulary,
    _draw_curve,
    {
        "the head is left out; it has V * d weights": ("(N + V * d)", "N"),
        "the embedding is counted beside the head; a lookup has no FLOPs": ("V * d", "2 * V * d"),
        "the smallest always wins: a token costs N + V * d, to be divided by the bytes that it "
        "stands for": (
            " / bytes_per_token[V]",
            "",
        ),
        "this is the size at which a byte costs most": ("min(", "max("),
        "this is the lowest cost; return the size that has it": lambda curve, N, d: min(
            2 * (N + V * d) / B for V, B in curve.items()
        ),
    },
)


# 6. Encode from ranks alone, as tiktoken does

AWKWARD = (
    *("The", " cat", " sat", " on", " the", " mat", "'s", "'ll", " 2026", "3.14", "def f(x):"),
    *(" ", "   ", "\n", "\r\n\t", "é", "日本語", "👩‍👩‍👧", "\x00", "\u00a0", SEPARATOR),
    *5 * (f"{SEPARATOR}2",),
)


def _draw_awkward(generator: random.Random, size: int) -> tuple:
    # words that nobody has seen, where the order of the merges decides
    words = ["".join(generator.choices("atheinrosdl", k=9)) for _ in AWKWARD]
    text = "".join(generator.choices((*AWKWARD, *words), k=generator.randint(0, size)))
    special = {SEPARATOR: len(small_ranks()), f"{SEPARATOR}2": len(small_ranks()) + 1}
    return text, Ranks(small_ranks()), dict([*special.items()][: generator.randint(0, 2)])


class Ranks(dict):
    """A vocabulary that does not fill the page when a check shows it."""

    def __repr__(self) -> str:
        return f"<{len(self)} tokens>"

    def __deepcopy__(self, memo: dict) -> Ranks:
        return self


def _longest_tokens(data: bytes, ranks: Collection[bytes]) -> list[bytes]:
    """Cut off the longest token that fits, from left to right."""
    tokens = []
    while data:
        tokens.append(next(data[:end] for end in range(len(data), 0, -1) if data[:end] in ranks))
        data = data[len(tokens[-1]) :]
    return tokens


def encode(text: str, ranks: Mapping[bytes, int], special: Mapping[str, int]) -> list[int]:
    ids = []
    longest_first = sorted(special, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or "(?!)"  # which fits nowhere
    for piece in re.split(f"({pattern})", text):
        if piece in special:
            ids.append(special[piece])
            continue
        for pretoken in split_pretokens(piece):
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


ENCODE = Exercise(
    encode,
    _draw_awkward,
    {
        "the token learned last comes first; take the lowest rank": ("min(known", "max(known"),
        "tokens are built from left to right; the lowest rank comes first, wherever it is": (
            "min(known, key=ranks.get)",
            "known[0]",
        ),
        "the longest token that fits is taken, from left to right; begin with single bytes, and "
        "merge as the ranks say": (
            "split_pretokens(piece):\n            parts = [bytes([byte]) for byte in pretoken"
            ".encode()]\n            while True:",
            "[piece]:\n            parts = _longest_tokens(pretoken.encode(), ranks)"
            "\n            while False:",
        ),
        "the special token is encoded as ordinary text": ("if piece in special:", "if False:"),
        "without special tokens, the text falls apart: an empty pattern fits everywhere": (
            ' or "(?!)"',
            "",
        ),
        "special tokens are put in the pattern as they come; sort out those that begin others, and "
        "the case without any": (
            ', reverse=True)\n    pattern = "|".join(map(re.escape, longest_first)) or "(?!)"',
            ')\n    pattern = "|".join(map(re.escape, longest_first))',
        ),
        "a special token that begins another is found in it; look for the longest first": (
            "reverse=True",
            "reverse=False",
        ),
        "merges cross the borders of pre-tokens; split the text first": (
            "in split_pretokens(piece)",
            "in [piece]",
        ),
        "of several places with the same pair, the last is merged first; begin on the left": (
            "joined.index(min(known, key=ranks.get))",
            "len(joined) - 1 - joined[::-1].index(min(known, key=ranks.get))",
        ),
        "it stops after one merge in each pre-token; look again": (
            "parts[at : at + 2] = [joined[at]]",
            "parts[at : at + 2] = [joined[at]]\n                break",
        ),
        "a byte's own value is taken for its id; ranks has the ids of single bytes, too": (
            "ranks[part] for part in parts",
            "ranks[part] if len(part) > 1 else part[0] for part in parts",
        ),
    },
    "core",
    trials=100,
)


# 7. The bug in a stream's cuts


class CountingStream(io.BytesIO):
    """A stream that a check shows by its bytes."""

    def __repr__(self) -> str:
        return f"io.BytesIO({self.getvalue()!r})"

    def __deepcopy__(self, memo: dict) -> CountingStream:
        return CountingStream(self.getvalue())


def read_chunks(stream: io.BytesIO, size: int) -> Iterator[bytes]:
    rest = b""
    while block := stream.read(size):
        rest += block
        cuts = [match.start() for match in re.finditer(rb" (?=[!-~])", rest)]
        if cuts:
            yield rest[: cuts[-1]]
            rest = rest[cuts[-1] :]
    yield rest


def broken_read_chunks(stream: io.BytesIO, size: int) -> Iterator[bytes]:
    """The function of the lesson: it cuts before the last space, whatever follows."""
    rest = b""
    while block := stream.read(size):
        rest += block
        cut = rest.rfind(b" ")
        yield rest[:cut]
        rest = rest[cut:]
    yield rest


def _read_all(stream: io.BytesIO, size: int) -> Iterator[bytes]:
    yield stream.read()


def pretokens_of(chunks: Callable) -> Callable[[io.BytesIO, int], dict[str, Any]]:
    """Return `chunks` as a function that gives its pre-tokens, and what came too late."""

    @functools.wraps(chunks)
    def run(stream: io.BytesIO, size: int) -> dict[str, Any]:
        data, given, late, pretokens = stream.getvalue(), 0, b"", []
        # between two sure cuts, nothing can be given out
        longest = max(map(len, re.split(rb" (?=[!-~])", data)))
        for chunk in chunks(stream, size):
            held = data[given : stream.tell()]
            if len(held) > 2 * size + longest + 8:
                late = late or held
            given += len(chunk)
            pretokens += split_pretokens(chunk.decode("utf-8", "replace"))
        return {"pre-tokens": pretokens, "held back too long": late}

    return run


def _draw_stream(generator: random.Random, size: int) -> tuple:
    pieces = ("cat", "été", " the", " a", "  ", "    ", "\n", "\n    x", "日本", "!", "\u2003")
    text = "".join(generator.choices(pieces, k=1 + 2 * size))
    return CountingStream(text.encode()), generator.choice([2, 5, 8])


READ_CHUNKS = Exercise(
    pretokens_of(read_chunks),
    _draw_stream,
    {
        "it still cuts before the last space, whatever stands on either side; and where there is "
        "no space, `rfind` returns -1": pretokens_of(broken_read_chunks),
        "it cuts before a space that more white space follows": pretokens_of(
            edited(read_chunks, " (?=[!-~])", " ")
        ),
        "it cuts before a space at the end of the block, where nobody knows yet what follows": (
            pretokens_of(edited(read_chunks, " (?=[!-~])", " (?=[!-~]|$)"))
        ),
        "it asks whether anything follows the space, and not what: more white space may": (
            pretokens_of(edited(read_chunks, " (?=[!-~])", r" (?=[\s\S])"))
        ),
        "white space outside ASCII is taken for visible text; ask for a byte from `!` to `~`": (
            pretokens_of(edited(read_chunks, " (?=[!-~])", r" (?=\S)"))
        ),
        "it cuts behind the space, which belongs to the word that follows": pretokens_of(
            edited(read_chunks, "match.start()", "match.end()")
        ),
        "only the first place for a cut is used; what follows it waits too long": pretokens_of(
            edited(read_chunks, '(?=[!-~])", rest)]', '(?=[!-~])", rest)][:1]')
        ),
        "the end of the text is lost": pretokens_of(edited(read_chunks, "    yield rest\n", "")),
        "everything is read before the first chunk is given out": pretokens_of(_read_all),
        "the part behind the cut is lost": pretokens_of(
            edited(read_chunks, "rest = rest[cuts[-1] :]", 'rest = b""')
        ),
        "the text is given out in blocks, wherever they end": pretokens_of(
            lambda stream, size: iter(lambda: stream.read(size), b"")
        ),
    },
    "core",
)


def check_merge_pair(attempt: Callable) -> None:
    """Check `merge_pair(ids, pair, new_id)` -> list of ids."""
    check(MERGE_PAIR, attempt)


def check_split_gpt4(attempt: Callable) -> None:
    """Check `split_gpt4(text)` -> list of pre-tokens."""
    check(SPLIT_GPT4, attempt)


def check_train(attempt: Callable) -> None:
    """Check `train(counts, num_merges)`: {bytes: count} -> list of pairs of bytes; and time it."""
    check(TRAIN, attempt)


def check_best_vocabulary(attempt: Callable) -> None:
    """Check `best_vocabulary(bytes_per_token, N, d)`, from {V: bytes per token} -> V."""
    check(BEST_VOCABULARY, attempt)


def check_encode(attempt: Callable) -> None:
    """Check `encode(text, ranks, special)`, with ranks {bytes: id} -> list of ids."""
    check(ENCODE, attempt)


def check_read_chunks(attempt: Callable) -> None:
    """Check the generator `read_chunks(stream, size)` by the pre-tokens of its chunks."""
    check(READ_CHUNKS, pretokens_of(attempt))


def check_choose_tokens(attempt: Callable) -> None:
    """Check `choose_tokens(text, size)` -> at most `size` byte strings; and count their use."""
    check(CHOOSE_TOKENS, allowed(attempt))
