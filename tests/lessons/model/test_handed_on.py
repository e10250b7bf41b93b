"""Notebook 03 trains what the reader wrote in notebook 02, or the solution where that is wrong."""

import nbformat
import pytest
import torch

from lib.core.files import ROOT
from lib.lessons.model.exercises import attention, rotate
from lib.lessons.model.handed_on import NOTEBOOK, model_of_notebook_02
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM

SHAPE = ModelConfig(
    vocab_size=40, context_length=16, d_model=24, num_layers=1, num_heads=2, d_ff=32
)
OWN_ROTATE = """
def angles_of(length, frequencies):
    return torch.outer(torch.arange(length).float(), frequencies)


def rotate(x, theta, layout):
    frequencies = theta ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    turns = torch.polar(torch.ones(()), angles_of(x.shape[-2], frequencies))
    if layout == "halves":
        x = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns)
    return turned.flatten(-2) if layout == "pairs" else turned.transpose(-2, -1).flatten(-2)
"""


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Save notebook 02 with other sources for some of its functions; work in its folder."""
    monkeypatch.chdir(tmp_path)

    def save(**sources: str) -> None:
        notebook = nbformat.read(ROOT / "notebooks" / NOTEBOOK, as_version=4)
        for cell in notebook.cells:
            for name, source in sources.items():
                if cell.cell_type == "code" and cell.source.startswith(f"def {name}("):
                    cell.source = source
        nbformat.write(notebook, tmp_path / NOTEBOOK)

    return save


# what an answer uses besides functions: a class, a helper made by a call, a lambda, an assignment
OWN_ATTENTION = """
import functools as ft
from dataclasses import dataclass


@dataclass
class Scale:
    head_dim: int

    def __call__(self, scores):
        return scores * self.head_dim ** POWER


POWER = -1
POWER /= 2
sm = lambda scores: scores.softmax(-1)
lower = ft.partial(torch.tril, diagonal=0)


def attention(x, w_q, w_k, w_v, w_out, num_heads, rope):
    head_dim = len(w_q) // num_heads
    q, k, v = (split_heads(x @ w.T, head_dim) for w in (w_q, w_k, w_v))
    scores = Scale(head_dim)(rope(q) @ rope(k).mT)
    later = lower(torch.ones(scores.shape[-2:])) == 0
    CALLS.append(len(x))
    return (sm(scores.masked_fill(later, -math.inf)) @ v).transpose(1, 2).flatten(-2) @ w_out.T


CALLS = []
"""
SOLUTIONS = "rotate: the solution, attention: the solution, block: the solution\n"
OWN_BLOCK = """
def block(x, w, num_heads, rope):
    parts = w["attn.qkv_proj.weight"].tensor_split(3)
    normed = rms_norm(x, w["ln1.weight"])
    x = x + attention(normed, *parts, w["attn.output_proj.weight"], num_heads, rope)
    normed = rms_norm(x, w["ln2.weight"])
    return x + swiglu(normed, w["ffn.w13.weight"], w["ffn.w2.weight"])"""
WITH_CONSTANT = OWN_ROTATE.replace("shape[-1], 2)", "shape[-1], STEP)").replace(
    "\ndef rotate", "\nSTEP = 2\n\n\ndef rotate"
)


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_model_is_libs_with_open_exercises_and_without_a_copy(saved, is_saved, capsys):
    if is_saved:
        saved()
    model = model_of_notebook_02()
    assert capsys.readouterr().out == SOLUTIONS
    theirs = TransformerLM(SHAPE)
    weights = model.init_weights(SHAPE, seed=0)
    theirs.load_state_dict(weights)
    x = torch.randint(40, (2, 16))
    assert torch.allclose(model.transformer(weights, x, SHAPE), theirs(x), atol=1e-5)


@pytest.mark.parametrize(
    ("sources", "begins", "ends"),
    [
        # a function of its own goes with an answer, and so does a constant
        (
            {"rotate": OWN_ROTATE, "attention": "def attention(x, *given):\n    return x"},
            "attention: not yet: attention",
            "rotate: yours, attention: the solution, block: the solution\n",
        ),
        (
            {"rotate": WITH_CONSTANT},
            "",
            SOLUTIONS.replace("rotate: the solution", "rotate: yours"),
        ),
        # a block is taken though the attention in it is the solution
        ({"block": OWN_BLOCK}, "", "attention: the solution, block: yours\n"),
        (
            {"rotate": "def rotate(x, theta:\n    return x"},
            "rotate: 02_model.ipynb: no function `rotate` could be read: is there a syntax error "
            "in its cell?",
            SOLUTIONS,
        ),
    ],
    ids=["own function", "constant", "block", "syntax error"],
)
def test_right_answers_are_taken_and_wrong_ones_are_not(sources, begins, ends, saved, capsys):
    saved(**sources)
    model = model_of_notebook_02()
    said = capsys.readouterr().out
    assert said.startswith(begins)
    assert said.endswith(ends)
    assert (model.rotate is rotate.solve) == ("rotate: yours" not in said)
    assert model.attention is attention.solve
    # the other functions use them, too
    assert model.transformer.__globals__["rotate"] is model.rotate
    if "block: yours" in said:
        assert model.block.__globals__["attention"] is model.attention


def test_the_solutions_block_calls_the_readers_attention(saved, capsys):
    saved(attention=OWN_ATTENTION)
    model = model_of_notebook_02()
    assert capsys.readouterr().out == SOLUTIONS.replace("on: the solution", "on: yours")
    model.attention.__globals__["CALLS"].clear()
    model.transformer(model.init_weights(SHAPE, seed=0), torch.randint(40, (2, 16)), SHAPE)
    assert model.attention.__globals__["CALLS"] == [2]


def test_what_a_reader_has_tried_out_does_not_matter(saved, capsys):
    tried = "text = await fetch()\nscale = open('/no/file').read()\n" + OWN_ROTATE
    saved(rotate=tried.replace("* turns", "* turns + 0 * len(scale)"))
    model_of_notebook_02()
    assert "rotate: not yet" in capsys.readouterr().out


def test_a_cell_that_cannot_be_read_is_named(saved):
    saved(init_weights="def init_weights(config, seed:\n    return {}")
    with pytest.raises(NameError, match=r"no function `init_weights` could be read"):
        model_of_notebook_02()
