"""The suite catches each of a list of deliberate faults, at least five in every room of `lib`."""

import importlib
from collections import Counter

import pytest

from tests.fault import ROOT, Fault
from tests.test_rooms import ROOMS

FAULTS = {
    f"{path.parent.name}-{index}": fault
    for path in sorted((ROOT / "tests").glob("*/faults.py"))
    for index, fault in enumerate(
        importlib.import_module(f"tests.{path.parent.name}.faults").FAULTS
    )
}


def test_every_room_has_faults_whose_text_is_there_once():
    per_room = Counter(fault.file.split("/")[1] for fault in FAULTS.values())
    assert {name: per_room[name] for name in ROOMS if per_room[name] < 5} == {}
    assert len(FAULTS) >= 80
    for name, fault in FAULTS.items():
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, f"{name}: {fault.old!r}"
        assert fault.new != fault.old, name
        for path, _, test in (words.partition("::") for words in fault.test.split()):
            if path.endswith(".py"):
                assert f"def {test.split('[')[0]}" in (ROOT / path).read_text(encoding="utf-8"), (
                    name
                )


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(fault: Fault):
    assert fault.is_caught()
