"""The check of the loss in chunks sees logits that are made or kept, and is quick."""

import re
import subprocess
import sys

import torch
import torch.nn.functional as F

from lib.lessons.exercise import verdict
from lib.lessons.profiling.exercises import loss_in_chunks


def chunks_kept_in_a_list(hidden, weight, targets, chunk_tokens):
    logits = torch.cat([h @ weight.T for h in hidden.split(chunk_tokens)])
    gradient = (logits.softmax(-1) - F.one_hot(targets, len(weight))) / len(targets)
    return F.cross_entropy(logits, targets), gradient @ weight, gradient.T @ hidden


def test_logits_of_all_tokens_are_noticed_even_if_made_in_chunks():
    text = verdict(loss_in_chunks, chunks_kept_in_a_list, seed=0)
    assert re.search(
        r"makes a \(\d+, \d+\) tensor, as many numbers as the logits of all tokens", text
    )


def test_a_timed_call_imports_nothing():
    """Importing takes PyTorch more than a second, most of the time limit."""
    code = """if True:
        import random, sys
        from lib.lessons.profiling.exercises import frugal, loss_in_chunks
        arguments = loss_in_chunks.draw(random.Random(0), 1)
        loaded = set(sys.modules)
        frugal(loss_in_chunks.solve, *arguments)
        print(len(set(sys.modules) - loaded))
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "0", result.stderr
