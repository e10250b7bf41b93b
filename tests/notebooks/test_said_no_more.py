"""Sentences that records or a derivation refuted, and ways to say what was not measured."""

import ast
import builtins
import re

import nbformat
import pytest

from lib.core.files import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
# (where, what was said, what is said instead), of any white space
CORRECTED = [
    ("notebooks/04_profiling.ipynb", "compute less or buy a faster chip", "or in lower precision"),
    ("notebooks/04_profiling.ipynb", "at least the longer of two times", "is an estimate, since"),
    (
        "notebooks/05_triton.ipynb",
        "It computes only on what is in",
        "ordinary instructions",
    ),
    ("notebooks/05_triton.ipynb", "RMSNorm, by PyTorch", "F.rms_norm, compiled"),
    ("notebooks/06_flash_attention.ipynb", r"\approx 28.5", "without caches moves"),
    (
        "notebooks/07_hopper.ipynb",
        "how busy are the tensor cores?",
        "with ping-pong and without",
    ),
    ("README.md", "4,096 tokens, causal: 1.03 times", "which leads at 16,384"),
]


def words_of(name: str) -> str:
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join(cell.source for cell in nbformat.reads(text, as_version=4).cells)
    return " ".join(text.replace("\n> ", " ").split())


@pytest.mark.parametrize(("name", "once", "now"), CORRECTED)
def test_what_was_refuted_is_not_said_again(name, once, now):
    words = words_of(name)
    assert once not in words
    assert now in words


def code_of(path):
    cells = nbformat.read(path, as_version=4).cells
    return [
        cell.source for cell in cells if cell.cell_type == "code" and "%" not in cell.source[:2]
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_formula_is_called_measured_and_no_table_has_the_date_of_a_files_last_record(path):
    for source in code_of(path):
        assert not re.search(r"place_of\(\w+\[-1\]\)", source)
        if ".measured(" not in source:
            continue
        for node in ast.walk(ast.parse(re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "measured":
                names = {one.id for one in ast.walk(node.args[0]) if isinstance(one, ast.Name)}
                assert names - set(dir(builtins)), ast.unparse(node)
