"""What goes to Kaggle, and how: frozen dataclasses, checked when made."""

import dataclasses
import re
from pathlib import Path

from lib.config import check

SLUG = r"[a-z0-9]+(-[a-z0-9]+)*"
RIGHT_USER = "the name in the address of your page on Kaggle, or none given"


@dataclasses.dataclass(frozen=True)
class KaggleBuildConfig:
    """A folder for Kaggle's command line: one dataset with the code, one kernel a notebook."""

    notebooks: tuple[str, ...] = ("08",)
    """Numbers (`08`) or names (`08_speedrun`)."""

    parameters: str = "kaggle"
    """Sizes for Kaggle's GPUs: a file in notebooks/parameters/. Empty: each notebook's own."""

    user: str = ""
    """Your name on Kaggle; `kaggle push` can also fill it in."""

    dataset: str = "training-workbook"
    """The dataset's name in its address."""

    accelerator: str = "NvidiaTeslaT4"
    """Kaggle's name of the machine: this one has two T4 GPUs. Empty: no GPU."""

    internet: bool = False
    """Whether the notebooks may use the network."""

    verify: bool = True
    """Whether each notebook is then run as Kaggle would, with small sizes: a minute each."""

    output: Path = Path("artifacts/kaggle")
    """The folder, which is made anew."""

    def __post_init__(self) -> None:
        check(self, "notebooks", bool(self.notebooks), "at least one")
        check(self, "user", bool(re.fullmatch(r"[A-Za-z0-9-]*", self.user)), RIGHT_USER)
        is_slug = re.fullmatch(SLUG, self.dataset) and 6 <= len(self.dataset) <= 50
        check(self, "dataset", bool(is_slug), "6 to 50 of a-z, 0-9 and single dashes in between")


@dataclasses.dataclass(frozen=True)
class KagglePushConfig:
    """What `kaggle build` left, uploaded by Kaggle's own client."""

    folder: Path = Path("artifacts/kaggle")
    """What `kaggle build` made."""

    user: str = ""
    """Your name on Kaggle, where `kaggle build` was not told."""

    message: str = "Updated"
    """The note of a new version of the dataset."""

    timeout: float = 900.0
    """Seconds that Kaggle may take to prepare the dataset."""

    def __post_init__(self) -> None:
        check(self, "user", bool(re.fullmatch(r"[A-Za-z0-9-]*", self.user)), RIGHT_USER)
        check(self, "message", bool(self.message), "a text")
        check(self, "timeout", self.timeout > 0, "more than 0")
