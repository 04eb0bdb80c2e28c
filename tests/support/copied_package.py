"""Copies of planc with other sections, and programs that run them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from folders import FOLDERS, ROOT


def copy_package(target, *, without=(), added=()):
    """Copies planc into a folder, without the folders of some sections and with added ones.

    Args:
        without: names of sections.
        added: folders of sections, which have their names.
    """
    package = target / "planc"
    shutil.copytree(ROOT / "planc", package)
    for shared in ("plans", "grammars", "docs"):
        if not (target / shared).exists():
            (target / shared).symlink_to(ROOT / shared)
    table = package / "sections" / "__init__.py"
    for name in without:
        shutil.rmtree(package / "sections" / name)
        table.write_text(table.read_text().replace(f'    "{name}",\n', ""))
    for folder in added:
        shutil.copytree(folder, package / "sections" / folder.name)
        line = f'NAMES = (\n    "{folder.name}",\n'
        table.write_text(table.read_text().replace("NAMES = (\n", line))


def run_program(target, *words, folder):
    """What a Python program prints that runs the copy of planc in `target`."""
    folders = [str(target / Path(folder).relative_to(ROOT)) for folder in FOLDERS]
    path = os.pathsep.join([str(target), *(folders if Path(folders[0]).is_dir() else FOLDERS)])
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
