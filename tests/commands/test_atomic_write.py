"""A file that planc writes is whole or as it was, and nothing else is left in its folder."""

import os
import stat
import threading

import pytest

from planc.files import atomic_write


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        atomic_write.write(tmp_path / "new", "text\r\nü\n")
    finally:
        os.umask(before)
    assert (tmp_path / "new").read_bytes() == "text\r\nü\n".encode()
    assert mode(tmp_path / "new") == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_an_existing_file_keeps_its_mode(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    file.chmod(0o751)
    atomic_write.write(file, b"\x00new")
    assert file.read_bytes() == b"\x00new" and mode(file) == 0o751


def test_a_symlink_is_followed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "file").write_text("old")
    link = tmp_path / "b" / "link"
    link.symlink_to("../a/file")
    atomic_write.write(link, "new")
    assert link.is_symlink() and (tmp_path / "a" / "file").read_text() == "new"
    missing = tmp_path / "b" / "dangling"
    missing.symlink_to("../a/made")
    atomic_write.write(missing, "new")
    assert missing.is_symlink() and (tmp_path / "a" / "made").read_text() == "new"
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["dangling", "link"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call, error):
    file = tmp_path / "file"
    file.write_text("old")

    def fail(*args):
        raise error

    monkeypatch.setattr(
        *{"fsync": (os, "fsync"), "replace": (atomic_write.Path, "replace")}[call], fail
    )
    with pytest.raises(type(error)):
        atomic_write.write(file, "new" * 1000)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_read_only_file_is_not_replaced(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("old")
    file.chmod(0o444)
    monkeypatch.setattr(os, "access", lambda path, right: bool(mode(file) & 0o222))
    with pytest.raises(PermissionError) as error:
        atomic_write.write(file, "new")
    assert error.value.filename == str(file) and file.read_text() == "old"


def test_a_folder_or_a_folder_that_is_not_there(tmp_path):
    for path in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(OSError):
            atomic_write.write(path, "new")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_into(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    atomic_write.write(pipe, "text")
    reader.join(timeout=10)
    assert found == ["text"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_readers_never_see_half_a_file(tmp_path):
    """One thread writes long texts of one letter, the other must always read one letter."""
    file = tmp_path / "file"
    file.write_text("a" * 100_000)
    stop = threading.Event()
    seen = []

    def read():
        while not stop.is_set():
            text = file.read_text()
            seen.append((len(text), len(set(text))))

    reader = threading.Thread(target=read)
    reader.start()
    for letter in "bcdefgh" * 10:
        atomic_write.write(file, letter * 100_000)
    stop.set()
    reader.join()
    assert set(seen) == {(100_000, 1)}
