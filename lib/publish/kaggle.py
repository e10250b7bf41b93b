"""The workbook on Kaggle: a dataset with the code, and a kernel for each notebook.

`build` writes a folder for Kaggle's command line, checks that nothing private is in it, and runs
its notebooks as Kaggle would; `push` uploads it. The metadata fields are those of Kaggle's
documentation (`docs/kernels_metadata.md` and `docs/datasets_metadata.md` in Kaggle/kaggle-cli):

- `machine_shape` NvidiaTeslaT4 is what the editor calls "GPU T4 x2"; there is none with one T4;
- without `enable_internet` the client turns the network on;
- a kernel's address is its title in lower case with dashes;
- the license names are a fixed list, which MIT is not on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import nbformat

from lib.core.files import ROOT, claim_folder, sha256_file
from lib.core.hardware import output_of
from lib.core.records import is_checkout, provenance
from lib.core.settings import NonEmpty, PositiveFloat, check, require, settings
from lib.publish.cells import FIRST_CELL, METADATA
from lib.publish.run_notebooks import Job, find_notebooks, plan

TITLE = "Training workbook"
DESCRIPTION = """\
The code, records and small trained model of a workbook that goes from raw text to a language model
trained on several GPUs. License: MIT; the file LICENSE holds its text."""
# A placeholder for the name on Kaggle.
NOBODY = "INSERT_USERNAME"
RIGHT_USER = "the name in the address of your page on Kaggle, or empty"
SLUG = r"[a-z0-9]+(-[a-z0-9]+)*"
# The code, and of artifacts/ what notebooks show. Folders of single runs stay here.
FILES = (
    *("LICENSE", "lib/**/*"),
    *(f"artifacts/{name}" for name in ("*.jsonl", "*.md", "*.csv", "*.png")),
    *("artifacts/tiny_stories/**/*", "artifacts/profile_h200/**/*"),
)
INPUT = "/kaggle/input"
# In place of a notebook's own first cell: Kaggle mounts the dataset one to three folders down.
KAGGLE_FIRST_CELL = f"""\
# `lib` comes with the attached dataset.
import sys
from pathlib import Path

mounts = [path for depth in ("*", "*/*", "*/*/*") for path in Path("{INPUT}").glob(depth)]
sys.path.insert(0, str(next(path for path in mounts if (path / "bundle.json").exists())))
%load_ext lib.lessons.notebook"""

# The kernel that times attention: its name, its text, its cells after the first.
ATTENTION = "attention_on_t4"
ATTENTION_TEXT = """\
# Attention on a T4

Times `flash_attention_cuda`, whose tensor-core instructions are a T4's, against every backend of
PyTorch's attention and against Triton, forward and backward, on each GPU. A folder for each GPU in
the output holds the record, `attention_sweep.jsonl`, and its tables."""
ATTENTION_CELLS = (
    """\
from pathlib import Path

import torch

from lib.benchmarks.attention import AttentionBenchmarkConfig, benchmark_attention
from lib.lessons.notebook import small

kernels = ("sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_math")
if torch.cuda.is_available():
    kernels = ("flash_attention_cuda", *kernels)
devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
sizes = {
    "custom_tiers": ("128:128",) if small() else ("1024:1024", "4096:4096", "16384:16384"),
    "head_dims": (64,) if small() else (64, 128),
    "tokens": 128 if small() else 16384,
    "width": 64 if small() else 2048,
    "backward": True,
}
folders = [Path(device.replace(":", "_")) for device in devices]
for device, folder in zip(devices, folders):
    config = AttentionBenchmarkConfig(kernels=kernels, device=device, output=folder, **sizes)
    benchmark_attention(config)""",
    """\
# Triton's kernels apart: nobody has run them on a T4 before.
if torch.cuda.is_available():
    both = ("flash_attention_cuda", "flash_attention_triton")
    config = AttentionBenchmarkConfig(kernels=both, output=Path("triton"), **sizes)
    try:
        benchmark_attention(config)
    except Exception as error:
        print("flash_attention_triton does not run here:", error)""",
    """\
from IPython.display import Markdown, display

