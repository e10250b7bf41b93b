"""Answers to the exercises of notebook 01."""

import inspect
import re

import regex
import tiktoken
import tiktoken_ext.openai_public

from lib.lessons.tokenizer import exercises
from lib.tokenizer.bpe import count_pretokens, train_from_counts
from lib.tokenizer.pretokenize import GPT2_PATTERN
from tests.lessons.answers.table import right, wrong


@right(exercises.split_gpt4)
def split_by_tiktoken(text):
    """With every part of the text as a token, each pre-token is one token."""
    data = text.encode()
    parts = {data[i:j] for i in range(len(data)) for j in range(i + 1, len(data) + 1)}
    tokens = [*(bytes([byte]) for byte in range(256)), *sorted(part for part in parts if part[1:])]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    source = inspect.getsource(tiktoken_ext.openai_public.cl100k_base)
    pattern = re.search(r'"pat_str": r"""(.*?)"""', source)[1]
    peer = tiktoken.Encoding("parts", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return [token.decode() for token in peer.decode_tokens_bytes(peer.encode_ordinary(text))]


@right(exercises.split_gpt4)
def split_by_minbpe(text):
    """The pattern that minbpe and early versions of tiktoken have for GPT-4."""
    return regex.findall(
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"""
        r"""| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+""",
        text,
    )


@right(exercises.encode_text)
def tiktoken_ids(text, ranks, special=()):
    encoding = tiktoken.Encoding(
        "lesson", pat_str=GPT2_PATTERN, mergeable_ranks=dict(ranks), special_tokens=dict(special)
    )
    return encoding.encode(text, allowed_special="all")


@right(exercises.learn_merges)
@right(exercises.train_fast)
def learn_as_lib(counts, num_merges):
    return train_from_counts(counts, 256 + num_merges)[1]


right(exercises.choose_tokens)(exercises.plain_training)


@wrong(exercises.merge_pair)
def merge_and_filter(ids, pair, new_id):
    """Right for most ids, but not where one is 0."""
    ids = list(ids)
    for i in range(len(ids) - 1):
        if (ids[i], ids[i + 1]) == pair:
            ids[i : i + 2] = [new_id, None]
    return [token for token in ids if token]


@wrong(exercises.merge_pair)
def merge_in_place(ids, pair, new_id):
    """Right for most pairs, but not of one id twice."""
    ids = list(ids)
    for i in reversed(range(len(ids) - 1)):
        if (ids[i], ids[i + 1]) == pair and pair[0] != pair[1]:
            ids[i] = new_id
            del ids[i + 1]
    return ids


@wrong(exercises.train_fast, "but at too high a cost")
def train_and_stop_early(counts, num_merges):
    """The plain loop, pasted, with a look at whether anything is left."""
    if not any(len(word) > 1 for word in counts):
        return []
    return exercises.learn_merges.solve(counts, num_merges)


TOO_FEW = "'at most 20% worse than plain training': yours False, expected True"


@wrong(exercises.choose_tokens, TOO_FEW)
def only_bytes(text, size):
    return [bytes([byte]) for byte in range(256)]


@wrong(exercises.choose_tokens, TOO_FEW)
def frequent_words(text, size):
    words = [word for word, _ in count_pretokens(text).most_common() if len(word) > 1]
    return [*only_bytes(text, size), *words[: size - 256]]


# a pattern with a group, whose text alone `findall` returns
for group in ("'([sdmt]|ll|ve|re)", "('(?i:[sdmt]|ll|ve|re))"):
    PATTERN = (
        rf"{group}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s+"
    )
    cure = "`findall` returns the groups of a pattern that has any; write (?:…) for (…)."
    wrong(exercises.split_gpt4, cure)(lambda text, p=PATTERN: regex.findall(p, text))


@wrong(exercises.learn_merges, "it changes `counts`")
def empties_counts(counts, num_merges):
    return exercises.learn_merges.solve({word: counts.pop(word) for word in [*counts]}, num_merges)
