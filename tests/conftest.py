import difflib
import gc
import json
import os
import re
import sys
from pathlib import Path

import hypothesis
import pytest
import quick
import selection

sys.path.insert(0, str(Path(__file__).parent / "support"))
from folders import FOLDERS, TESTS

sys.path.extend(FOLDERS)

from rank_processes import IdleProcesses

GOLDENS = TESTS / "goldens"
WHOLLY_SLOW = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.M)
"""The line of a file all of whose tests are slow, such as those on four processes."""


# No test is timed: how long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser):
    parser.addoption(
        "--update", action="store_true", help="write what is printed into goldens and docs"
    )
    parser.addoption("--quick", action="store_true", help="run what needs no torch: `make quick`")
    parser.addoption("--full", action="store_true", help="run all tests, a rotating quarter else")
    parser.addoption("--costs", action="store_true", help="record the seconds of slow tests")


def pytest_configure(config):
    """Runs named files whose tests are all slow, which runs of a folder leave out."""
    if config.getoption("--quick"):
        sys.meta_path.insert(0, quick.NoTorch())
    here = config.invocation_params.dir
    named = [here / arg.partition("::")[0] for arg in config.args]
    if config.option.markexpr == "not slow" and any(map(_wholly_slow, named)):
        config.option.markexpr = ""


def _wholly_slow(path):
    return path.is_file() and bool(WHOLLY_SLOW.search(path.read_text()))


def pytest_collection_modifyitems(config, items):
    for item in items:
        if " at 0x" in item.nodeid:  # another id in each process: no worker finds the test
            raise pytest.UsageError(f"{item.nodeid}: give the case an id without an address")
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if not quick.quick(item)])
        items[:] = [item for item in items if quick.quick(item)]
    elif not _runs_all(config):
        _leave_out_slow(config, items)


def _runs_all(config):
    """Whether a run selects all tests: it asks for them, names some, or has no checkout."""
    options = config.option
    asked = options.full or options.costs or options.update or options.markexpr != "not slow"
    return asked or bool(options.file_or_dir or options.keyword) or selection.current_turn() is None


def _leave_out_slow(config, items):
    """Deselects the slow tests that are not this commit's quarter, changed or failed last."""
    names = selection.left_out(
        [item.nodeid for item in items],
        turn=selection.current_turn(),
        slow=selection.slow_tests(),
        changed=selection.tests_of(selection.changed_files()),
        failed=config.cache.get("cache/lastfailed", {}),
    )
    names = set(names)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
    items[:] = [item for item in items if item.nodeid not in names]


def pytest_collection_finish(session):
    """Keeps Python from searching all imported modules for cycles, again and again."""
    gc.freeze()


SECONDS = {}
"""Seconds of each test of this run, setup and teardown included, by its id."""


def pytest_runtest_logreport(report):
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0) + report.duration


def pytest_sessionfinish(session, exitstatus):
    """Records the costs of a complete run, in the process that receives all reports."""
    config = session.config
    if config.option.costs and not hasattr(config, "workerinput") and exitstatus == 0:
        selection.write_costs(SECONDS)


def pytest_terminal_summary(terminalreporter, config):
    if config.option.quick or config.option.collectonly or _runs_all(config):
        return
    left = [name for name in selection.slow_tests() if name not in SECONDS]
    selection.LEFT_OUT.parent.mkdir(exist_ok=True)
    selection.LEFT_OUT.write_text("".join(f"{name}\n" for name in left))
    path = selection.LEFT_OUT.relative_to(selection.ROOT)
    terminalreporter.write_line(
        f"{len(left)} slow tests were left out, listed in {path}: `pytest @{path}` runs them, "
        "`make test FULL=1` runs all tests, and the next three commits run each of them"
    )


def pytest_ignore_collect(collection_path, config):
    """Files that import torch cannot even be read under `--quick`."""
    test = collection_path.name.startswith("test_")
    known = (*quick.FILES, "test_specs")
    return (
        True if config.getoption("--quick") and test and collection_path.stem not in known else None
    )


