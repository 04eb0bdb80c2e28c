"""The folders of the tests, whose modules tests and programs import by their bare names.

`tests/conftest.py` adds them to `sys.path`. So does each program that is started alone.
"""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
NESTED = ("sections", "tools")
"""Folders that contain one folder for each section of the language, or for each tool."""
FOLDERS = sorted(
    str(folder)
    for pattern in ("*/", *(f"{name}/*/" for name in NESTED))
    for folder in TESTS.glob(pattern)
    if any(folder.glob("*.py"))
)
