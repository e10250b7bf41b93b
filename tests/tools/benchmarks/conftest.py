"""What several tests of benchmarks need."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_core():
    """Run the module's tests with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
