"""The exercises of notebook 01 against independent answers; their mistakes: test_exercise.py."""

import hashlib
import inspect
import lzma
import re

import pytest
import regex
import tiktoken
import tiktoken_ext.openai_public

from lib.core.files import ROOT
from lib.lessons.exercise import draw_inputs, verdict
from lib.lessons.tokenizer import figures
from lib.lessons.tokenizer.exercises import (
    choose_tokens,
    encode_ranked,
    fewest_tokens,
    merge,
    plain_training,
    split_gpt4,
    tokens_needed,
    train,
    train_fast,
    training_seconds,
)
from lib.lessons.tokenizer.texts import gpt2_ids, gpt2_ranks, python_manual
from lib.tokenizer.bpe import count_pretokens, train_from_counts
from lib.tokenizer.pretokenize import GPT2_PATTERN, SEPARATOR


def test_inputs_start_short_and_hold_an_empty_one():
    inputs = draw_inputs(merge, 0)
    assert max(len(repr(arguments)) for arguments in inputs[:5]) < 150
    assert any(not arguments[0] for arguments in inputs)


def merge_and_filter(ids, pair, new_id):
    ids = list(ids)
    for i in range(len(ids) - 1):
        if (ids[i], ids[i + 1]) == pair:
            ids[i : i + 2] = [new_id, None]
    return [token for token in ids if token]


def merge_in_place(ids, pair, new_id):
    for i in reversed(range(len(ids) - 1)):
        if (ids[i], ids[i + 1]) == pair and pair[0] != pair[1]:
            ids[i] = new_id
            del ids[i + 1]
    return list(ids)


@pytest.mark.parametrize("attempt", [merge_and_filter, merge_in_place])
def test_a_merge_that_is_right_only_for_some_ids_fails(attempt):
    assert attempt([1, 2, 1, 2, 2], (1, 2), 9) == [9, 9, 2]
    for seed in range(5):
        assert verdict(merge, attempt, seed=seed).startswith("not yet")


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


def split_by_minbpe(text):
    """The pattern that minbpe and early versions of tiktoken have for GPT-4."""
    return regex.findall(
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"""
        r"""| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+""",
        text,
    )


def tiktoken_ids(text, ranks, special=()):
    encoding = tiktoken.Encoding(
        "lesson", pat_str=GPT2_PATTERN, mergeable_ranks=dict(ranks), special_tokens=dict(special)
    )
    return encoding.encode(text, allowed_special="all")


def learn_as_lib(counts, num_merges):
    return train_from_counts(counts, 256 + num_merges)[1]


@pytest.mark.parametrize(
    ("exercise", "independent"),
    [
        (split_gpt4, split_by_tiktoken),
        (split_gpt4, split_by_minbpe),
        (encode_ranked, tiktoken_ids),
        (train, learn_as_lib),
        (train_fast, learn_as_lib),
    ],
    ids=["split_gpt4", "split_gpt4 of minbpe", "encode", "train", "train_fast"],
)
def test_an_independent_answer_is_right(exercise, independent):
    assert verdict(exercise, independent, seed=0).startswith("right")


def train_and_stop_early(counts, num_merges):
    """The plain loop, pasted, with a look at whether anything is left."""
    if not any(len(word) > 1 for word in counts):
        return []
    return train.solve(counts, num_merges)


def test_counting_anew_for_each_merge_is_right_but_at_too_high_a_cost():
    for arguments in draw_inputs(train_fast, 0):
        assert train.solve(*arguments) == train_fast.solve(*arguments)
    most = train_fast.at_most * training_seconds(train_fast.solve)
    assert training_seconds(train.solve) > most
    text = verdict(train_fast, train_and_stop_early, seed=0)
    assert "but at too high a cost" in text


def test_chosen_tokens_are_fewer_than_those_of_plain_training():
    assert verdict(choose_tokens, plain_training, seed=0).startswith("right")
    assert tokens_needed(choose_tokens.solve) < tokens_needed(plain_training)
    assert fewest_tokens(b"aaab", {b"a", b"b", b"aa", b"aab"}) == 2


def test_tokens_much_worse_than_those_of_plain_training_fail():
    def only_bytes(text, size):
        return [bytes([byte]) for byte in range(256)]

    def frequent_words(text, size):
        words = [word for word, _ in count_pretokens(text).most_common() if len(word) > 1]
        return [*only_bytes(text, size), *words[: size - 256]]

    for attempt in (only_bytes, frequent_words):
        text = verdict(choose_tokens, attempt, seed=0)
        assert "'at most 20% worse than plain training': yours False, expected True" in text


@pytest.mark.parametrize("group", ["'([sdmt]|ll|ve|re)", "('(?i:[sdmt]|ll|ve|re))"])
def test_a_group_whose_text_alone_is_found_is_explained(group):
    pattern = (
        rf"{group}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s+"
    )
    text = verdict(split_gpt4, lambda text: regex.findall(pattern, text), seed=0)
    assert "`findall` returns the groups of a pattern that has any; write (?:…) for (…)." in text


def test_the_manual_is_the_same_text_from_its_beginning():
    assert python_manual().startswith(python_manual(5000))
    assert len(python_manual()) > 1_000_000
    # not the code between the documentation strings
    assert python_manual().count("import ") < 1000


def test_gpt2s_ranks_and_stored_ids_are_those_of_tiktoken():
    ranks, special = gpt2_ranks(), {SEPARATOR: 50256}
    assert len(ranks) == 256 + 50_000
    # two ids that anyone can look up
    assert tiktoken_ids("Hello, world!", ranks, special) == [15496, 11, 995, 0]
    for text, ids in gpt2_ids().items():
        assert tiktoken_ids(text, ranks, special) == ids
        if SEPARATOR not in text:
            assert encode_ranked.solve(text, ranks) == ids


def test_gpt2s_merges_are_the_file_that_tiktoken_downloads():
    with lzma.open(ROOT / "artifacts/gpt2/vocab.bpe.xz") as file:
        found = hashlib.sha256(file.read()).hexdigest()
    source = inspect.getsource(tiktoken_ext.openai_public.gpt2)
    assert f'vocab_bpe_hash="{found}"' in source


def test_recorded_speeds_have_a_row_for_each_encoder_with_the_fastest_first(capsys):
    rows = figures.recorded_speeds("encode")
    assert set(rows[0]) == {"encoder", *figures.TEXTS.values()}
    assert {"lib, compiled", "lib, readable", "tiktoken, by document"} <= {
        r["encoder"] for r in rows
    }
    speeds = [row["English dictionary"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert "encode" in capsys.readouterr().out
