"""The fork server forks its ranks, and starts new processes where the ranks use CUDA."""

import io
from types import SimpleNamespace

import pytest

from planc.simulate import fork_server, numerics, worker


@pytest.mark.parametrize(("device", "way"), [("cpu", "_fork"), ("cuda", "_spawn")])
def test_ranks_are_forked_unless_they_use_cuda(device, way, monkeypatch, tmp_path):
    started = []
    job = SimpleNamespace(ranks=2, folder=tmp_path, loads=lambda _text: job)
    for name in ("_fork", "_spawn"):

        def start(job, number, name=name):
            started.append((name, number))
            return 1000 + number

        monkeypatch.setattr(fork_server, name, start)
    for name in ("hide", "end_with_the_command"):
        monkeypatch.setattr(fork_server, name, lambda: None)
    for module, name in ((fork_server.gc, "disable"), (fork_server.gc, "freeze")):
        monkeypatch.setattr(module, name, lambda: None)
    monkeypatch.setattr(fork_server.signal, "signal", lambda *_: None)
    monkeypatch.setattr(fork_server, "Job", job)
    monkeypatch.setattr(fork_server, "_wait", lambda children, _folder: len(children))
    monkeypatch.setattr(worker, "prepare", lambda _job: None)
    monkeypatch.setattr(numerics, "device_for", lambda _ranks: device)
    monkeypatch.setattr(fork_server.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"{}\n")))
    assert fork_server.main() == 2
    assert started == [(way, 0), (way, 1)]
    assert (tmp_path / "job.json").is_file() == (device == "cuda")
