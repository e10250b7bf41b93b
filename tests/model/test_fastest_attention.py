"""The attention kernel of `auto`: measured on a GPU before Ampere, once, and sdpa elsewhere."""

import logging

import pytest
import torch

from lib.model import fastest_attention
from lib.model.config import ModelConfig
from lib.model.fastest_attention import attention_times, pick_attention_kernel

AUTO = ModelConfig(attention_kernel="auto", d_model=64, num_heads=2, context_length=32)
T4 = torch.device("cuda")


@pytest.fixture
def on_a_t4(monkeypatch, tmp_path) -> list:
    """A T4 of which only the times are real: those of this list's measurements."""
    calls = []

    def measure(sizes: tuple, device: torch.device) -> dict[str, float]:
        calls.append(sizes)
        return {"sdpa": 3.0, "flash_attention_cuda": 1.5}

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(fastest_attention, "_measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


def test_a_t4_takes_the_fastest_kernel_measures_once_and_says_so_in_a_line(on_a_t4, caplog):
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert pick_attention_kernel(AUTO, T4, torch.float16) == "flash_attention_cuda"
    assert on_a_t4 == [(2, 32, 32)]
    line = "attention_kernel flash_attention_cuda, the fastest on Tesla T4: sdpa 3 ms, flash_att"
    assert [message.startswith(line) for message in caplog.messages] == [True, True]


def test_another_shape_is_measured_anew(on_a_t4):
    pick_attention_kernel(AUTO, T4, torch.float16)
    longer = ModelConfig(attention_kernel="auto", d_model=64, num_heads=2, context_length=64)
    pick_attention_kernel(longer, T4, torch.float16)
    assert on_a_t4 == [(2, 32, 32), (2, 64, 32)]


def test_without_a_folder_to_write_to_it_is_measured_each_time(on_a_t4, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert pick_attention_kernel(AUTO, T4, torch.float16) == "flash_attention_cuda"
    assert len(on_a_t4) == 2


def test_a_candidate_that_does_not_run_is_tried_again_next_time(on_a_t4, monkeypatch):
    measure = fastest_attention._measure
    failing = {"sdpa": 3.0}
    monkeypatch.setattr(fastest_attention, "_measure", lambda *_: failing)
    assert pick_attention_kernel(AUTO, T4, torch.float16) == "sdpa"
    monkeypatch.setattr(fastest_attention, "_measure", measure)
    assert pick_attention_kernel(AUTO, T4, torch.float16) == "flash_attention_cuda"
    assert len(on_a_t4) == 1


def test_times_that_are_damaged_are_measured_again(on_a_t4):
    pick_attention_kernel(AUTO, T4, torch.float16)
    (path,) = fastest_attention.cache_folder().glob("attention-*.json")
    path.write_text('{"sdpa": 3.0, "fla')
    assert pick_attention_kernel(AUTO, T4, torch.float16) == "flash_attention_cuda"
    assert len(on_a_t4) == 2


@pytest.mark.parametrize(
    ("kernel", "device", "capability", "dtype", "right"),
    [
        ("vectorized_torch", T4, (7, 5), torch.float16, "vectorized_torch"),
        ("sdpa", T4, (7, 5), torch.float16, "sdpa"),
        ("auto", T4, (7, 5), torch.float32, "sdpa"),
        ("auto", T4, (8, 0), torch.float16, "sdpa"),
        ("auto", torch.device("cpu"), None, torch.float32, "sdpa"),
    ],
)
def test_a_given_kernel_wins_and_elsewhere_it_is_sdpa(
    on_a_t4, kernel, device, capability, dtype, right, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert pick_attention_kernel(ModelConfig(attention_kernel=kernel), device, dtype) == right
    assert not on_a_t4


@pytest.mark.gpu
def test_times_are_of_both_candidates(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = attention_times(AUTO, torch.device("cuda", torch.cuda.current_device()))
    assert set(times) == set(fastest_attention.CANDIDATES)
    assert all(0 < ms < 100 for ms in times.values())
