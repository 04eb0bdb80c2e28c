"""Rules of `tests/selection.py`, by which `make test` leaves out slow tests."""

import selection

NAMES = [f"tests/a/test_a.py::test_{i}" for i in range(40)] + ["tests/a/test_b.py::test_new"]
SLOW = set(NAMES[:30])


def left_out(turn, changed=(), failed=()):
    return selection.left_out(NAMES, turn=turn, slow=SLOW, changed=set(changed), failed=set(failed))


def test_four_turns_run_each_test_and_each_slow_test_once():
    run = [set(NAMES) - set(left_out(turn)) for turn in range(selection.TURNS)]
    assert set.union(*run) == set(NAMES)
    assert all(sum(name in names for names in run) == 1 for name in SLOW)


def test_fast_and_new_tests_always_run():
    for turn in range(selection.TURNS):
        assert set(left_out(turn)) <= SLOW


def test_changed_files_and_failed_tests_run_in_each_turn():
    for turn in range(selection.TURNS):
        assert left_out(turn, changed=["tests/a/test_a.py"]) == []
        assert NAMES[3] not in left_out(turn, failed=[NAMES[3]])


def test_costs_of_a_run_are_those_of_slow_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "COSTS", tmp_path / "costs.json")
    selection.write_costs({"b": 0.49, "c": 3.14, "a": 0.5})
    assert selection.slow_tests() == {"a": 0.5, "c": 3.1}


def test_outside_of_git_there_is_no_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert selection.current_turn() is None


def test_a_change_belongs_to_the_tests_of_its_folder():
    page = "tests/sections/loss/loss.md"
    paths = selection.tests_of({"planc/checks/targets.py", page})
    assert {"tests/checks/test_checks.py", "tests/specs/test_specs.py"} <= paths
    assert "tests/sections/matmul/test_matmul.py" not in paths
    assert selection.tests_of({"docs/faq.md", "README.md", "tests/conftest.py"}) == set()


def test_a_change_belongs_to_the_tests_that_import_its_folder():
    paths = selection.tests_of({"planc/tools/importers/reading.py"})
    assert "tests/tools/importers/test_import.py" in paths
    assert "tests/tools/order/test_hang.py" not in paths


def test_a_changed_module_of_tests_selects_the_tests_that_import_it():
    one = "tests/sections/loss/test_loss.py"
    assert selection.tests_of({one}) == {one}
    assert "tests/lowering/test_sends.py" in selection.tests_of({"tests/lowering/sending_jobs.py"})
    assert "tests/lowering/test_sends.py" in selection.tests_of({"tests/support/numerics.py"})
