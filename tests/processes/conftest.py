from pathlib import Path

import pytest
from pool import Pool

HERE = Path(__file__).parent
SAMPLE = {"test_apply.py", "test_coverage.py"}
"""What plain `pytest` runs of this folder; all else here is `slow`, as are tests marked so."""
THREADS = 100
"""Of a process of the pool; a job on four ranks has about 20."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE and item.path.name not in SAMPLE:
            item.add_marker(pytest.mark.slow)


class _Keeper:
    """One pool for the session; a new one after a job has ended it, or has left many threads: 35
    tests of Megatron-FSDP left 500, which made each test after them four times as slow.
    """

    def __init__(self):
        self.pool = None

    def run(self, function, **arguments):
        if self.pool is not None and self.pool.threads > THREADS:
            self.pool.close()
        if self.pool is None or not self.pool.alive:
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
