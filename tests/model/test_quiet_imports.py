"""bitsandbytes says nothing on commands that have no use for it."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

HOOK = '''
import importlib.util, logging, sys

class Warns:
    """Warns as bitsandbytes does on a CPU that it has a faster kernel for."""

    def find_spec(self, name, path=None, target=None):
        if name == "bitsandbytes":
            print("imported")
            logging.getLogger("bitsandbytes.backends.cpu.ops").warning("it lacks a kernel")

sys.meta_path.insert(0, Warns())
'''
DIFFUSERS = """
from planc.diagnostics.diagnostic import Sink
from planc.model.config import config_of
from planc.model.sources.diffusers import class_of
assert class_of(config_of({"_class_name": "WanTransformer3DModel"}, "a"), Sink())
assert "torch._inductor.compile_fx" not in sys.modules  # for seconds, and nothing is compiled
import torch
assert torch.compile.__module__ == "torch"
"""
PEFT = """
from torch import nn
from planc.model.sources.isolation import quiet_imports
from planc.runtime.standalone.lora import inject_lora
with quiet_imports():
    inject_lora(nn.Sequential(nn.Linear(4, 4)), 0, target_modules="0", r=2)
logging.getLogger("bitsandbytes").warning("heard again")
"""


@pytest.mark.parametrize(("library", "code"), [("diffusers", DIFFUSERS), ("peft", PEFT)])
def test_an_import_by_another_library_is_quiet(library, code):
    if not (find_spec(library) and find_spec("bitsandbytes")):
        pytest.skip(f"{library} or bitsandbytes is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HOOK + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "imported" in done.stdout and "lacks a kernel" not in done.stderr
    assert ("heard again" in done.stderr) == (library == "peft")
