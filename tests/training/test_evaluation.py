"""Evaluation: each target once, against plain float64 loops and figures known by hand."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

import lib.training.evaluation
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from lib.tokenizer.bpe import Tokenizer
from lib.training.evaluation import bytes_of_token, evaluate, unigram_bits_per_byte

VOCAB, CONTEXT = 11, 8
BYTES = np.array([0, 1, 1, 2, 3, 4, 5, 2, 1, 7, 1])


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    config = ModelConfig(VOCAB, CONTEXT, d_model=8, num_layers=1, num_heads=2, d_ff=16)
    return TransformerLM(config, generator=torch.Generator().manual_seed(0))


def random_ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(VOCAB, size=length).astype(np.uint16)


def slow_losses(model: TransformerLM, tokens: np.ndarray) -> list[float]:
    """The loss of each target in float64, one sequence after the other."""
    losses = []
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, CONTEXT):
            window = [int(token) for token in tokens[start : start + CONTEXT + 1]]
            logits = model(torch.tensor([window[:-1]]))[0].double()
            losses += [-float(row.log_softmax(-1)[token]) for row, token in zip(logits, window[1:])]
    return losses


LENGTHS = (2, CONTEXT, CONTEXT + 1, CONTEXT + 2, 5 * CONTEXT + 1, 5 * CONTEXT + 2)


@pytest.mark.parametrize("batch_size", [1, 2, 100])
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_a_plain_loop(model, tmp_path, length, batch_size):
    tokens = random_ids(length)
    np.save(tmp_path / "tokens.npy", tokens)
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    result = evaluate(model, mapped, BYTES, batch_size=batch_size, device="cpu")
    losses = slow_losses(model, tokens)
    num_bytes = sum(int(BYTES[token]) for token in tokens[1:])
    assert result.tokens == len(losses) == length - 1
    assert result.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.loss), rel=1e-12)
    assert result.bytes == num_bytes
    bits = sum(losses) / math.log(2) / num_bytes if num_bytes else math.inf
    assert result.bits_per_byte == pytest.approx(bits, rel=1e-6)


class Recorder(torch.nn.Module):
    """A model that remembers what it is asked, and whose loss is `mean`."""

    def __init__(self, mean: float = 1.0) -> None:
        super().__init__()
        self.config = ModelConfig(VOCAB, CONTEXT)
        self.mean, self.asked = mean, []

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.asked.append((x, y, self.training, torch.is_grad_enabled()))
        return torch.tensor(self.mean)


@pytest.mark.parametrize("length", LENGTHS)
def test_batches_have_at_most_their_size_and_full_sequences_but_the_last(length):
    model = Recorder()
    evaluate(model, random_ids(length), BYTES, batch_size=2, device="cpu")
    shapes = [tuple(x.shape) for x, *_ in model.asked]
    assert all(batch <= 2 and (size == CONTEXT or batch == 1) for batch, size in shapes)


@pytest.mark.parametrize("max_tokens", [1, CONTEXT, CONTEXT + 1, 39, 40, 1000])
def test_max_tokens_are_the_first_targets(model, max_tokens):
    tokens = random_ids(41)
    result = evaluate(model, tokens, BYTES, batch_size=2, device="cpu", max_tokens=max_tokens)
    assert result.tokens == min(max_tokens, 40)
    assert result == evaluate(model, tokens[: max_tokens + 1], BYTES, batch_size=2, device="cpu")


def test_special_tokens_count_no_bytes_but_their_loss():
    table = bytes_of_token(
        Tokenizer({i: bytes([i]) for i in range(256)} | {256: b"the"}, [], ["<|end|>"])
    )
    assert table.dtype == np.int64
    assert table.tolist() == [1] * 256 + [3, 0]
    tokens = np.array([65, 256, 257, 66])
    result = evaluate(Recorder(mean=math.log(2)), tokens, table, batch_size=1, device="cpu")
    # three targets of one bit each, and 3 + 0 + 1 bytes
    assert (result.tokens, result.bytes) == (3, 4)
    assert result.bits_per_byte == pytest.approx(3 / 4)


@pytest.mark.parametrize(("mean", "perplexity"), [(1000.0, math.inf), (math.nan, math.nan)])
def test_a_diverged_model_is_a_result_also_where_there_is_no_text(mean, perplexity):
    result = evaluate(Recorder(mean), np.zeros(3, int), BYTES, batch_size=1, device="cpu")
    assert [result.loss, result.perplexity] == pytest.approx([mean, perplexity], nan_ok=True)
    assert (result.bits_per_byte, result.tokens, result.bytes) == (math.inf, 2, 0)


def test_many_batches_are_summed_in_float64():
    # a float32 running sum of these would be off by 2e-4 of it
    model, tokens = Recorder(mean=0.1), np.ones(20_000 * CONTEXT + 1, np.uint16)
    result = evaluate(model, tokens, BYTES, batch_size=1, device="cpu")
    assert result.loss == pytest.approx(float(np.float32(0.1)), rel=1e-12)


@pytest.mark.parametrize("is_training", [True, False])
def test_the_mode_is_evaluation_and_then_as_before_also_after_an_error(is_training):
    model, loss = Recorder(), Recorder.loss
    model.frozen, model.free = torch.nn.Dropout(), torch.nn.Dropout()
    model.train(is_training)
    model.frozen.eval()

    def failing(x, y):
        loss(model, x, y)
        raise RuntimeError("out of memory")

    model.loss = failing
    with pytest.raises(RuntimeError):
        evaluate(model, random_ids(20), BYTES, batch_size=1, device="cpu")
    ((_, _, training, grad),) = model.asked
    assert not training
    assert not grad
    modes = (model.training, model.free.training, model.frozen.training)
    assert modes == (is_training, is_training, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": random_ids(0)}, "tokens must have at least 2 ids, got 0"),
        ({"tokens": [1, 2, 3]}, "tokens must be a one-dimensional NumPy array .*, got list"),
        ({"tokens": np.ones((2, 3), np.int64)}, "tokens must be a one-dimensional NumPy array"),
        ({"tokens": random_ids(1)}, "tokens must have at least 2 ids, got 1"),
        ({"batch_size": 0}, "batch_size must be at least .*, got 0"),
        ({"max_tokens": -1}, "max_tokens must be at least .*, got -1"),
        # before the model runs
        ({"bytes_of_token": BYTES[:5]}, "bytes_of_token must .* got 5 entries and the id 10"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(changes, message):
    arguments = {"tokens": np.array([1, 2, 10]), "bytes_of_token": BYTES, "batch_size": 1}
    model = Recorder()
    with pytest.raises(ValueError, match=message):
        evaluate(model, device="cpu", **arguments | changes)
    assert not model.asked


@pytest.mark.parametrize(("chunk", "max_tokens"), [(1, 0), (7, 20), (1000, 1)])
def test_unigram_equals_a_count(monkeypatch, chunk, max_tokens):
    monkeypatch.setattr(lib.training.evaluation, "CHUNK_TOKENS", chunk)
    train, tokens = random_ids(60, seed=1) % 7, random_ids(40, seed=2)
    counts = Counter(train.tolist())
    targets = tokens[1:].tolist()[: max_tokens or None]
    bits = sum(-math.log2((counts[token] + 1) / (60 + VOCAB)) for token in targets)
    expected = bits / sum(int(BYTES[token]) for token in targets)
    result = unigram_bits_per_byte(train, tokens, BYTES, max_tokens=max_tokens)
    assert result == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_unigram_names_an_id_beyond_the_table(part):
    arrays = {"train": np.zeros(3, int), "validation": np.zeros(3, int)}
    arrays[part][2] = VOCAB
    with pytest.raises(ValueError, match=f"the id {VOCAB}"):
        unigram_bits_per_byte(*arrays.values(), BYTES)


@pytest.mark.gpu
def test_cuda_equals_cpu():
    config = ModelConfig(VOCAB, CONTEXT, d_model=64, num_layers=2, num_heads=2, d_ff=64)
    model = TransformerLM(config, generator=torch.Generator().manual_seed(0))
    tokens = random_ids(500)
    expected = evaluate(model, tokens, BYTES, batch_size=3, device="cpu")
    result = evaluate(model.cuda(), tokens, BYTES, batch_size=3, device="cuda")
    assert result.loss == pytest.approx(expected.loss, rel=1e-3)
    assert (result.tokens, result.bytes) == (expected.tokens, expected.bytes)
