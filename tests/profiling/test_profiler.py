"""A real profile of real steps, end to end."""

import dataclasses
import functools
import gzip
import json
import pickle

import pytest
import torch

from lib.core.settings import from_json
from lib.model.config import model_preset
from lib.model.costs import num_parameters
from lib.profiling.profiler import ProfileConfig, nsys_command, profile
from lib.profiling.trace import read_trace
from lib.profiling.trace_summary import summarize

CONFIG = ProfileConfig(batch_size=2, context_length=32, steps=2, warmup_steps=1, device="cpu")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The summary of a profile, and its folder."""
    folder = tmp_path_factory.mktemp("profile") / "of a step"
    kernel = {"attention_kernel": "vectorized_torch"}
    return profile(dataclasses.replace(CONFIG, **kernel, output=folder)), folder


def test_all_files_are_there_and_say_what_was_run_and_found(done):
    _, folder = done
    names = {path.name for path in folder.iterdir()}
    wanted = {"summary.md", "summary.json", "config.json", "trace.json.gz", "step.json.gz"}
    assert names == wanted | {"time.png", "memory.png"}
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    steps = [event for event in trace["traceEvents"] if event.get("name") == "training step"]
    assert len(steps) == 2
    record = json.loads((folder / "summary.json").read_text())
    assert record["config"]["attention_kernel"] == "vectorized_torch"
    figures = record["figures"]
    assert figures["peak_bytes_by_category"]["parameters"] == 4 * figures["parameters"]
    assert figures["parameters"] == num_parameters(model_preset("tiny"))
    assert figures["context_length"] == 32
    text = (folder / "summary.md").read_text()
    assert text.startswith("# Profile of 2 training steps\n")
    assert "| aten::mm " in text
    assert "\n## Memory at the step's peak\n" in text


def test_one_step_of_the_trace_is_kept_on_its_own(done):
    summary, folder = done
    whole, step = (read_trace(folder / f"{name}.json.gz") for name in ("trace", "step"))
    (root,) = (span for span in step.ranges if span.name == "training step")
    assert root.start == 0
    assert all(0 <= span.start < root.end for span in (*step.ranges, *step.operators))
    # of two steps and an unmarked one before them
    assert len(step.operators) < len(whole.operators) / 2
    assert summarize(step).kernels == pytest.approx(summary.kernels, rel=0.02)


def test_a_step_has_the_operators_of_its_model(done):
    summary, _ = done
    assert (summary.device, summary.steps) == ("cpu", 2)
    shape = model_preset("tiny")
    products = {row.name: row for row in summary.by_kernel if row.category == "matmul"}
    # forward: four products in each layer; backward: two for each; the loss: three
    assert products["aten::mm"].calls == shape.num_layers * 4 * 3 + 3
    attention = {row.name: row for row in summary.by_kernel if row.category == "attention"}
    assert attention["aten::bmm"].calls == shape.num_layers * 2 * 3


def test_times_fit_together(done):
    summary, _ = done
    assert summary.busy_ms + summary.idle_ms == pytest.approx(summary.wall_ms)
    assert sum(row.ms for row in summary.by_kernel) == pytest.approx(summary.busy_ms, rel=0.01)
    assert sum(row.ms for row in summary.by_category) == pytest.approx(
        sum(row.ms for row in summary.by_kernel)
    )
    ranges = {row.name: row.host_ms for row in summary.by_range}
    assert ranges["scores"] < ranges["attention"] < ranges["block"] < ranges["forward"]
    assert ranges["forward"] + ranges["backward"] < ranges["training step"] <= summary.wall_ms


def test_a_compiled_step_is_profiled_without_memory(tmp_path, monkeypatch):
    # all of the compiler but the slow part, which writes kernels
    quick = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", quick)
    torch.compiler.reset()
    (tmp_path / "memory.png").write_bytes(b"of an earlier profile")
    summary = profile(dataclasses.replace(CONFIG, compile=True, memory=False, output=tmp_path))
    assert not (tmp_path / "memory.png").exists()
    names = {row.name for row in summary.by_range}
    assert "forward" in names
    assert "block" not in names


def test_nsys_gets_a_command_line_for_the_same_steps(done):
    _, folder = done
    config = from_json(ProfileConfig, folder / "config.json")
    assert config == dataclasses.replace(CONFIG, attention_kernel="vectorized_torch", output=folder)
    command = nsys_command(config)
    assert command[:2] == ["nsys", "profile"]
    assert "--capture-range=cudaProfilerApi" in command
    assert command[-3:] == ["profile", f"--config={folder / 'config.json'}", "--nvtx"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"context_length": 0},
        {"attention_kernel": "fast"},
        {"model": "huge"},
        {"device": "meta"},
        {"dtype": "int8"},
        {"cuda_graph": True},
        {"nvtx": True},
    ],
)
def test_bad_input_is_named_before_any_work(tmp_path, wrong):
    output = tmp_path / "output"
    with pytest.raises(ValueError, match=next(iter(wrong))):
        profile(dataclasses.replace(CONFIG, **{"output": output, **wrong}))
    assert not output.exists()


GPU_CONFIG = dataclasses.replace(CONFIG, device="cuda", batch_size=4, context_length=64)


@pytest.mark.gpu
def test_a_cuda_graph_is_one_launch_with_the_kernels_of_the_eager_step(tmp_path):
    counts = {}
    for graph in (False, True):
        config = dataclasses.replace(GPU_CONFIG, cuda_graph=graph, output=tmp_path / str(graph))
        counts[graph] = profile(config)
    eager, graph = counts[False], counts[True]
    assert eager.launches > 50
    # beside the graph: a copy of the sequences and the learning rate
    assert graph.launches <= 5
    assert graph.kernels == pytest.approx(eager.kernels, rel=0.1)
    assert graph.dispatch_ms < eager.dispatch_ms


@pytest.mark.gpu
def test_a_gpu_profile_has_its_files_and_categories(tmp_path):
    config = dataclasses.replace(GPU_CONFIG, attention_kernel="vectorized_torch", output=tmp_path)
    summary = profile(config)
    assert summary.device == "gpu"
    shares = {row.category: row.share for row in summary.by_category}
    assert min(shares["matmul"], shares["attention"], shares["elementwise"]) > 0.02
    assert shares["other"] < 0.05
    snapshot = pickle.loads((tmp_path / "memory_snapshot.pickle").read_bytes())
    assert any(snapshot["device_traces"])
    ranges = {row.name: row for row in summary.by_range}
    assert 0 < ranges["attention"].device_ms < ranges["forward"].device_ms
    assert ranges["backward"].device_ms > ranges["optimizer"].device_ms


@pytest.mark.gpu
def test_the_run_for_nsys_leaves_nothing(tmp_path):
    assert profile(dataclasses.replace(GPU_CONFIG, nvtx=True, output=tmp_path / "none")) is None
    assert not (tmp_path / "none").exists()
