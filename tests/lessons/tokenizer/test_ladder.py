"""The steps of notebook 01's ladder: each gives the ids of `Tokenizer`, cold and warm."""

import numpy as np
import pytest

from lib.lessons.tokenizer import figures, ladder
from lib.lessons.tokenizer.texts import python_manual
from lib.tokenizer.bpe import Tokenizer, count_pretokens, train_from_counts
from tests.texts import TRICKY

TEXT = python_manual(150_000)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(*train_from_counts(count_pretokens(TEXT), 500), implementation="python")


def test_each_step_gives_the_ids_of_the_readable_encoder_cold_and_warm(tokenizer):
    for name, encode in ladder.compiled_rungs(tokenizer).items():
        for text in (TEXT, TEXT[1000:], "".join(TRICKY), ""):
            assert encode(text).tolist() == tokenizer.encode(text), name


def test_the_ladder_names_each_speed_and_its_gain(drawn):
    figures.show_ladder({"slow": 2.0, "fast": 5.0}, title="")
    words = [text.get_text().strip() for text in drawn[0].axes[0].texts]
    assert words == ["2 MB/s", "5 MB/s  ×2.5"]


def test_rungs_are_measured_by_the_bytes_of_their_own_text():
    speeds = figures.measure_rungs(
        {"a": lambda text: np.sort(np.arange(10_000)), "b": len}, {"a": "é" * 10, "b": "é"}, 2
    )
    assert speeds["b"] > 0 < speeds["a"]


def test_recorded_speeds_have_a_row_for_each_encoder_with_the_fastest_first(capsys):
    rows = figures.recorded_speeds("encode")
    assert set(rows[0]) == {"encoder", *figures.TEXTS.values()}
    assert {"lib, compiled", "lib, readable", "tiktoken, by document"} <= {
        r["encoder"] for r in rows
    }
    speeds = [row["English dictionary"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert "encode" in capsys.readouterr().out