@pytest.fixture(scope="session", autouse=True)
def idle_processes():
    """Lends processes that run ranks from test to test, and ends them with the session."""
    idle = IdleProcesses()
    with pytest.MonkeyPatch.context() as patch:
        idle.install(patch)
        yield
    idle.end_all()


@pytest.fixture(scope="session")
def four():
    """`four.run("numerics.compare", ...)` calls a function on four gloo processes."""
    from pool import HealthyPool

    pool = HealthyPool()
    yield pool
    pool.close()


@pytest.fixture
def script_alone(monkeypatch):
    """What a script puts into transformers is there for one test; a later one that finds it would
    take it for code of the user's own, whose verdicts are not kept by a model's name.
    """
    from transformers import AttentionInterface, masking_utils

    for name in ("find_packed_sequence_indices", "chunked_causal_mask_function"):
        monkeypatch.setattr(masking_utils, name, getattr(masking_utils, name))
    for registry in (AttentionInterface, masking_utils.AttentionMaskInterface):
        monkeypatch.setattr(registry, "_global_mapping", {**registry._global_mapping})


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory, request):
    """A cache of facts for the session, so that no test depends on what lay around.

    The workers of `pytest -n` share it: what one has read from a model, the others find.
    """
    before = os.environ.get("PLANC_CACHE_DIR")
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    os.environ["PLANC_CACHE_DIR"] = str(shared / "cache")
    if request.config.getoption("--quick"):
        _copy_models(quick.CACHE, shared / "cache")
    os.environ.pop("FORCE_COLOR", None)
    yield
    if before is None:
        del os.environ["PLANC_CACHE_DIR"]
    else:
        os.environ["PLANC_CACHE_DIR"] = before


@pytest.fixture
def no_verdicts(own_cache, tmp_path, monkeypatch):
    """A cache of the test's own that knows what the session's knows of models and of small plans,
    but no verdict on a plan, which changes what is printed.
    """
    shared, own = Path(os.environ["PLANC_CACHE_DIR"]), tmp_path / "cache"
    _copy_models(shared, own)
    monkeypatch.setenv("PLANC_CACHE_DIR", str(own))
    yield own
    _copy_models(own, shared)


def _copy_models(source, target):
    """Copies entries of a cache, each in one step, for another worker may read it."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        if path.name.startswith("verify-") or (target / path.name).exists():
            continue
        text = path.read_text()
        if not re.search('"kind":"(verdict|proved on)', text.partition("\n")[0]):
            made = target / f".{path.name}.{os.getpid()}"
            made.write_text(text)
            made.rename(target / path.name)


@pytest.fixture
def uncached(tmp_path, monkeypatch):
    """A cache of the test's own, so that no verdict is known, and that of a broken runtime is
    not kept."""
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache of the test's own, and no hub."""
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def golden(request):
    """`golden("name", text)` compares a text with tests/goldens/name, or writes it."""

    def compare(name, text):
        path = GOLDENS / name
        if request.config.getoption("--update"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            return
        assert path.is_file(), f"there is no golden {name}: run pytest --update and read it"
        old = path.read_text()
        if old != text:
            lines = difflib.unified_diff(
                old.splitlines(), text.splitlines(), "golden", "now", lineterm=""
            )
            pytest.fail("\n".join(lines))

    return compare


@pytest.fixture
def golden_digest(request):
    """`golden_digest(name, digest)` compares with tests/goldens/digests.json, or writes it."""

    def compare(name, digest):
        path = GOLDENS / "digests.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        if request.config.getoption("--update"):
            known = dict(sorted({**known, name: digest}.items()))
            path.write_text(json.dumps(known, indent=1) + "\n")
            return
        assert known.get(name) == digest, f"{name} lowers to other operations: see `planc diff`"

    return compare


@pytest.fixture
def ends_its_group():
    """Ends the process group that `planc.apply` has started in this process."""
    yield
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
