"""The truth of `make mutants` tells right plans from wrong ones, and a crash ends nothing else."""

import pytest
from helpers import flat
from numerics import MODELS
from truth import Job, Truth

from planc import compiler
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load_values
from planc.ops.document import dumps

pytestmark = pytest.mark.slow

SETTINGS = ["tp=2", "param_dtype=fp32"]
RIGHT = "precision(param = param_dtype, reduce = reduce_dtype)"


def lowered(text, folder):
    """The plan for a small llama, whatever the checks find."""
    path, sink = folder / "own.plan", Sink()
    path.write_text(text)
    facts = load_values(dict(MODELS["llama"]), "llama", Sink())
    files = compiler.read(str(path), sink)
    done = compiler.compile(files, facts, sink, world_size=4, settings=SETTINGS, checks=Sink())
    return dumps(done.lowered)


@pytest.fixture(scope="module")
def truth():
    with Truth() as one:
        yield one


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("", "", "right"),
        ("mlp.{gate,up}_proj : colwise\n", "", "crash"),
        (RIGHT, f"{RIGHT}\n    divide = 1", "right"),
        ("reduce = reduce_dtype", "reduce = bf16", "right"),
        ("group($embedding) : unit\n", "ignore $embedding\n", "wrong"),
        ("tensor on", "train {\n    $embedding : frozen\n}\n\ntensor on", "right"),
    ],
)
def test_llama(truth, tmp_path, old, new, verdict):
    text = flat("llama")
    assert old in text
    mutant = text.replace(old, new, 1) if old else text
    truth.ask(Job(1, dict(MODELS["llama"]), lowered(mutant, tmp_path)))
    ((number, found, detail),) = truth.answers()
    assert (number, found) == (1, verdict), detail
