"""Helpers and checkers of notebook 01's exercises; test_answers.py has the answers to them."""

import hashlib
import inspect
import lzma

import tiktoken_ext.openai_public

from lib.core.files import ROOT
from lib.lessons.exercise import draw_inputs
from lib.lessons.tokenizer import figures
from lib.lessons.tokenizer.exercises import (
    choose_tokens,
    encode_text,
    fewest_tokens,
    merge_pair,
    plain_training,
    tokens_needed,
)
from lib.lessons.tokenizer.texts import gpt2_ids, gpt2_ranks, python_manual
from lib.tokenizer.pretokenize import SEPARATOR
from tests.lessons.answers.tokenizer import tiktoken_ids


def test_inputs_start_short_and_hold_an_empty_one():
    inputs = draw_inputs(merge_pair, 0)
    assert max(len(repr(arguments)) for arguments in inputs[:5]) < 150
    assert any(not arguments[0] for arguments in inputs)


def test_chosen_tokens_are_fewer_than_those_of_plain_training():
    assert tokens_needed(choose_tokens.solve) < tokens_needed(plain_training)
    assert fewest_tokens(b"aaab", {b"a", b"b", b"aa", b"aab"}) == 2


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
            assert encode_text.solve(text, ranks) == ids


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
