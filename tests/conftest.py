"""Fixtures that every room's tests may use."""

import os
from pathlib import Path

import pytest

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before a test module imports Flower ahead of fedmem

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real corpora and golden answers: $FEDMEM_SHARED, or `shared` beside the checkout.

    Its absence is a failure in CI (CI=true), so that a gate cannot pass by skipping; elsewhere it is a stated skip.
    """
    folder = Path(os.environ.get("FEDMEM_SHARED") or REPOSITORY.parent / "shared")
    if not (folder / "data").is_dir():
        message = f"no shared data at {folder}: set FEDMEM_SHARED to the folder that holds data/"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What executes notebooks comes first: it takes longest, and the other tests run beside it."""
    items.sort(key=lambda item: item.get_closest_marker("notebooks") is None)
