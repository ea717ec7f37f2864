"""A few faults of each kind on notebooks that do next to nothing; `tests/faults.py` does them on the real ones."""

import os
import signal

import faults
import pytest
from small_house import House

pytestmark = pytest.mark.notebooks
MOUNTS = pytest.mark.skipif(not faults.can_mount(), reason="a full disk and a read-only one need the right to mount")


@pytest.fixture
def house(tmp_path):
    made = House(tmp_path)
    yield made
    for pid in made.processes():
        os.kill(pid, signal.SIGKILL)


def test_kills_leave_nothing_half_written_and_a_rerun_gives_the_same_bytes(house, capsys):
    for stage in ("partition", "train", "analyze"):
        house.act(stage, "time.sleep(1)")
    faults.kills(house, 3, seed=3, log=print)
    assert "the undisturbed bytes" in capsys.readouterr().out


def test_of_several_runners_one_works(house):
    faults.two_at_once(house, print)


@MOUNTS
def test_results_that_cannot_be_written_are_named(house):
    faults.read_only(house, print)


@MOUNTS
def test_a_full_disk_is_named_and_leaves_nothing_half_written(house):
    faults.full_disks(house, [60], print)


def test_what_is_damaged_is_seen(house):
    """The check of the checks: it must be able to fail."""
    assert house.run("run", house.study).returncode == 0
    assert not faults.damage(house.results)
    (made,) = house.results.glob("detect/*/made.json")
    made.write_text("{}")
    assert faults.damage(house.results) == [f"{made} is not what was published"]
