"""The list of mutants fits the package; running them is for `python tests/mutants.py`."""

import shutil

import pytest
from mutants import MUTANTS, ROOT, mutate


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_breaks_something_that_is_there(mutant, tmp_path):
    target = tmp_path / "nnx_dp" / mutant.file
    target.parent.mkdir(parents=True)
    shutil.copy(ROOT / "nnx_dp" / mutant.file, target)
    before = target.read_text()
    mutate(mutant, tmp_path)
    assert target.read_text() != before


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
