"""The benchmark of training steps, on tiny models: fair peers, records, table and figure."""

import csv
import dataclasses
import shutil

import pytest
import torch

import lib.benchmark_training as benchmark
from lib.benchmark_training import (
    CANDIDATES,
    PEER,
    PeerBlock,
    PeerLM,
    benchmark_loss,
    benchmark_training,
    benchmark_with_peer,
    milliseconds_a_step,
    our_step,
    peer_step,
)
from lib.config import TrainingBenchmarkConfig
from lib.config_training import ModelConfig
from lib.model import TransformerBlock, TransformerLM
from lib.model_presets import MODEL_PRESETS
from lib.report import read_records

CPU = torch.device("cpu")
TINY = ModelConfig(vocab_size=61, context_length=16, d_model=32, num_layers=2, num_heads=4, d_ff=48)


@pytest.fixture(autouse=True, scope="module")
def on_a_cpu():
    """No compiling, no CUDA graphs; the rest as on a GPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    tied = dataclasses.replace(TINY, tied_embeddings=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        patch.setitem(benchmark.FASTEST, "cuda_graph", False)
        patch.setitem(MODEL_PRESETS, "one", TINY)
        patch.setitem(MODEL_PRESETS, "two", tied)
        yield
    torch.set_num_threads(before)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", ["gpt2-124m", "matrix", "small"])
def test_a_block_of_the_peer_has_as_many_parameters_as_ours(name):
    shape = MODEL_PRESETS[name]
    with torch.device("meta"):
        peer = PeerBlock(shape.d_model, shape.num_heads, shape.d_ff * 3 // 2)
        ours = TransformerBlock(shape)
    assert count(peer) == count(ours)


@pytest.mark.parametrize("tied", [False, True])
def test_models_differ_by_the_peers_learned_positions_only(tied):
    shape = dataclasses.replace(TINY, tied_embeddings=tied)
    positions = shape.context_length * shape.d_model
    assert count(PeerLM(shape)) == count(TransformerLM(shape)) + positions


def test_the_peer_sees_no_later_token():
    torch.manual_seed(0)
    peer = PeerLM(TINY)
    tokens = torch.randint(61, (2, 17))
    logits = []
    peer.head.register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 61
    for windows in (tokens, changed):
        peer(windows[:, :-1], windows[:, 1:])
    assert torch.equal(logits[0][:, :9], logits[1][:, :9])
    assert not torch.equal(logits[0][:, 9:], logits[1][:, 9:])


def caught(name, monkeypatch):
    """The models of this class that are built from now on."""
    models, cls = [], getattr(benchmark, name)

    def build(*arguments, **keywords):
        models.append(cls(*arguments, **keywords))
        return models[-1]

    monkeypatch.setattr(benchmark, name, build)
    return models


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("PeerLM", lambda: peer_step(TINY, CPU, torch.bfloat16)),
        ("TransformerLM", lambda: our_step(TINY, 4, CPU, torch.bfloat16)),
        (
            "TransformerLM",
            lambda: our_step(TINY, 4, CPU, torch.bfloat16, low_precision_weights=False),
        ),
    ],
)
def test_both_train(name, make, monkeypatch):
    torch.manual_seed(0)
    models = caught(name, monkeypatch)
    step = make()
    (model,) = models
    # each token is the one before plus 7
    windows = (torch.arange(4)[:, None] + 7 * torch.arange(17)) % 61

    def loss():
        loss_of = model if name == "PeerLM" else model.loss
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return float(loss_of(windows[:, :-1], windows[:, 1:]))

    before, weights = loss(), [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(100):
        step(windows)
    assert loss() < before - 0.02
    assert all(not torch.equal(a, b) for a, b in zip(weights, model.parameters()))


def test_without_kernels_the_models_elementwise_steps_are_pytorchs(monkeypatch):
    from lib import model

    seen = []
    monkeypatch.setattr(benchmark, "_no_kernels", lambda x: bool(seen.append(x)))
    step = our_step(TINY, 4, CPU, torch.bfloat16, kernels=False)
    original = model.has_kernels
    step(torch.zeros(4, 17, dtype=torch.int64))
    assert seen
    assert model.has_kernels is original


def test_a_turn_is_timed_a_step():
    calls = []
    milliseconds = milliseconds_a_step(lambda: calls.append(torch.ones(1)), 5, CPU)
    assert len(calls) == 5
    assert 0 < milliseconds < 1000


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What a benchmark of two models leaves behind."""
    folder = tmp_path_factory.mktemp("measured")
    config = TrainingBenchmarkConfig(
        models=("one", "two"),
        batch_sizes=(2, 3),
        samples=3,
        steps=2,
        loss=False,
        output=folder,
    )
    assert benchmark_with_peer(config, CPU) == folder / "training_benchmark.md"
    return folder


@pytest.fixture
def records(measured):
    return read_records(measured / "training_benchmark.jsonl")


