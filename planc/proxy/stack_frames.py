"""Tells the files of a model's own code from other files of a stack. It looks at their folders, not
at a name in the path: a checkout, or the environment in it, may be called after a library too.
"""

import re
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_PLANC = Path(__file__).resolve().parents[1]
_PYTHON = Path(sysconfig.get_path("stdlib"))
_RUNS_MODELS = re.compile(r"/transformers/(utils/|modeling_layers|integrations|activations)")
_PACKAGES = re.compile(r"/(site|dist)-packages/")


@cache
def of_a_model(path: str) -> bool:
    """Whether the lines of a source file can be a model's own: it is not of torch, planc or Python,
    nor what of transformers runs all models.
    """
    python = Path(path).is_relative_to(_PYTHON) and not _PACKAGES.search(path)
    runs = _RUNS_MODELS.search(path.replace("\\", "/"))
    return not (python or runs or path.startswith("<frozen") or of_torch_or_planc(path))


@cache
def of_torch_or_planc(path: str) -> bool:
    """Whether a source file is of torch or of planc."""
    return Path(path).is_relative_to(_PLANC) or any(map(Path(path).is_relative_to, _torch()))


@cache
def _torch() -> tuple[Path, ...]:
    """The folder of torch; none where it is not installed."""
    spec = find_spec("torch")
    return tuple(map(Path, spec.submodule_search_locations or ())) if spec else ()
