"""Ranges: nearly free when off, nested as the code runs when on, invisible to the compiler."""

import contextlib
import json
import threading
import timeit

import pytest
import torch

from lib.core import ranges as core_ranges
from lib.core.ranges import annotate
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from lib.training.config import OptimizerConfig, TrainConfig

MODEL = ModelConfig(
    vocab_size=61,
    context_length=16,
    d_model=32,
    num_layers=2,
    num_heads=4,
    d_ff=48,
    attention_kernel="vectorized_torch",
)


def ranges_of(function, tmp_path) -> list[str]:
    """The ranges that PyTorch's profiler sees in a call, in order, each as `outer/inner`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        function()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_bytes())["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    ranges.sort(key=lambda event: (event["ts"], -event["dur"]))
    paths, around = [], []
    for event in ranges:
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        around.append(event)
        paths.append("/".join(event["name"] for event in around))
    return paths


def make_step():
    from lib.training.step import TrainStep

    config = TrainConfig(
        model=MODEL, optimizer=OptimizerConfig(warmup_steps=0), batch_size=2, steps=9
    )
    model = TransformerLM(MODEL, generator=torch.Generator().manual_seed(0))
    return TrainStep(model, config, torch.device("cpu"), torch.float32)


@pytest.mark.serial
def test_a_range_that_is_off_costs_a_few_empty_blocks():
    def with_range():
        with annotate("x"):
            pass

    def with_nothing():
        with contextlib.nullcontext():
            pass

    costs = [min(timeit.repeat(f, number=10_000, repeat=20)) for f in (with_range, with_nothing)]
    assert costs[0] < 5 * costs[1]


def test_a_training_step_is_nested_as_it_runs(tmp_path):
    step, sequences = make_step(), torch.zeros(2, 17, dtype=torch.int64)
    step(sequences, 1e-3)
    with core_ranges.enabled():
        found = ranges_of(lambda: step(sequences, 1e-3), tmp_path)
    found = [path for path in found if "#" not in path]
    blocks = []
    for index in range(2):
        block = f"training step/forward/block {index}"
        parts = [f"{block}/attention/{part}" for part in ("scores", "softmax", "value product")]
        blocks += [block, f"{block}/attention", *parts, f"{block}/feed-forward"]
    ends = ["forward/loss", "backward", "gradient norm", "optimizer"]
    assert found == [
        "training step",
        "training step/forward",
        *blocks,
        *(f"training step/{name}" for name in ends),
    ]


def test_ranges_are_on_in_the_block_and_its_thread_alone(tmp_path):
    def mark(name):
        with annotate(name):
            pass

    def function():
        with core_ranges.enabled():
            mark("inside")
            thread = threading.Thread(target=mark, args=("other thread",))
            thread.start()
            thread.join()
        mark("behind")

    assert ranges_of(function, tmp_path) == ["inside"]


def compiled_graphs(function, *args) -> list[str]:
    """The code of each graph that the compiler captures, without a break."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return graphs


def test_compiled_code_is_the_same_with_and_without_ranges():
    def plain(x):
        doubled = x * 2
        weights = doubled.softmax(-1)
        return weights @ x

    def annotated(x):
        with annotate("outer"):
            with annotate("scores"):
                doubled = x * 2
            with annotate("softmax"):
                weights = doubled.softmax(-1)
            return weights @ x

    expected = compiled_graphs(plain, torch.ones(3, 3))
    assert compiled_graphs(annotated, torch.ones(3, 3)) == expected
    with core_ranges.enabled():
        assert compiled_graphs(annotated, torch.ones(3, 3)) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_nvtx_without_cuda_is_rejected():
    with pytest.raises(ValueError, match="nvtx must be False"), core_ranges.enabled(nvtx=True):
        pass


def test_nvtx_ranges_open_and_close_in_order(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    with core_ranges.enabled(nvtx=True), annotate("x"), annotate("y"):
        pass
    assert calls == ["x", "y", "pop", "pop"]
