"""Parameters reach the notebooks that have them; what makes no sense is refused by name."""

from pathlib import Path

import papermill
import pytest

from lib.notebook import run_notebooks
from lib.notebook_plan import Job, find_notebooks, parameter_names, plan

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def shelf(tmp_path, make_notebook) -> Path:
    """A workbook of two notebooks that are not run here."""
    make_notebook(tmp_path / "notebooks/01_one.ipynb", "steps: int | None = 3\nsize = {\n 'a': 1}")
    make_notebook(tmp_path / "notebooks/02_two.ipynb", "# needs: 01\nratio = 2")
    (tmp_path / "notebooks/parameters").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"notebooks": ["07"]}, "no notebook is called '07'; there are: 01_one, 02_two"),
        ({"parameters": "gpu"}, "no parameter file is called 'gpu'; there are: bad"),
        ({"parameters": "bad"}, "01_one has no parameter 'step'; there are: size, steps"),
        ({"overrides": {"ration": 1}}, "no chosen notebook has a parameter 'ration'"),
        ({"notebooks": ["1"], "overrides": {"ratio": 1}}, "parameter 'ratio'; there are: size"),
    ],
)
def test_unknown_names_are_refused_before_anything_runs(shelf, capsys, arguments, message):
    (shelf / "notebooks/parameters/bad.yaml").write_text("01_one:\n  step: 4\n")
    assert run_notebooks(root=shelf, **arguments) == 2
    assert message in capsys.readouterr().err
    assert not (shelf / "artifacts").exists()


@pytest.mark.parametrize("text", ["03_three: {a: 1}", "steps: 3", "- steps", "a: ["])
def test_a_parameter_file_of_another_form_is_refused(shelf, text):
    path = shelf / "own.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"own\.yaml"):
        plan(find_notebooks((), shelf), path, None, shelf)


def test_parameters_reach_the_notebooks_that_have_them(shelf):
    path = shelf / "notebooks/parameters/gpu.yaml"
    path.write_text("01_one:\n  steps: 100\n")
    one, two = find_notebooks((), shelf)
    assert plan([one, two], "gpu", {"ratio": 5}, shelf) == [
        Job(one, {"steps": 100}, ()),
        Job(two, {"ratio": 5}, ("01_one",)),
    ]


def test_parameter_names_are_what_the_cell_assigns(shelf):
    assert parameter_names(shelf / "notebooks/01_one.ipynb") == {"steps", "size"}


@pytest.mark.parametrize("needed", ["02", "03", "nothing"])
def test_only_an_earlier_notebook_can_be_needed(shelf, make_notebook, needed):
    make_notebook(shelf / "notebooks/02_two.ipynb", f"# needs: {needed}\nratio = 2")
    with pytest.raises(ValueError, match=f"needs '{needed}'; earlier ones: there are: 01_one"):
        plan(find_notebooks((), shelf), None, None, shelf)


@pytest.mark.parametrize("path", find_notebooks((), ROOT), ids=lambda path: path.stem)
def test_papermill_finds_the_same_parameters(path):
    # of others it warns that it does not know them
    assert set(papermill.inspect_notebook(path)) == parameter_names(path)
