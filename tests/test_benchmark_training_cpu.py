"""The benchmark of training on a CPU: the bare loop's products, and what is recorded."""

import dataclasses
import re
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import lib.benchmark_training_cpu as benchmark
from lib.benchmark_training_cpu import (
    BARE,
    BARE_WEIGHTS,
    LOOP,
    STEP,
    TINY,
    Product,
    bare_loop,
    benchmark_on_cpu,
    matrix_products,
    training_functions,
)
from lib.config import TrainingBenchmarkConfig
from lib.config_training import ModelConfig, PipelineConfig, TrainConfig
from lib.model_costs import flops_per_token
from lib.model_presets import MODEL_PRESETS, model_preset
from lib.report import read_records
from lib.strict_json import from_json

# every size differs from the others, and chunks of the head are not alike
SHAPE = ModelConfig(vocab_size=61, context_length=9, d_model=24, num_layers=2, num_heads=3, d_ff=44)
TEXTBOOK = dataclasses.replace(SHAPE, attention_kernel="vectorized_torch")
BATCH = 5
MULTIPLY = {"mm": torch.ops.aten.mm, "bmm": torch.ops.aten.bmm}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for module in ("lib.loss", "lib.benchmark_training_cpu"):
        monkeypatch.setattr(f"{module}.CHUNK_BYTES", 20 * 4 * 61)


class Products(TorchDispatchMode):
    """Counts the shapes of the factors of each matrix product."""

    def __init__(self):
        super().__init__()
        self.shapes = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.overloadpacket in MULTIPLY.values():
            self.shapes[tuple(tuple(tensor.shape) for tensor in arguments[:2])] += 1
        return function(*arguments, **(keywords or {}))


def made_by(function) -> Counter:
    with Products() as mode:
        function()
    return mode.shapes


def flops_of(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def a_step(shape: ModelConfig):
    config = TrainConfig(model=shape, batch_size=BATCH, steps=1000, device="cpu")
    return training_functions(config)[STEP]


VARIANTS = [{}, {"feed_forward": "silu"}, {"tied_embeddings": True}, {"norm": "post"}]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_the_bare_loop_makes_the_products_of_a_step(settings):
    shape = dataclasses.replace(TEXTBOOK, **settings)
    made = made_by(bare_loop(matrix_products(shape, BATCH)))
    step = a_step(shape)
    step()
    assert made == made_by(step)
    assert made.total() == 2 * (4 * 3 + 6) + 3 * 3


def test_with_a_fused_kernel_the_products_of_weights_are_those_of_a_step():
    weights = [p for p in matrix_products(SHAPE, BATCH) if len(p.first) == 2]
    assert made_by(bare_loop(weights)) == made_by(a_step(SHAPE))


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_bare_loop_and_step_have_the_same_flops(settings):
    shape = dataclasses.replace(TEXTBOOK, **settings)
    products = matrix_products(shape, BATCH)
    flops = sum(product.flops for product in products)
    assert flops == flops_of(bare_loop(products)) == flops_of(a_step(shape))
    assert flops == flops_per_token(shape) * BATCH * shape.context_length


@pytest.mark.parametrize(
    ("product", "shape"),
    [
        (Product((3, 4), (4, 5)), (3, 5)),
        (Product((3, 4), (5, 4), "second"), (3, 5)),
        (Product((4, 3), (4, 5), "first"), (3, 5)),
        (Product((2, 4, 3), (2, 4, 5), "first"), (2, 3, 5)),
    ],
)
def test_a_product_multiplies_what_its_shapes_say(product, shape, monkeypatch):
    seen = []
    name = "mm" if len(shape) == 2 else "bmm"
    original = getattr(torch, name)

    def multiply(first, second, *, out):
        seen.append((first, second, original(first, second, out=out)))

    monkeypatch.setattr(torch, name, multiply)
    loop = bare_loop([product])
    loop()
    loop()
    (first, second, result), (*_, again) = seen
    assert result.shape == shape
    assert torch.allclose(result, first @ second)
    assert result.data_ptr() == again.data_ptr()


def test_by_default_the_tiny_pipelines_step_is_measured():
    tiny = from_json(PipelineConfig, TINY)
    shape = dataclasses.replace(tiny.train.model, vocab_size=tiny.corpus.vocab_size)
    assert shape == model_preset("tiny")
    assert tiny.train.gradient_accumulation_steps == 1


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What a benchmark of a model at two batch sizes leaves behind."""
    folder = tmp_path_factory.mktemp("measured")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = TrainingBenchmarkConfig(
        models=("small one", "small one"), batch_sizes=(2, 3), samples=3, output=folder
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODEL_PRESETS, "small one", SHAPE)
        assert benchmark_on_cpu(config) == folder / "training_cpu_benchmark.md"
    torch.set_num_threads(threads)
    return folder


def test_each_candidate_has_a_record(measured):
    records = read_records(measured / "training_cpu_benchmark.jsonl")
    figures = [record["figures"] for record in records]
    assert [row["candidate"] for row in figures] == 2 * [BARE, BARE_WEIGHTS, STEP, LOOP]
    assert [row["batch_size"] for row in figures] == 4 * [2] + 4 * [3]
    for record, row in zip(records, figures):
        assert record["seed"] == 0
        assert (row["samples"], row["threads"]) == (3, 1)
        assert row["gflop_per_s"] == pytest.approx(row["gflop"] / row["median_ms"] * 1e3)


def test_a_share_is_the_time_of_the_bare_loop_over_that_of_a_step(measured):
    records = read_records(measured / "training_cpu_benchmark.jsonl")
    bare, without, step, loop = (record["figures"] for record in records[:4])
    for row in (step, loop):
        assert row["tokens_per_s"] == pytest.approx(2 * 9 / row["median_ms"] * 1e3)
        shares = sorted(a / b for a, b in zip(bare["times_ms"], row["times_ms"]))
        assert row["share"] == pytest.approx(shares[1])
        shares = sorted(a / b for a, b in zip(without["times_ms"], row["times_ms"]))
        assert row["share_without_attention"] == pytest.approx(shares[1])
    assert not {"share", "tokens_per_s"} & {*bare, *without}


def test_the_table_shows_this_run(measured):
    text = (measured / "training_cpu_benchmark.md").read_text()
    assert "1 threads" in text
    for candidate in (BARE, BARE_WEIGHTS, STEP, LOOP):
        assert len(re.findall(rf"\| {candidate} +\|", text)) == 2


def test_where_memory_runs_out_the_records_say_so(monkeypatch):
    def full(config):
        def step():
            raise MemoryError

        return {STEP: step, LOOP: step}

    monkeypatch.setattr(benchmark, "training_functions", full)
    config = TrainConfig(model=SHAPE, batch_size=2, device="cpu")
    rows = benchmark.benchmark_model(config, "small one", samples=1)
    assert [row["status"] for row in rows] == ["ok", "ok", "oom", "oom"]
    assert "share" not in rows[2]


def test_an_unknown_model_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "benchmark_model", lambda *a, **k: pytest.fail("it measures"))
    config = TrainingBenchmarkConfig(
        models=("tiny", "huge"), batch_sizes=(1, 1), output=tmp_path / "out"
    )
    with pytest.raises(ValueError, match="model preset is 'huge'; known: tiny"):
        benchmark_on_cpu(config)
    assert not (tmp_path / "out").exists()


def test_the_data_change_from_step_to_step_in_the_loop_alone(monkeypatch):
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
