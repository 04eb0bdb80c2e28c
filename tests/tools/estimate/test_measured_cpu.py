"""`planc calibrate --cpu`: a profile that others can read, with numbers that a machine can have."""

import pytest

from planc.cli import main
from planc.diagnostics.diagnostic import Sink
from planc.tools.estimate.profiles import hardware


def test_a_measured_cpu(tmp_path, capsys):
    path = tmp_path / "cpu.toml"
    assert main(["calibrate", "--cpu", "-o", str(path)]) == 0
    sink = Sink()
    found = hardware(str(path), sink)
    assert found is not None and not sink.has_errors
    assert found.name == "cpu"
    assert set(found.sources) <= {*type(found).__dataclass_fields__}
    assert "measured" in capsys.readouterr().out
    assert 1e-4 < found.matmul_tflops == found.peak_tflops < 1000
    assert 0.01 < found.memory_gb_s < 10_000
    assert found.node_gb_s == found.network_gb_s < found.memory_gb_s
    assert 1 < found.node_latency_us < 1e6
    assert found.memory_gib > 0.5 and found.context_gib == 0


def test_a_file_or_this_machine(capsys):
    for given in ([], ["steps.csv", "--cpu"]):
        with pytest.raises(SystemExit):
            main(["calibrate", *given, "-o", "own.toml"])
    assert "--cpu" in capsys.readouterr().err