def test_each_model_has_a_record_of_the_peer_and_of_each_candidate(records):
    figures = [record["figures"] for record in records]
    for name, batch_size in (("one", 2), ("two", 3)):
        rows = [row for row in figures if row["model"] == name]
        assert [row["candidate"] for row in rows] == [PEER, *CANDIDATES]
        assert [row["samples"] for row in rows] == [3] * len(rows)
        for row in rows:
            tokens = batch_size * TINY.context_length
            assert row["tokens_per_s"] == pytest.approx(tokens / row["median_ms"] * 1e3)
            assert row["iqr_ms"] >= 0
            # a CPU's memory and peak are not known
            assert (row["peak_memory_gb"], row["mfu"]) == (0, None)
        assert [row["candidate"] for row in rows if "ratio_to_peer" in row] == ["all"]
        assert all(row["ratio_to_peer"] > 0 for row in rows if "ratio_to_peer" in row)


def test_records_say_where_and_how_they_were_measured(records):
    for record in records:
        assert record["config"]["models"] == ["one", "two"]
        assert record["versions"]["torch"] == torch.__version__
        assert record["seed"] == 0
        assert record["device"]


def test_records_become_a_table_and_a_figure(records, measured):
    text = (measured / "training_benchmark.md").read_text()
    assert "tokens/s" in text
    assert "The loss" not in text
    for candidate in (PEER, *CANDIDATES):
        assert text.count(f"| {candidate} ") == 2
    assert (measured / "training_benchmark.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((measured / "training_benchmark.csv").open()))
    assert len(rows) == len(records)


def test_a_further_run_adds_records_and_shows_its_own(records, measured, tmp_path):
    shutil.copy(measured / "training_benchmark.jsonl", tmp_path)
    config = TrainingBenchmarkConfig(
        models=("two",),
        batch_sizes=(1,),
        samples=1,
        steps=1,
        ablations=False,
        loss=False,
        output=tmp_path,
    )
    benchmark_with_peer(config, CPU)
    now = read_records(tmp_path / "training_benchmark.jsonl")
    assert now[: len(records)] == records
    assert [r["figures"]["candidate"] for r in now[len(records) :]] == [PEER, "all"]
    text = (tmp_path / "training_benchmark.md").read_text()
    assert "without" not in text
    assert "| one " not in text


def test_the_loss_is_measured_in_chunks_and_whole(monkeypatch):
    rows = list(benchmark_loss(TINY, CPU, torch.float32, num_tokens=100))
    assert [row["candidate"] for row in rows] == [
        "all logits at once",
        "chunked",
        "chunked, 1,024 tokens",
    ]
    assert all(row["median_ms"] > 0 and row["peak_memory_gb"] is None for row in rows)
    assert {(row["tokens"], row["vocab_size"], row["d_model"]) for row in rows} == {(100, 61, 32)}


def test_an_unknown_model_lists_the_known_ones(tmp_path):
    config = TrainingBenchmarkConfig(models=("huge",), batch_sizes=(1,), output=tmp_path)
    with pytest.raises(ValueError, match="model preset is 'huge'; known: tiny"):
        benchmark_with_peer(config, CPU)


def test_without_names_two_models_of_a_gpu_are_measured(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(benchmark, "write_report", lambda *arguments: None)
    monkeypatch.setattr(benchmark, "benchmark_model", lambda *a: asked.append(a) or ())
    benchmark_with_peer(TrainingBenchmarkConfig(loss=False, output=tmp_path), CPU)
    assert [(name, batch_size) for _, name, batch_size, *_ in asked] == [
        ("gpt2-124m", 32),
        ("matrix", 8),
    ]
    assert {(config.samples, config.steps) for config, *_ in asked} == {(7, 30)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_device_decides_what_steps_are_compared_with(device, monkeypatch):
    monkeypatch.setattr(benchmark, "pick_device", torch.device)
    monkeypatch.setattr(benchmark, "benchmark_with_peer", lambda config, device: "cuda")
    monkeypatch.setattr("lib.benchmark_training_cpu.benchmark_on_cpu", lambda config: "cpu")
    assert benchmark_training(TrainingBenchmarkConfig(device=device)) == device


@pytest.mark.parametrize(("device", "message"), [("tpu", "device is 'tpu'"), ("mps", "is mps; ri")])
def test_another_device_is_named(device, message, monkeypatch):
    if device == "mps":
        monkeypatch.setattr(benchmark, "pick_device", torch.device)
    with pytest.raises(ValueError, match=message):
        benchmark_training(TrainingBenchmarkConfig(device=device))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("tiny",)}, r"batch_sizes is \(\); right is: 1, one for each model"),
        ({"batch_sizes": (1,)}, "batch_sizes is .*; right is: 0, one for each model"),
        ({"models": ("tiny",), "batch_sizes": (0,)}, "each at least 1"),
        ({"samples": 0}, "samples is 0"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainingBenchmarkConfig(**changes)
