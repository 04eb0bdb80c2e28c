"""Atomic writes: a file is either written completely or left as it was, even after a crash."""

import contextlib
import errno
import os
import stat
from pathlib import Path


def write(path: Path, data: str | bytes) -> None:
    """Writes a file in one step: it is renamed into its place once it is on the disk.

    A symlink is followed, and what it points at is written. An existing file keeps its mode; a new
    one has the mode that the umask leaves. What is no regular file, such as `/dev/stdout`, is
    written as it is.

    Args:
        path: in a folder that exists.
        data: a text, written as UTF-8 with its own line ends, or bytes.

    Raises:
        OSError: it can't be written; the file is as it was, and nothing else is left behind.
    """
    content = data.encode("utf-8") if isinstance(data, str) else data
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        target.write_bytes(content)
        return
    if mode is not None and not os.access(target, os.W_OK):  # a rename would not ask
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    temporary = target.with_name(f".{target.name[:100]}.{os.urandom(6).hex()}")
    try:
        with temporary.open("xb") as stream:
            if mode is not None:
                temporary.chmod(stat.S_IMODE(mode))
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