for folder in folders:
    report = folder / "attention_sweep_report.md"
    display(Markdown(report.read_text(encoding="utf-8")))""",
)


@settings
class KaggleBuildConfig:
    """A folder for Kaggle's command line: a dataset with the code, and a kernel per notebook."""

    notebooks: Annotated[tuple[str, ...], NonEmpty] = ("10",)
    """Numbers (`10`) or names (`10_speedrun`)."""

    parameters: str = "kaggle"
    """Sizes for Kaggle's GPUs: a file in notebooks/parameters/. Empty: each notebook's own."""

    user: str = ""
    """Your name on Kaggle; `kaggle push` can also fill it in."""

    dataset: str = "training-workbook"
    """The dataset's name in its address."""

    attention: bool = True
    """Add a kernel that times the attention kernels on each GPU and writes the record."""

    accelerator: str = "NvidiaTeslaT4"
    """Kaggle's name of the machine: this one has two T4 GPUs. Empty: no GPU."""

    internet: bool = False
    """Let the notebooks use the network."""

    verify: bool = True
    """Then run each notebook as Kaggle would, with small sizes: a minute each."""

    output: Path = Path("artifacts/kaggle")
    """Folder for the bundle; an existing bundle is rebuilt."""

    def __post_init__(self) -> None:
        check(self, "user", bool(re.fullmatch(r"[A-Za-z0-9-]*", self.user)), RIGHT_USER)
        is_slug = re.fullmatch(SLUG, self.dataset) and 6 <= len(self.dataset) <= 50
        check(self, "dataset", bool(is_slug), "6 to 50 of a-z, 0-9 and single dashes in between")


@settings
class KagglePushConfig:
    """An upload with Kaggle's own client."""

    folder: Path = Path("artifacts/kaggle")
    """The folder that `kaggle build` made."""

    user: str = ""
    """Your name on Kaggle, unless `kaggle build` was given it."""

    message: str = "Updated"
    """The note of a new version of the dataset."""

    timeout: PositiveFloat = 900.0
    """Seconds to wait for Kaggle to prepare the dataset."""

    def __post_init__(self) -> None:
        check(self, "user", bool(re.fullmatch(r"[A-Za-z0-9-]*", self.user)), RIGHT_USER)
        check(self, "message", bool(self.message), "a text")


def build(config: KaggleBuildConfig, *, root: Path = ROOT) -> Path:
    """Write the bundle and, if asked, run its notebooks as Kaggle would; return its folder."""
    jobs = plan(find_notebooks(config.notebooks, root), config.parameters, root)
    output = config.output.absolute()
    claim_folder(output, "a bundle for Kaggle", setting="output")
    for part in (output / "dataset", output / "kernels"):
        if part.exists():
            shutil.rmtree(part)
    write_dataset(output / "dataset", root)
    for job in jobs:
        write_kernel(output / "kernels" / job.name, job, config)
    names = [job.name for job in jobs]
    if config.attention:
        names.append(ATTENTION)
        notebook = new_attention_notebook()
        write_notebook(output / "kernels" / ATTENTION, ATTENTION, notebook, config)
    leaks = find_leaks(output)
    require(not leaks, f"the bundle must hold nothing private, got {'; '.join(leaks)}")
    if config.verify:
        for name in names:
            print(f"running {name} as Kaggle would", flush=True)
            seconds, written = check_kernel(output, name, config.dataset)
            print(f"{name} runs there: {seconds:.0f} s, and leaves {len(written)} files")
    # last, since `push` takes no bundle without it
    describe_dataset(output / "dataset", config)
    return output


def write_dataset(folder: Path, root: Path) -> None:
    """Copy code, records, the committed model and `BROUGHT`; bundle.json has commit and hashes."""
    hashes = {}
    for name in files_to_bundle(root):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target)
        hashes[name] = sha256_file(target)
    for package in BROUGHT:
        for file in metadata.files(package) or ():
            if not {"..", "__pycache__"}.intersection(file.parts):
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.locate(), target)
    state = provenance()
    made = {name: state[name] for name in ("commit", "dirty", "date")}
    _write_json(folder / "bundle.json", made | {"sha256": hashes})


def files_to_bundle(root: Path) -> list[str]:
    """Return those of `FILES` that git tracks, and no link; where git is not, those not hidden."""
    # a NUL between names: others would be in quotes
    listed = output_of(["git", "-C", str(root), "ls-files", "-z"]) if is_checkout(root) else None
    if listed is None:
        print(
            f"{root} is no git checkout: all files in its lib/ go into the bundle, but no hidden "
            "ones. Look through the bundle before you push it.",
            flush=True,
        )
    tracked = None if listed is None else set(listed.split("\0"))
    found = []
    for path in {path for pattern in FILES for path in root.glob(pattern) if path.is_file()}:
        name = path.relative_to(root)
        folders = [root / part for part in name.parents]
        if any(each.is_symlink() for each in (path, *folders[:-1])):
            continue
        is_hidden = any(part == "__pycache__" or part.startswith(".") for part in name.parts)
        if not is_hidden if tracked is None else name.as_posix() in tracked:
            found.append(name.as_posix())
    return sorted(found)


