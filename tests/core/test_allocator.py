"""Memory and launches of a call, counted; memory that runs out, recognized and freed."""

import weakref

import pytest
import torch

from lib.core.allocator import (
    allocate_workspaces,
    allocated_bytes,
    count_launches,
    free_memory,
    is_out_of_memory,
)

CPU = torch.device("cpu")
GPU = torch.device("cuda")


def test_memory_of_a_call_is_its_peak():
    def allocate():
        first = torch.ones(2_500_000)
        second = torch.ones(2_500_000)
        del first
        return second, torch.ones(1_250_000)

    assert allocated_bytes(allocate, CPU) == (20_000_000, None)
    assert allocated_bytes(lambda: None, CPU) == (0, None)


def test_memory_is_unknown_while_another_profiler_runs():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert allocated_bytes(lambda: torch.ones(10), CPU) == (None, None)
        assert count_launches(lambda: torch.ones(10), CPU) is None


def test_a_cpu_whose_memory_is_full_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_tensors_of_the_errors_that_led_to_the_last_are_freed_too():
    held = []

    def run_out():
        tensor = torch.ones(10)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    def fail():
        try:
            run_out()
        except RuntimeError as error:
            raise RuntimeError("cannot allocate memory") from error

    try:
        fail()
    except RuntimeError as error:
        assert held[0]() is not None
        free_memory(error)
        assert held[0]() is None


def test_operators_are_counted_without_those_that_they_call():
    a = torch.ones(4, 4)
    # softmax calls _softmax, linear calls t and addmm
    assert count_launches(lambda: a.softmax(-1), CPU) == 1
    assert count_launches(lambda: torch.nn.functional.linear(a, a, a[0]).softmax(-1), CPU) == 3


@pytest.mark.gpu
@pytest.mark.serial
def test_matmuls_allocate_nothing_more_once_their_workspaces_exist():
    allocate_workspaces(GPU)
    before = torch.cuda.memory_allocated(GPU)
    x = torch.ones(512, 512, device=GPU, requires_grad=True)
    (x @ x).sum().backward()
    del x
    assert torch.cuda.memory_allocated(GPU) == before


@pytest.mark.gpu
def test_memory_of_a_call_on_a_gpu_is_its_peak():
    kept = torch.ones(1 << 20, device=GPU)

    def allocate():
        first = torch.ones(1 << 22, device=GPU)
        second = torch.ones(1 << 22, device=GPU)
        del first
        return second, torch.ones(1 << 20, device=GPU)

    peak, total = allocated_bytes(allocate, GPU)
    assert peak == 2 << 24
    assert total >= peak + kept.nbytes


@pytest.mark.gpu
def test_kernels_of_a_call_are_counted():
    a = torch.ones(64, 64, device=GPU)

    def call():
        # a name is no kernel
        with torch.profiler.record_function("name"):
            torch.add(a, a).mul_(a)

    assert count_launches(call, GPU) == 2
