"""The benchmark of training on a CPU: the matmuls of the bare loop, and what is recorded."""

import dataclasses
import re
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import lib.tools.benchmarks.training_cpu as benchmark
from lib.core.records import read_records
from lib.core.settings import from_json
from lib.model.config import MODEL_PRESETS, ModelConfig, model_preset
from lib.model.costs import flops_per_token
from lib.tools.benchmarks.training import TrainingBenchmarkConfig, benchmark_training
from lib.tools.benchmarks.training_cpu import (
    BARE,
    BARE_WEIGHTS,
    BATCH_SIZES,
    LOOP,
    STEP,
    TINY,
    Matmul,
    bare_loop,
    step_matmuls,
    training_functions,
)
from lib.training.config import PipelineConfig, TrainConfig

# every size differs from the others, and the chunks of the head are unequal
SHAPE = ModelConfig(vocab_size=61, context_length=9, d_model=24, num_layers=2, num_heads=3, d_ff=44)
NAIVE = dataclasses.replace(SHAPE, attention_kernel="vectorized_torch")
BATCH = 5
MULTIPLY = {"mm": torch.ops.aten.mm, "bmm": torch.ops.aten.bmm}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for module in ("lib.model.loss", "lib.tools.benchmarks.training_cpu"):
        monkeypatch.setattr(f"{module}.CHUNK_BYTES", 20 * 4 * 61)


class Shapes(TorchDispatchMode):
    """Counts the shapes of the factors of each matmul."""

    def __init__(self):
        super().__init__()
        self.shapes = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.overloadpacket in MULTIPLY.values():
            self.shapes[tuple(tuple(tensor.shape) for tensor in arguments[:2])] += 1
        return function(*arguments, **(keywords or {}))


def matmuls_of(function) -> Counter:
    with Shapes() as mode:
        function()
    return mode.shapes


def flops_of(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def a_step(shape: ModelConfig):
    config = TrainConfig(model=shape, batch_size=BATCH, steps=1000, device="cpu")
    return training_functions(config)[STEP]


@pytest.mark.parametrize(
    "settings", [{}, {"feed_forward": "silu"}, {"tied_embeddings": True}, {"norm": "post"}], ids=str
)
def test_the_bare_loop_runs_the_matmuls_of_a_step(settings):
    shape = dataclasses.replace(NAIVE, **settings)
    matmuls, step = step_matmuls(shape, BATCH), a_step(shape)
    step()
    made = matmuls_of(bare_loop(matmuls))
    assert made == matmuls_of(step)
    assert made.total() == 2 * (4 * 3 + 6) + 3 * 3
    flops = sum(matmul.flops for matmul in matmuls)
    assert flops == flops_of(bare_loop(matmuls)) == flops_of(step)
    assert flops == flops_per_token(shape) * BATCH * shape.context_length


def test_a_bare_loop_multiplies_into_the_same_memory(monkeypatch):
    results, original = [], torch.mm

    def multiply(first, second, *, out):
        results.append(original(first, second, out=out))
        assert torch.allclose(out, first @ second)

    monkeypatch.setattr(torch, "mm", multiply)
    loop = bare_loop([Matmul((4, 3), (4, 5), "first")])
    loop()
    loop()
    assert results[0].shape == (3, 5)
    assert results[0].data_ptr() == results[1].data_ptr()


def test_the_default_is_the_step_of_the_tiny_pipeline():
    tiny = from_json(PipelineConfig, TINY)
    # which `auto` is on a CPU
    settings = {"vocab_size": tiny.corpus.vocab_size, "attention_kernel": "sdpa"}
    shape = dataclasses.replace(tiny.train.model, **settings)
    assert shape == model_preset("tiny")
    assert (tiny.train.batch_size,) == BATCH_SIZES
    assert tiny.train.gradient_accumulation_steps == 1


@pytest.fixture(scope="module")
def measured(tmp_path_factory, one_core):
    """The table and the records of a benchmark of a model at two batch sizes."""
    folder = tmp_path_factory.mktemp("measured")
    config = TrainingBenchmarkConfig(
        models=("small one",) * 2, batch_sizes=(2, 3), samples=3, output=folder, device="cpu"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODEL_PRESETS, "small one", SHAPE)
        path = benchmark_training(config)
    assert path == folder / "training_cpu_benchmark.md"
    return path.read_text(), read_records(folder / "training_cpu_benchmark.jsonl")


def test_each_candidate_has_a_record_and_a_line_of_the_table(measured):
    text, records = measured
    figures = [record["figures"] for record in records]
    assert [row["candidate"] for row in figures] == 2 * [BARE, BARE_WEIGHTS, STEP, LOOP]
    assert [row["batch_size"] for row in figures] == 4 * [2] + 4 * [3]
    for record, row in zip(records, figures):
        assert record["seed"] == 0
        assert (row["samples"], row["threads"]) == (3, 1)
        assert row["gflop_per_s"] == pytest.approx(row["gflop"] / row["median_ms"] * 1e3)
        assert len(re.findall(rf"\| {row['candidate']} +\|", text)) == 2
    assert "1 threads" in text


def test_a_share_is_the_time_of_the_bare_loop_over_that_of_a_step(measured):
    bare, without, step, loop = (record["figures"] for record in measured[1][:4])
    for row in (step, loop):
        assert row["tokens_per_s"] == pytest.approx(2 * 9 / row["median_ms"] * 1e3)
        for key, other in (("share", bare), ("share_without_attention", without)):
            shares = sorted(a / b for a, b in zip(other["times_ms"], row["times_ms"]))
            assert row[key] == pytest.approx(shares[1])
    assert not {"share", "tokens_per_s"} & {*bare, *without}


def test_an_unknown_model_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "measure_model", lambda *a, **k: pytest.fail("measured"))
    config = TrainingBenchmarkConfig(
        models=("tiny", "huge"), batch_sizes=(1, 1), output=tmp_path / "out", device="cpu"
    )
    with pytest.raises(ValueError, match="'huge'"):
        benchmark_training(config)
    assert not (tmp_path / "out").exists()


def test_data_change_from_step_to_step_only_in_the_loop(monkeypatch):
    seen = []
    functions = training_functions(TrainConfig(model=SHAPE, batch_size=2, device="cpu"))
    monkeypatch.setattr(
        benchmark.TrainStep, "__call__", lambda self, windows, lr: seen.append(windows.clone())
    )
    for name in (STEP, STEP, LOOP, LOOP):
        functions[name]()
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[2], seen[3])
    assert seen[2].shape == (2, SHAPE.context_length + 1)
