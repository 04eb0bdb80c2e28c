"""`--set-hardware`: fields of a hardware profile with other values."""

import pytest

from planc.cli import main
from planc.diagnostics.diagnostic import Sink
from planc.tools.estimate import profiles


def test_a_field_of_the_hardware_with_another_value():
    sink = Sink()
    found = profiles.hardware("h100-8x", sink, ("network_latency_us=10", "ranks_per_node=4"))
    assert not sink.diagnostics
    assert (found.network_latency_us, found.ranks_per_node) == (10, 4)
    assert found.name == "h100-8x with network_latency_us=10, ranks_per_node=4"


@pytest.mark.parametrize(
    "change", ["latency=10", "network_gb_s=fast", "network_gb_s", "memory_gib=0"]
)
def test_fields_that_a_profile_cannot_have(change):
    sink = Sink()
    assert profiles.hardware("h100-8x", sink, (change,)) is None
    assert [d.code for d in sink.diagnostics] == ["PL701"]


def test_a_misspelled_field_is_answered_with_the_field():
    sink = Sink()
    assert profiles.hardware("h100-8x", sink, ("network_latency=10",)) is None
    [finding] = sink.diagnostics
    assert finding.message == "network_latency is not a field of a hardware profile"
    assert "`network_latency_us`" in finding.help


def test_the_option(capsys):
    asked = ["estimate", "llama-3.1-8b", "llama", "--world-size", "64", "--batch", "64"]
    asked += ["--seq", "512", "--set-hardware"]
    lines = []
    for change in ("network_gb_s=280", "network_gb_s=28"):
        main([*asked, change])
        lines.append(capsys.readouterr().out)
    assert "h100-8x with network_gb_s=28, torch" in lines[1]
    slow, slower = (text.partition("time of a step: ")[2].partition(" s")[0] for text in lines)
    assert float(slower) > float(slow)