def describe_dataset(folder: Path, config: KaggleBuildConfig) -> None:
    """Write Kaggle's metadata of the dataset."""
    address = f"{config.user or NOBODY}/{config.dataset}"
    # Kaggle has no name for MIT; "other" refers to the description
    about = {
        "title": TITLE,
        "id": address,
        "licenses": [{"name": "other"}],
        "description": DESCRIPTION,
    }
    _write_json(folder / "dataset-metadata.json", about)


def write_kernel(folder: Path, job: Job, config: KaggleBuildConfig) -> None:
    """Write the notebook with its sizes and without outputs, and Kaggle's metadata for it."""
    content = nbformat.read(job.source, as_version=4)
    for cell in content.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            if cell.source == FIRST_CELL:
                cell.source = KAGGLE_FIRST_CELL
    _insert_sizes(content.cells, job.parameters)
    write_notebook(folder, job.name, content, config)


def new_attention_notebook() -> nbformat.NotebookNode:
    """A notebook that times the attention kernels, PyTorch's too, on each GPU there is."""
    v4 = nbformat.v4
    cells = [
        v4.new_markdown_cell(ATTENTION_TEXT),
        *(v4.new_code_cell(source) for source in (KAGGLE_FIRST_CELL, *ATTENTION_CELLS)),
    ]
    return v4.new_notebook(cells=cells, metadata=nbformat.from_dict(METADATA))


def write_notebook(
    folder: Path, name: str, content: nbformat.NotebookNode, config: KaggleBuildConfig
) -> None:
    """Write the notebook `name`, and Kaggle's metadata for it."""
    has_gpu = bool(config.accelerator)
    # for uploading the file in the browser
    content.metadata["kaggle"] = {
        "accelerator": config.accelerator[:1].lower() + config.accelerator[1:] or "none",
        "isGpuEnabled": has_gpu,
        "isInternetEnabled": config.internet,
        "language": "python",
        "sourceType": "notebook",
    }
    folder.mkdir(parents=True)
    nbformat.write(content, folder / f"{name}.ipynb")
    title = f"Workbook {name.replace('_', ' ')}"
    owner = config.user or NOBODY
    about = {
        "id": f"{owner}/{title.lower().replace(' ', '-')}",
        "title": title,
        "code_file": f"{name}.ipynb",
        "language": "python",
        "kernel_type": "notebook",
        "is_private": True,
        "enable_gpu": has_gpu,
        "enable_tpu": False,
        "enable_internet": config.internet,
        "machine_shape": config.accelerator,
        "dataset_sources": [f"{owner}/{config.dataset}"],
        "competition_sources": [],
        "kernel_sources": [],
        "model_sources": [],
    }
    _write_json(folder / "kernel-metadata.json", about)


def _insert_sizes(cells: list, parameters: dict[str, Any]) -> None:
    """Put a cell that sets `parameters` after the one tagged so, as papermill does."""
    if not parameters:
        return
    source = "from lib.lessons.notebook import small\n\n"
    source += "# Sizes for this machine, except in a quick test.\nif not small():\n"
    source += "\n".join(f"    {name} = {value!r}" for name, value in parameters.items())
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["injected-parameters"]})
    tags = [cell.metadata.get("tags", ()) for cell in cells]
    index = next(index for index, found in enumerate(tags) if "parameters" in found)
    cells.insert(index + 1, cell)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Text that must not leave this machine: its name in a message -> pattern.
