import warnings
from pathlib import Path

import pytest
from pool import Pool, RankError

HERE = Path(__file__).parent
SAMPLE = {"test_apply.py", "test_coverage.py"}
"""What plain `pytest` runs of this folder; all else here is `slow`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE and item.path.name not in SAMPLE:
            item.add_marker(pytest.mark.slow)


class _Keeper:
    """One pool for the session; a new one after a job has ended it.

    A job whose ranks all fall silent runs once more: gloo does that now and then on a machine with
    fewer cores than ranks. A plan that makes ranks wait for each other does it again.
    """

    def __init__(self):
        self.pool = None

    def run(self, function, **arguments):
        if self.pool is None or not self.pool.alive:
            self.pool = Pool()
        try:
            return self.pool.run(function, **arguments)
        except RankError as error:
            if "did not end on every rank in time" not in str(error):
                raise
            warnings.warn(f"{function} runs once more: {error}", stacklevel=2)
            self.pool = Pool()
            return self.pool.run(function, **arguments)

    def close(self):
        if self.pool is not None:
            self.pool.close()


@pytest.fixture(scope="session")
def four():
    """`four.run("numerics.compare", ...)` calls a function on four gloo processes."""
    keeper = _Keeper()
    yield keeper
    keeper.close()
