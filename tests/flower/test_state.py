"""What a method keeps at a site, and for how long."""

import os

import pytest
import torch
from helpers import Stop

from fednca.base.errors import ChangedDataError
from fednca.flower.state import load_state, save_state, unchanged

DAY = 86400


def keep_run(state, number, round=1):
    """Let a run keep something at a site, so many days after the first one."""
    folder = state / f"{number:016x}"
    save_state(folder, round, round - 1, {"w": torch.tensor([float(number)])})
    os.utime(folder, (number * DAY, number * DAY))
    return folder


def test_a_new_run_leaves_the_states_of_the_two_runs_before_it(tmp_path):
    for number in range(1, 6):
        keep_run(tmp_path, number)
        assert sorted(int(path.name, 16) for path in tmp_path.iterdir()) == list(range(max(1, number - 2), number + 1))
    assert load_state(tmp_path / f"{4:016x}", 1) == {"w": torch.tensor([4.0])}
    assert load_state(tmp_path / f"{2:016x}", 1) is None


def test_a_run_that_goes_on_counts_as_new_and_removes_no_other(tmp_path):
    for number in (1, 2, 3):
        keep_run(tmp_path, number)
    os.utime(keep_run(tmp_path, 1, round=2), (9 * DAY, 9 * DAY))
    assert len(list(tmp_path.iterdir())) == 3
    keep_run(tmp_path, 4)
    assert sorted(int(path.name, 16) for path in tmp_path.iterdir()) == [1, 3, 4]


def test_what_is_no_run_stays(tmp_path):
    for name in ("client-0000", "notes", "0" * 15, "F" * 16):
        (tmp_path / name).mkdir()
    (tmp_path / ("0" * 16)).write_text("a file")
    for number in range(1, 6):
        keep_run(tmp_path, number)
    assert len(list(tmp_path.iterdir())) == 5 + 3


def test_clients_of_a_simulation_do_not_remove_each_others(tmp_path):
    for number in range(5):
        save_state(tmp_path / f"client-{number:04d}", 1, 0, {"w": torch.zeros(1)})
    assert len(list(tmp_path.iterdir())) == 5


def test_data_are_noted_after_the_first_work_that_went_well(tmp_path):
    folder = tmp_path / "state" / ("0" * 16)
    with pytest.raises(Stop), unchanged(folder, "a table that was mended since"):
        raise Stop
    for _ in range(2):
        with unchanged(folder, "a table"):
            pass
    with pytest.raises(ChangedDataError, match="begin a new run"), unchanged(folder, "another table"):
        pytest.fail("it was worked with")
    for number in range(1, 6):  # further runs, whose states push out that of the first
        with unchanged(tmp_path / "state" / f"{number:016x}", "another table"):
            keep_run(tmp_path / "state", number)
    with pytest.raises(ChangedDataError), unchanged(folder, "another table"):
        pytest.fail("it was worked with")