LEAKS = {
    "a home folder": r"(?<![\w./:-])/(?:home|Users|root)/[\w.-]+",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a key of Kaggle": r"\bKGAT_[0-9a-f]{16,}|[\"']key[\"']\s*:\s*[\"'][0-9a-f]{32}[\"']",
    "a key of W&B": r"(?i)wandb[_-]?api[_-]?key\W{1,4}[0-9a-f]{40}|api\.wandb\.ai\s+login",
    "a token of GitHub": r"\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_\w{20,}",
    "a token of Hugging Face": r"\bhf_[A-Za-z0-9]{30,}",
    "a key of AWS": r"(?<![A-Za-z0-9+/])AKIA[0-9A-Z]{16}(?![A-Za-z0-9+/=])",
    "a key of Google": r"\bAIza[\w-]{35}",
    "a secret key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a password": r"(?i)\b(?:password|passwd|secret|api_?key|access_?token)"
    r"[\"']?\s*[:=]\s*[\"'][^\"'\s]{8,}[\"']",
}
# Host names that many machines have.
COMMON_NAMES = ("localhost", "kaggle", "workbook", "ubuntu", "debian", "docker")


def find_leaks(folder: Path) -> list[str]:
    """Return what the files in `folder` must not hold, as `name: kind in line 3`."""
    leaks = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            # a character per byte: text in binary files is found too
            content = path.read_bytes().decode("latin-1")
            name = path.relative_to(folder).as_posix()
            leaks += [f"{name}: {found}" for found in leaks_in(content)]
    return leaks


def leaks_in(text: str) -> Iterator[str]:
    """Yield the first of each kind of leak in `text`: its kind and line, and not the text."""
    for what, pattern in (LEAKS | _leaks_of_this_machine()).items():
        if match := re.search(pattern, text, re.ASCII):
            yield f"{what} in line {text.count(chr(10), 0, match.start()) + 1}"


def _leaks_of_this_machine() -> dict[str, str]:
    """Return patterns for its name, and for the folders of this user and this workbook."""
    name = socket.gethostname().split(".")[0]
    found = {}
    if len(name) >= 5 and name.lower() not in COMMON_NAMES:
        found["the name of this machine"] = rf"(?<![\w-]){re.escape(name)}(?![\w-])"
    for what, path in (("your home folder", Path.home()), ("this workbook's folder", ROOT)):
        # the root of a disk, or one step below, is the same on many machines
        if len(path.parts) > 2:
            found[what] = re.escape(str(path)) + r"(?![\w-])"
    return found


# Packages that this workbook's notebooks import, directly or indirectly. Kaggle's image is Colab's
# (googlecolab/backend-info, pip-freeze.gpu.txt) with further packages (Kaggle/docker-python,
# kaggle_requirements.txt); these are there, in versions that requirements.txt allows. It lacks
# math-core, which only the report needs, and `BROUGHT`.
IMAGE_PACKAGES = (
    *("cloudpickle", "filelock", "ipykernel", "ipython", "ipywidgets", "lazy-loader"),
    *("matplotlib", "nbclient", "nbconvert", "nbformat", "numba", "numpy", "pandas", "papermill"),
    *("pip", "pooch", "pyyaml", "regex", "requests", "safetensors", "setuptools", "torch", "tqdm"),
    *("triton", "wandb"),
)
# What reads the command line, in pure Python.
BROUGHT = ("tyro", "docstring-parser", "typeguard")
# Variables of this environment that the notebook may see.
ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
# Becomes papermill without root's right to write into read-only folders (PR_CAPBSET_DROP of
# CAP_DAC_OVERRIDE on Linux); for other users, and elsewhere, that changes nothing.
START = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)
except (AttributeError, OSError):
    pass
os.execv(sys.executable, [sys.executable, "-m", "papermill", *sys.argv[1:]])
"""
# Python runs this at its start, in the notebook's process and in those that it starts.
SITE = """
import socket
import sys
from importlib.machinery import PathFinder

ABSENT = {absent!r}


class Image(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] not in ABSENT:
            return super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Image
connect = socket.socket.connect


def connect_here(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"there is no network here, not even to {{address[0]}}")
    return connect(self, address)


