"""The workbook on Kaggle: a dataset with the code, and a kernel for each notebook.

`build` writes a folder for Kaggle's command line from what is committed, so that nothing else
leaves this machine, runs its notebooks from there, and prints the commands that upload it. The
metadata fields are those of Kaggle's documentation (`docs/kernels_metadata.md` and
`docs/datasets_metadata.md` in Kaggle/kaggle-cli):

- `machine_shape` NvidiaTeslaT4 is what the editor calls "GPU T4 x2"; there is none with one T4;
- without `enable_internet` the client turns the network on;
- a kernel's address is its title in lower case with dashes;
- the license names are a fixed list, which MIT is not on.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import zipfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import nbformat
from nbclient.exceptions import CellExecutionError

from lib.core.files import ROOT, claim_folder, sha256_file
from lib.core.hardware import output_of
from lib.core.records import is_checkout
from lib.core.settings import NonEmpty, check, require, settings
from lib.tools.publish.cells import FIRST_CELL, NAME, TEMPLATES, read_notebook
from lib.tools.publish.execute import execute, insert_parameters
from lib.tools.publish.plan import Job, find_notebooks, plan

TITLE = "Training workbook"
DESCRIPTION = """\
The code, records and small trained model of a workbook that goes from raw text to a language model
trained on several GPUs. License: MIT; the file LICENSE holds its text."""
# A placeholder for the name on Kaggle.
NOBODY = "INSERT_USERNAME"
# Kaggle's own client; it starts a kernel once the dataset is ready.
UPLOAD = """\
To upload it with Kaggle's client (pip install kaggle):
  kaggle datasets create -p {output}/dataset --dir-mode zip
  kaggle datasets status {dataset}    # until it says ready
{kernels}
A newer dataset: kaggle datasets version -m Updated -p {output}/dataset --dir-mode zip"""
# The code, and of artifacts/ what notebooks show. Folders of single runs stay here.
FILES = (
    *("LICENSE", "lib/**/*"),
    *(f"artifacts/{name}" for name in ("*.jsonl", "*.md", "*.csv", "*.png")),
    *(f"artifacts/{name}/**/*" for name in ("tiny_stories", "profile_h200", "race", "gpt2")),
    # whose functions notebook 03 trains
    "notebooks/02_model.ipynb",
)
# What reads the command line, in pure Python; Kaggle's image has the other packages.
BROUGHT = ("tyro", "docstring-parser", "typeguard")
INPUT = "/kaggle/input"
GIT = ("git", "-C")
# In place of a notebook's own first cell: Kaggle mounts the dataset one to three folders down.
KAGGLE_FIRST_CELL = (TEMPLATES / "kaggle_first_cell.ipy").read_text(encoding="utf-8").strip()
# Above the parameters, a line each.
SIZES = """\
from lib.lessons.notebook import small

# Sizes for this machine, except in a quick test.
if not small():"""
# The kernel that times attention.
ATTENTION = "lib/tools/publish/templates/attention_on_t4.ipynb"


@settings
class KaggleBuildConfig:
    """A folder for Kaggle's command line: a dataset with the code, and a kernel per notebook."""

    notebooks: Annotated[tuple[str, ...], NonEmpty] = ("12",)
    """Numbers (`12`) or names (`12_speedrun`)."""

    parameters: str = "kaggle"
    """Sizes for Kaggle's GPUs: a file in notebooks/parameters/. Empty: each notebook's own."""

    user: str = ""
    """Your name on Kaggle; without it the bundle cannot be uploaded."""

    attention: bool = True
    """Add a kernel that times the attention kernels on each GPU and writes the record."""

    accelerator: str = "NvidiaTeslaT4"
    """Kaggle's name of the machine: this one has two T4 GPUs. Empty: no GPU."""

    verify: bool = True
    """Then run each notebook as Kaggle would, with small sizes: a minute each."""

    output: Path = Path("artifacts/kaggle")
    """Folder for the bundle; an existing bundle is rebuilt."""

    def __post_init__(self) -> None:
        right = "the name in the address of your page on Kaggle, or empty"
        check(self, "user", bool(re.fullmatch(r"[A-Za-z0-9-]*", self.user)), right)


