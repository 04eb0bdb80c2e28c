"""vLLM's own loaders give what its page says: `PLANC_ENGINES=FOLDER`, as of `vllm_layers.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
FOLDER = os.environ.get("PLANC_ENGINES", "")


@pytest.mark.skipif(not FOLDER, reason="PLANC_ENGINES names no folder with vLLM's Python files")
def test_slices_are_those_of_the_loaders():
    """In a process of its own: it puts stand-ins in the place of vLLM's modules."""
    script = Path(__file__).with_name("vllm_layers.py")
    command = [sys.executable, "-W", "ignore", script, FOLDER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
