"""Which files of a stack are not a model's own code. By their folders, not by a name in the path: a
checkout, or the environment in it, may be called after a library too.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

_PLANC = Path(__file__).resolve().parents[2]


@cache
def of_torch_or_planc(path: str) -> bool:
    """Whether a source file is of torch or of planc."""
    return Path(path).is_relative_to(_PLANC) or any(map(Path(path).is_relative_to, _torch()))


@cache
def _torch() -> tuple[Path, ...]:
    """The folder of torch; none where it is not installed."""
    spec = find_spec("torch")
    return tuple(map(Path, spec.submodule_search_locations or ())) if spec else ()
