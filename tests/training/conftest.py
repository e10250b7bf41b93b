"""What the tests of training share: small data, and runs that were finished or stopped."""

import dataclasses
import multiprocessing
import shutil
import signal

import pytest
import torch

from lib.training.loop import train
from tests.ddp.rank_server import start_server
from tests.training.runs import CONFIG, signals_at, tokenized


@pytest.fixture(autouse=True)
def one_thread():
    """As many threads as the processes started here, since their number changes rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """200 kB of stories as tokens."""
    return tokenized(tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(data, tmp_path):
    return dataclasses.replace(CONFIG, data=data, output=tmp_path / "run")


@pytest.fixture(scope="session")
def straight(data, tmp_path_factory):
    """The folder of the run of CONFIG that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight")
    torch.set_num_threads(1)
    train(dataclasses.replace(CONFIG, data=data, output=folder))
    return folder


@pytest.fixture(scope="session")
def half(data, tmp_path_factory):
    """A folder in which CONFIG was asked to stop at step 10; it has the checkpoints 9 and 10."""
    folder = tmp_path_factory.mktemp("half")
    torch.set_num_threads(1)
    config = dataclasses.replace(CONFIG, data=data, output=folder)
    assert train(config, on_metrics=signals_at(10, signal.SIGTERM)).status == "stopped"
    return folder


@pytest.fixture
def stopped(half, config):
    """The config of a run stopped at step 10, in a folder of its own."""
    shutil.copytree(half, config.output)
    return config


@pytest.fixture(scope="session")
def processes():
    """Starts processes fast, from one that has torch loaded."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs a fork server")
    start_server()
    return multiprocessing.get_context("forkserver")