socket.socket.connect = connect_here
"""


def check_kernel(bundle: Path, kernel: str, dataset: str) -> tuple[float, list[str]]:
    """Run the notebook of `kernel` with small sizes; return seconds, and the files that it left.

    The dataset is a read-only copy, the working folder another one, the home folder empty. What
    Kaggle's image lacks cannot be imported, and no other host can be reached.
    """
    with tempfile.TemporaryDirectory(prefix="kaggle-") as name:
        folder = Path(name)
        attached, working = folder / "input" / dataset, folder / "working"
        shutil.copytree(bundle / "dataset", attached)
        for part in ("working", "home", "site"):
            (folder / part).mkdir()
        # also beside lib, for processes that the notebook starts with a PYTHONPATH of its own
        for site in (folder / "site", attached):
            (site / "sitecustomize.py").write_text(SITE.format(absent=absent_modules()))
        source = (bundle / "kernels" / kernel / f"{kernel}.ipynb").read_text(encoding="utf-8")
        notebook = folder / f"{kernel}.ipynb"
        notebook.write_text(source.replace(INPUT, str(folder / "input")), encoding="utf-8")

        started = time.monotonic()
        _set_writable(attached, False)
        try:
            done = _run(folder, notebook)
        finally:
            _set_writable(attached, True)
        if done.returncode:
            # without colors
            lines = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr).strip().splitlines()
            raise ValueError(f"{kernel} does not run on Kaggle:\n" + "\n".join(lines[-25:]))
        written = [p.relative_to(working).as_posix() for p in working.rglob("*") if p.is_file()]
        return time.monotonic() - started, sorted(written)


def _run(folder: Path, notebook: Path) -> subprocess.CompletedProcess:
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | {
        "HOME": str(folder / "home"),
        "PYTHONPATH": str(folder / "site"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "KAGGLE_KERNEL_RUN_TYPE": "Batch",
        "WANDB_MODE": "disabled",
        "WORKBOOK_SMALL": "1",
    }
    output, working = folder / "executed.ipynb", folder / "working"
    options = ["--cwd", str(working), "-k", "python3", "--no-progress-bar"]
    # a busy machine takes long to start a kernel
    options += ["--start-timeout", "300"]
    command = [sys.executable, "-c", START, str(notebook), str(output), *options]
    return subprocess.run(command, cwd=working, env=environment, capture_output=True, text=True)


def absent_modules() -> list[str]:
    """Return the modules installed here that no package of Kaggle's image brings along."""
    # the image's packages, all that they require, and so on
    present: set[str] = set()
    waiting = [*IMAGE_PACKAGES, *BROUGHT]
    while waiting:
        name = _normal(waiting.pop())
        if name in present:
            continue
        present.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        # an extra is not installed with the package
        waiting += [re.match(r"[\w.-]+", line)[0] for line in required if "extra ==" not in line]
    modules = metadata.packages_distributions().items()
    return sorted(name for name, owners in modules if present.isdisjoint(map(_normal, owners)))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _set_writable(folder: Path, is_writable: bool) -> None:
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        path.chmod(mode | 0o200 if is_writable else mode & ~0o222)


def push(config: KagglePushConfig) -> None:
    """Upload dataset and kernels with Kaggle's client, which finds the credentials by itself.

    Creates the dataset, or a new version of it, and starts the kernels when Kaggle has it ready.
    """
    dataset = config.folder / "dataset"
    about = dataset / "dataset-metadata.json"
    if not about.is_file():
        raise ValueError(f"folder must be one that `kaggle build` made, got {config.folder}")
    if shutil.which("kaggle") is None:
        raise FileNotFoundError("there is no `kaggle` here; install it: pip install kaggle")
    kernels = sorted((config.folder / "kernels").iterdir())
    for path in (about, *(kernel / "kernel-metadata.json" for kernel in kernels)):
        text = path.read_text(encoding="utf-8")
        if NOBODY in text:
            check(config, "user", bool(config.user), "your name on Kaggle, as in --user ada")
            path.write_text(text.replace(NOBODY, config.user), encoding="utf-8")

    address = json.loads(about.read_text(encoding="utf-8"))["id"]
    is_new = _status(address) is None
    words = ["create"] if is_new else ["version", "-m", config.message]
    _kaggle("datasets", *words, "-p", os.fspath(dataset), "--dir-mode", "zip")
    deadline = time.monotonic() + config.timeout
    while (status := _status(address)) != "ready":
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"dataset {address} is {status or 'not there'} after {config.timeout:g} s"
            )
        time.sleep(min(5.0, config.timeout / 10))
    for kernel in kernels:
        _kaggle("kernels", "push", "-p", os.fspath(kernel))


def _status(address: str) -> str | None:
    """Return Kaggle's status of the dataset; None if there is none."""
    command = ["kaggle", "datasets", "status", address]
    done = subprocess.run(command, capture_output=True, text=True)
    # there may be a warning above it
    lines = done.stdout.strip().splitlines()
    return lines[-1].strip() if done.returncode == 0 and lines else None


def _kaggle(*arguments: str) -> None:
    done = subprocess.run(["kaggle", *arguments])
    if done.returncode:
        words = " ".join(arguments[:2])
        raise OSError(f"`kaggle {words}` ended with exit code {done.returncode}")
