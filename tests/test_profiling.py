"""Ranges: free when off, rightly nested when on, and never in the way of the compiler."""

import json
import threading
import timeit

import pytest
import torch

from lib import profiling
from lib.attention import attention
from lib.config_training import ModelConfig, OptimizerConfig, TrainConfig
from lib.model import TransformerLM
from lib.profiling import annotate
from lib.train_step import TrainStep

MODEL = ModelConfig(
    vocab_size=61,
    context_length=16,
    d_model=32,
    num_layers=2,
    num_heads=4,
    d_ff=48,
    attention_kernel="vectorized_torch",
)


def ranges_of(function, tmp_path) -> list[dict]:
    """The ranges that PyTorch's profiler sees in a call of `function`, in order of their starts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        function()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_bytes())["traceEvents"]
    return sorted(
        (e for e in events if e.get("cat") == "user_annotation"),
        key=lambda e: (e["ts"], -e["dur"]),
    )


def nesting(ranges: list[dict]) -> list[str]:
    """Each range with those around it, `outer/inner`."""
    paths, around = [], []
    for event in ranges:
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        around.append(event)
        paths.append("/".join(e["name"] for e in around))
    return paths


def textbook(q):
    return attention(q, q, q, kernel="vectorized_torch")


def make_step(**changes) -> TrainStep:
    config = TrainConfig(
        model=MODEL, optimizer=OptimizerConfig(warmup_steps=0), batch_size=2, steps=9, **changes
    )
    model = TransformerLM(MODEL, generator=torch.Generator().manual_seed(0))
    return TrainStep(model, config, torch.device("cpu"), torch.float32)


@pytest.mark.serial
def test_a_range_that_is_off_costs_less_than_a_microsecond():
    def with_range():
        with annotate("x"):
            pass

    fastest = min(timeit.repeat(with_range, number=10_000, repeat=20)) / 10_000
    assert fastest < 1e-6


def test_there_are_no_ranges_by_default(tmp_path):
    assert ranges_of(lambda: textbook(torch.ones(1, 1, 4, 2)), tmp_path) == []


def test_textbook_attention_has_its_three_parts(tmp_path):
    with profiling.enabled():
        found = nesting(ranges_of(lambda: textbook(torch.ones(1, 1, 4, 2)), tmp_path))
    parts = [f"attention/{part}" for part in ("scores", "softmax", "value product")]
    assert found == ["attention", *parts]


def test_a_training_step_is_nested_as_it_runs(tmp_path):
    step, windows = make_step(), torch.zeros(2, 17, dtype=torch.int64)
    step(windows, 1e-3)
    with profiling.enabled():
        found = nesting(ranges_of(lambda: step(windows, 1e-3), tmp_path))
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


def test_a_decorated_function_that_calls_itself_nests(tmp_path):
    @annotate("down")
    def down(count: int) -> int:
        return count and down(count - 1)

    with profiling.enabled():
        found = nesting(ranges_of(lambda: down(2), tmp_path))
    assert found == ["down", "down/down", "down/down/down"]
    assert down.__name__ == "down"


def test_blocks_of_one_object_nest(tmp_path):
    name = annotate("x")

    def function():
        with name, name, annotate("y"):
            pass
        with name:
            pass

    with profiling.enabled():
        assert nesting(ranges_of(function, tmp_path)) == ["x", "x/x", "x/x/y", "x"]
    # none is left open
    assert ranges_of(function, tmp_path) == []


def test_a_function_that_works_after_its_call_is_refused():
    def generator():
        yield

    async def coroutine():
        pass

    async def asynchronous_generator():
        yield

    for function in (generator, coroutine, asynchronous_generator):
        with pytest.raises(TypeError, match=f"annotate..x.. is put around {function.__name__}"):
            annotate("x")(function)


def test_an_error_passes_and_closes_the_range(tmp_path):
    def fails():
        with pytest.raises(KeyError), annotate("outer"):
            raise KeyError
        with annotate("after"):
            pass

    with profiling.enabled():
        assert nesting(ranges_of(fails, tmp_path)) == ["outer", "after"]


def test_ranges_end_with_the_block_and_stay_in_its_thread(tmp_path):
    def marked(name):
        with annotate(name):
            pass

    def function():
        with profiling.enabled():
            marked("inside")
            thread = threading.Thread(target=marked, args=("other thread",))
            thread.start()
            thread.join()
        marked("behind")

    assert nesting(ranges_of(function, tmp_path)) == ["inside"]


def compiled_graphs(function, *args) -> list[str]:
    """The code of each graph that the compiler gets, without a break."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return graphs


@pytest.mark.parametrize("is_on", [False, True])
def test_compiled_code_is_that_without_ranges(is_on):
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
    if not is_on:
        assert compiled_graphs(annotated, torch.ones(3, 3)) == expected
        return
    with profiling.enabled():
        assert compiled_graphs(annotated, torch.ones(3, 3)) == expected


def test_a_model_compiles_without_a_break():
    model = TransformerLM(MODEL)
    assert len(compiled_graphs(model.hidden, torch.zeros(2, 16, dtype=torch.int64))) == 1


def test_switching_ranges_on_compiles_nothing_again():
    count = 0

    def backend(graph, inputs):
        nonlocal count
        count += 1
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(textbook, backend=backend)
    q = torch.ones(1, 2, 4, 2)
    compiled(q)
    with profiling.enabled():
        compiled(q)
    assert count == 1


def test_a_compiled_step_has_the_ranges_around_compiled_code(tmp_path):
    torch.compiler.reset()
    step, windows = make_step(), torch.zeros(2, 17, dtype=torch.int64)
    step.loss.hidden = torch.compile(step.model.hidden, backend="aot_eager")
    step(windows, 1e-3)
    with profiling.enabled():
        found = nesting(ranges_of(lambda: step(windows, 1e-3), tmp_path))
    assert "training step/forward/loss" in found
    assert not [path for path in found if "block" in path]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_nvtx_without_cuda_is_refused():
    with pytest.raises(ValueError, match="nvtx is True"), profiling.enabled(nvtx=True):
        pass


@pytest.mark.gpu
def test_nvtx_ranges_open_and_close_in_order(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    with profiling.enabled(nvtx=True):
        textbook(torch.ones(1, 1, 4, 2, device="cuda"))
    assert calls == ["attention", "scores", "pop", "softmax", "pop", "value product", "pop", "pop"]


@pytest.mark.gpu
def test_nvtx_ranges_are_free_of_graph_breaks():
    q = torch.ones(1, 2, 8, 4, device="cuda")
    with profiling.enabled(nvtx=True):
        assert len(compiled_graphs(textbook, q)) == 1
