"""The exercises of notebook 01 against independent answers; their mistakes: test_exercise.py."""

import inspect
import re

import pytest
import regex
import tiktoken
import tiktoken_ext.openai_public

from lib.lessons.exercise import draw_inputs, verdict
from lib.lessons.tokenizer.exercises import (
    CHOOSE_TOKENS,
    ENCODE,
    MERGE_PAIR,
    READ_CHUNKS,
    SPLIT_GPT4,
    TRAIN,
    allowed,
    broken_read_chunks,
    choose_tokens,
    encode,
    fewest_tokens,
    naive_train,
    plain_training,
    pretokens_of,
    tokens_needed,
    train,
    training_seconds,
)
from lib.lessons.tokenizer.texts import find_peer, python_manual
from lib.tokenizer.bpe import Tokenizer, count_pretokens, train_from_counts
from lib.tokenizer.pretokenize import GPT2_PATTERN, SEPARATOR, iter_chunks


def merge_as_text(ids, pair, new_id):
    text = " ".join(map(str, ids)).replace("{} {}".format(*pair), str(new_id))
    return [int(token) for token in text.split()]


def merge_same_objects(ids, pair, new_id):
    merged, i = [], 0
    while i < len(ids):
        found = i + 1 < len(ids) and ids[i] is pair[0] and ids[i + 1] is pair[1]
        merged.append(new_id if found else ids[i])
        i += 2 if found else 1
    return merged


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


ONLY_FOR_SOME = [merge_as_text, merge_same_objects, merge_and_filter, merge_in_place]


@pytest.mark.parametrize("attempt", ONLY_FOR_SOME)
def test_a_merge_that_is_right_only_for_some_ids_fails(attempt):
    assert attempt([1, 2, 1, 2, 2], (1, 2), 9) == [9, 9, 2]
    for seed in range(5):
        assert verdict(MERGE_PAIR, attempt, seed=seed).startswith("not yet")


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


def encode_by_tiktoken(text, ranks, special):
    # where one special token begins another, tiktoken may take either
    if (longer := f"{SEPARATOR}2") in special:
        text, special = text.replace(longer, "<|other|>"), dict(special)
        special["<|other|>"] = special.pop(longer)
    peer = tiktoken.Encoding(
        "peer", pat_str=GPT2_PATTERN, mergeable_ranks=dict(ranks), special_tokens=dict(special)
    )
    return peer.encode(text, allowed_special="all")


def learn_as_lib(counts, num_merges):
    return train_from_counts(counts, 256 + num_merges)[1]


def cut_as_lib(stream, size):
    yield from iter_chunks(stream, size)


@pytest.mark.parametrize(
    ("exercise", "independent"),
    [
        (SPLIT_GPT4, split_by_tiktoken),
        (ENCODE, encode_by_tiktoken),
        (TRAIN, learn_as_lib),
        (READ_CHUNKS, pretokens_of(cut_as_lib)),
    ],
    ids=["split_gpt4", "encode", "train", "read_chunks"],
)
def test_an_independent_answer_is_right(exercise, independent):
    assert verdict(exercise, independent, seed=0).startswith("right")


def test_the_naive_trainer_is_right_and_slow():
    for arguments in draw_inputs(TRAIN, 0):
        assert naive_train(*arguments) == train(*arguments)
    assert training_seconds(naive_train) > TRAIN.at_most * training_seconds(train)


def test_the_stream_of_the_lesson_has_the_bug_that_it_claims():
    text = verdict(READ_CHUNKS, pretokens_of(broken_read_chunks), seed=0)
    assert text.startswith("not yet")
    assert "pre-tokens" in text


def test_chosen_tokens_are_fewer_than_those_of_plain_training():
    assert verdict(CHOOSE_TOKENS, allowed(plain_training), seed=0).startswith("right")
    assert tokens_needed(choose_tokens) < tokens_needed(plain_training)
    assert fewest_tokens(b"aaab", {b"a", b"b", b"aa", b"aab"}) == 2


def test_tokens_much_worse_than_those_of_plain_training_fail():
    def only_bytes(text, size):
        return [bytes([byte]) for byte in range(256)]

    def frequent_words(text, size):
        words = [word for word, _ in count_pretokens(text).most_common() if len(word) > 1]
        return [*only_bytes(text, size), *words[: size - 256]]

    for attempt in (only_bytes, frequent_words):
        text = verdict(CHOOSE_TOKENS, allowed(attempt), seed=0)
        assert "'at most 20% worse than plain training': yours False, expected True" in text


@pytest.mark.parametrize("group", ["'([sdmt]|ll|ve|re)", "('(?i:[sdmt]|ll|ve|re))"])
def test_a_group_whose_text_alone_is_found_is_explained(group):
    pattern = (
        rf"{group}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s+"
    )
    text = verdict(SPLIT_GPT4, lambda text: regex.findall(pattern, text), seed=0)
    assert "`findall` returns the groups of a pattern that has any; write (?:…) for (…)." in text


def test_the_manual_is_the_same_text_from_its_beginning():
    assert python_manual().startswith(python_manual(5000))
    assert len(python_manual()) > 1_000_000
    # not the code between the documentation strings
    assert python_manual().count("import ") < 1000


def test_the_peer_is_tiktoken_with_gpt2s_or_our_own_vocabulary():
    vocab, merges = train_from_counts(count_pretokens(python_manual(20_000)), 400)
    peer, text = find_peer(Tokenizer(vocab, merges, [SEPARATOR])), f"the def {SEPARATOR}"
    assert peer.name.startswith("tiktoken")
    assert peer.encode(text)[-1] == peer.special[SEPARATOR]
    assert encode(text, peer.ranks, peer.special) == peer.encode(text)


def test_gpt2s_vocabulary_is_taken_where_its_files_are(tmp_path, monkeypatch):
    # the hashes by which tiktoken calls vocab.bpe and encoder.json
    hashes = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    for name in hashes.split():
        (tmp_path / name).touch()
    plain = Tokenizer({i: bytes([i]) for i in range(256)}, [], [SEPARATOR])
    whole = tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_PATTERN,
        mergeable_ranks={bytes([255 - i]): i for i in range(256)},
        special_tokens={SEPARATOR: 256},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": whole}.get)
    for folder, name in ((tmp_path, "GPT-2"), ("", "the 256 tokens"), (tmp_path / "no", "the 256")):
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        peer = find_peer(plain)
        assert name in peer.name
        assert encode(f"a{SEPARATOR}", peer.ranks, peer.special) == peer.encode(f"a{SEPARATOR}")
