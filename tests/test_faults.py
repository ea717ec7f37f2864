"""A few faults of each kind on notebooks that do next to nothing; `tests/faults.py` does them on the real ones."""

import shutil

import faults
import pytest
from small_house import House

pytestmark = pytest.mark.notebooks
MOUNTS = pytest.mark.skipif(not faults.can_mount(), reason="a full disk and a read-only one need the right to mount")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(house, digests, seconds of each job) of a run that nothing disturbs."""
    house = House(tmp_path_factory.mktemp("undisturbed"))
    return house, *faults.undisturbed(house)


@pytest.fixture
def house(tmp_path):
    with House(tmp_path) as made:
        yield made


def test_kills_leave_nothing_half_written_and_a_rerun_gives_the_same_bytes(house, undisturbed, capsys):
    _, expected, seconds = undisturbed
    faults.kills(house, expected, seconds, 3, seed=3, log=print)
    assert "the undisturbed bytes" in capsys.readouterr().out


def test_of_several_runners_one_works(house, undisturbed):
    faults.several_at_once(house, undisturbed[1], print)


@MOUNTS
def test_results_that_cannot_be_written_are_named(house):
    faults.read_only(house, print)


@MOUNTS
def test_a_full_disk_is_named_and_leaves_nothing_half_written(house, undisturbed):
    faults.full_disks(house, undisturbed[1], [60], print)


def test_what_is_damaged_is_seen(undisturbed, tmp_path):
    """The check of the checks: it must be able to fail."""
    results = shutil.copytree(undisturbed[0].results, tmp_path / "results")
    assert not faults.damage(results)
    (made,) = results.glob("detect/*/made.json")
    made.write_text("{}")
    assert faults.damage(results) == [f"{made} is not what was published"]
