"""`planc preflight` compiles for the number of ranks of its own job."""

from argparse import Namespace

import pytest

from planc.commands import preflight
from planc.tools.launch import peers


@pytest.mark.parametrize(("given", "expected"), [((8, 16), 16), ((8, 32), 8), (None, None)])
def test_the_world_size_is_that_of_the_job_if_it_is_given(given, expected, monkeypatch, capsys):
    def refuse(*_):
        raise RuntimeError("no rank 0")

    job = {"RANK": "2", "WORLD_SIZE": "16", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(peers, "join", refuse)
    options = Namespace(world_size=given, timeout=1.0, format="text")
    assert preflight.run(options) == 1
    assert "PL644" in capsys.readouterr().err
    assert options.world_size == expected