def build(config: KaggleBuildConfig, *, root: Path = ROOT) -> Path:
    """Write the bundle and, if asked, run its notebooks; return its folder.

    Raises:
        ValueError: `root` is no git checkout, or a notebook does not run.
    """
    require(is_checkout(root), f"a bundle is made from a git checkout, and {root} is none")
    output = config.output.absolute()
    with tempfile.TemporaryDirectory(prefix="kaggle-") as folder:
        committed = Path(folder)
        extract_commit(root, committed)
        jobs = plan(find_notebooks(config.notebooks, committed), config.parameters, committed)
        claim_folder(output, "a bundle for Kaggle", setting="output")
        for part in (output / "dataset", output / "kernels"):
            if part.exists():
                shutil.rmtree(part)
        commit = output_of([*GIT, str(root), "rev-parse", "HEAD"])
        write_dataset(output / "dataset", committed, commit)
        if config.attention:
            jobs.append(Job(committed / ATTENTION))
        for job in jobs:
            write_kernel(output / "kernels" / job.name, job, config)
    if config.verify:
        for job in jobs:
            print(f"running {job.name} from the bundle", flush=True)
            print(f"{job.name} runs: {run_kernel(output, job.name):.0f} s")
    # last, since Kaggle's client takes no dataset without it
    describe_dataset(output / "dataset", config.user)
    folder = shlex.quote(str(output))
    pushes = [f"  kaggle kernels push -p {folder}/kernels/{job.name}" for job in jobs]
    dataset = f"{config.user or NOBODY}/{NAME}"
    print(UPLOAD.format(output=folder, dataset=dataset, kernels="\n".join(pushes)))
    if not config.user:
        print("It has no owner yet: build it with --user and your name on Kaggle.")
    return output


def extract_commit(root: Path, folder: Path) -> None:
    """Write the files of the commit checked out at `root` to `folder`; print what differs there."""
    changed = output_of([*GIT, str(root), "diff", "--name-only", "-z", "HEAD"]) or ""
    for name in filter(None, changed.split("\0")):
        print(f"bundled as it is committed, without your changes: {name}", flush=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = [*GIT, str(root), "archive", "--format=zip", "HEAD"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    # a link becomes a file that only names its target
    zipfile.ZipFile(io.BytesIO(done.stdout)).extractall(folder)


def write_dataset(folder: Path, committed: Path, commit: str | None) -> None:
    """Copy code, records, the small model and `BROUGHT`; bundle.json has commit and hashes."""
    hashes = {}
    paths = {path for pattern in FILES for path in committed.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        name = path.relative_to(committed).as_posix()
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        hashes[name] = sha256_file(target)
    for package in BROUGHT:
        for file in metadata.files(package) or ():
            if not {"..", "__pycache__"}.intersection(file.parts):
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.locate(), target)
    made = {"commit": commit, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    _write_json(folder / "bundle.json", made | {"sha256": hashes})


def describe_dataset(folder: Path, user: str) -> None:
    """Write Kaggle's metadata of the dataset."""
    # Kaggle has no name for MIT; "other" refers to the description
    about = {
        "title": TITLE,
        "id": f"{user or NOBODY}/{NAME}",
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
    if job.parameters:
        lines = (f"    {name} = {value!r}" for name, value in job.parameters.items())
        insert_parameters(content, "\n".join((SIZES, *lines)))
    folder.mkdir(parents=True)
    nbformat.write(content, folder / f"{job.name}.ipynb")
    title = f"Workbook {job.name.replace('_', ' ')}"
    owner = config.user or NOBODY
    about = {
        "id": f"{owner}/{title.lower().replace(' ', '-')}",
        "title": title,
        "code_file": f"{job.name}.ipynb",
        "language": "python",
        "kernel_type": "notebook",
        "is_private": True,
        "enable_gpu": bool(config.accelerator),
        "enable_tpu": False,
        "enable_internet": False,
        "machine_shape": config.accelerator,
        "dataset_sources": [f"{owner}/{NAME}"],
        "competition_sources": [],
        "kernel_sources": [],
        "model_sources": [],
    }
    _write_json(folder / "kernel-metadata.json", about)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def run_kernel(bundle: Path, kernel: str) -> float:
    """Run the notebook of `kernel` with small sizes, from a copy of the dataset; return seconds.

    Raises:
        ValueError: it does not run; the message ends with its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="kaggle-") as name:
        folder = Path(name)
        shutil.copytree(bundle / "dataset", folder / "input" / NAME)
        (folder / "working").mkdir()
        notebook = read_notebook(bundle / "kernels" / kernel / f"{kernel}.ipynb")
        for cell in notebook.cells:
            cell.source = cell.source.replace(INPUT, str(folder / "input"))
        environment = {"WORKBOOK_SMALL": "1", "KAGGLE_KERNEL_RUN_TYPE": "Batch"}
        # nothing of this workbook
        environment |= {"PYTHONPATH": "", "WANDB_MODE": "disabled"}
        started = time.monotonic()
        try:
            execute(notebook, folder / "working", environment=environment)
        except (CellExecutionError, RuntimeError) as error:
            lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
            raise ValueError(f"{kernel} does not run:\n" + "\n".join(lines[-25:])) from error
        return time.monotonic() - started
