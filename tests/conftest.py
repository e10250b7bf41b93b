"""What all tests share: quiet tools, no network, skips for what this machine does not have."""

import functools
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# What files share, which one worker then needs once: processes that started with torch loaded, a
# process where Triton interprets, an emulator that takes seconds to compile.
SHARED = {
    "ranks": re.compile(r"quick_ranks|one_thread_a_rank|\bprocesses\b[,)]"),
    "interpreter": re.compile("tried_in_interpreter"),
    "emulator": re.compile("import emulate"),
}

# A shell starts what runs in its background without Ctrl-C; what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("WANDB_MODE", "disabled")

# No deadline: a shared machine may stall for longer than any example takes.
hypothesis.settings.register_profile(
    "workbook", deadline=None, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.load_profile("workbook")

# Modules and thousands of tests stay until the end: to look through them for garbage
# again and again would take a twentieth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none; torch is only loaded to find out."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@functools.cache
def scope_of(file: str) -> str:
    """The name of what a file shares with other files, or else the file itself."""
    text = (ROOT / file).read_text(encoding="utf-8")
    name = next((name for name, words in SHARED.items() if words.search(text)), file)
    # all files with ranks would keep one worker busy when the others have ended
    return f"{name} of lessons" if name == "ranks" and "/lessons/" in file else name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all files that share something to one worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(super()._split_scope(nodeid))

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator:
    """Show with a failed test of a page what the page looked like and said."""
    report = yield
    if call.when == "call" and call.excinfo:
        views = [arg for arg in item.funcargs.values() if hasattr(arg, "evidence")]
        report.sections += [(f"page {view.name}", view.evidence()) for view in views]
    return report


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Chromium that reaches no network (a Playwright browser), skipped where it is missing."""
    names = ("chromium", "google-chrome", "google-chrome-stable", "chrome", "chromium-browser")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"needs Chromium: one of {', '.join(names)} on the PATH; .ci/run installs it")
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    arguments += ["--disable-background-networking", "--disable-component-update", "--disable-quic"]
    arguments += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def make_notebook() -> Callable[..., Path]:
    """Write a notebook that passes `make lint` when its outputs are there; return its path.

    Called with a path, the code of the parameters cell, and further cells: code as text, Markdown
    as text that starts with `%md `.
    """
    from nbformat import from_dict, write
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    from lib.tools.publish.cells import FIRST_CELL, METADATA

    def make(path: Path, parameters: str = "steps = 3", *cells: str, first: str = FIRST_CELL):
        content = [
            new_markdown_cell(f"# Notebook {path.stem}"),
            new_code_cell(first),
            new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        ]
        for cell in cells:
            text = cell.removeprefix("%md ")
            content.append(new_code_cell(cell) if text == cell else new_markdown_cell(text))
        path.parent.mkdir(parents=True, exist_ok=True)
        write(new_notebook(cells=content, metadata=from_dict(METADATA)), path)
        return path

    return make


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "WORKBOOK_SMALL")} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "JUPYTER_PREFER_ENV_PATH": "1",
    }


@pytest.fixture
def quiet_environment() -> dict[str, str]:
    """The environment for a program of its own: nothing of this process's import path in it."""
    return clean_environment()


@pytest.fixture(scope="session")
def tried_in_interpreter(request) -> subprocess.CompletedProcess:
    """Tests of kernels, in a process where Triton interprets them.

    They are those of the files INTERPRETED of each module here that uses this. One process for all:
    to load torch and Triton takes four seconds.
    """
    pytest.importorskip("triton")
    users = [item for item in request.session.items if "tried_in_interpreter" in item.fixturenames]
    files = {str(file): None for item in users for file in item.module.INTERPRETED}
    # nbval takes a second to load
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:nbval"]
    return subprocess.run(
        [*command, *files, "-k", "kernel and not interpreter", "-m", "not slow"],
        cwd=ROOT,
        env=clean_environment() | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="session")
def quick_ranks() -> None:
    """Ranks that `lib.ddp.launcher.launch` starts need not load anything first."""
    from tests.ddp.rank_server import start_server

    start_server()


@pytest.fixture(scope="module")
def one_thread_a_rank(quick_ranks) -> Iterator[None]:
    """Ranks of a benchmark share the cores; this process is none of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RANK", raising=False)
        yield
