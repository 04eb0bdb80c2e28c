"""The cache of model facts: what it gives, what it never believes, and what a warm load costs."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from modelfolder import CONFIG, found, written

from planc.files.resources import cache_folder
from planc.model import cache

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def folder(home):
    """A model whose facts are in the cache."""
    folder = written(home / "model")
    assert found(folder)[0] is not None
    return folder


def entry():
    (path,) = cache_folder().glob("*.json")
    return path


@pytest.fixture
def builds(monkeypatch):
    """How often a model was built."""
    from planc.model.sources import huggingface

    made = []
    real = huggingface.from_config
    monkeypatch.setattr(huggingface, "from_config", lambda *a: made.append(1) or real(*a))
    return made


def test_the_cache_gives_what_was_built(folder, builds):
    warm, _ = found(folder)
    assert builds == []
    fresh, _ = found(folder, cache=False)
    assert builds == [1]
    assert warm == fresh
    assert warm.config == fresh.config


@pytest.mark.parametrize("name", ["gemma-3-1b", "gpt2"])
def test_shipped_models_survive_the_cache(name):
    fresh, _ = found(name)
    assert found(name)[0] == fresh


def flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one bit": flip,
    "garbage": lambda data: bytes(range(256)) * 9,
    "another object": lambda data: b'{"name": "LlamaForCausalLM"}',
    "no body": lambda data: data.partition(b"\n")[0],
    "longer": lambda data: data + b" ",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_built_anew(folder, builds, damage):
    path = entry()
    good = path.read_bytes()
    path.write_bytes(damage(good))
    facts, said = found(folder)
    assert (facts.count, said, builds) == (found(folder, cache=False)[0].count, [], [1, 1])
    assert path.read_bytes() == good


def test_an_entry_of_another_key_is_not_believed(folder, builds):
    """A sound file under the wrong name: copied by hand, say."""
    good = entry().read_bytes()
    other = written(folder.parent / "other", num_hidden_layers=5)
    key = cache.key_of(json.loads((other / "config.json").read_text()))
    (cache_folder() / f"{key}.json").write_bytes(good)
    facts, _ = found(other)
    assert builds == [1]
    assert facts.config["num_hidden_layers"] == 5


@pytest.mark.parametrize("what", ["_FORMAT", "torch", "transformers"])
def test_an_entry_of_another_version_is_stale(folder, builds, monkeypatch, what):
    if what == "_FORMAT":
        monkeypatch.setattr(cache, "_FORMAT", -1)
    else:
        real = cache.version
        monkeypatch.setattr(cache, "version", lambda n: "0.0" if n == what else real(n))
    found(folder)
    assert builds == [1]


def test_the_versions_are_the_installed_ones():
    from importlib import metadata

    for name in ("torch", "transformers"):
        assert cache.version(name) == metadata.version(name)
    assert cache.version("no-such-package-of-planc") == "none"


@pytest.mark.parametrize("build", ["2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.13.0+rocm7.1"])
def test_a_build_of_torch_is_not_in_the_key(monkeypatch, build):
    monkeypatch.setattr(cache, "version", lambda _: build)
    assert cache.key_versions()["torch"] == "2.13.0"


def test_sources_of_torch_are(monkeypatch):
    monkeypatch.setattr(cache, "version", lambda _: "2.13.0a0+git1b2c3d4")
    assert cache.key_versions()["torch"] == "2.13.0a0+git1b2c3d4"


def test_every_field_is_in_the_key(folder, builds):
    found(written(folder, rms_norm_eps=1e-5))
    assert builds == [1]
    folder.joinpath("config.json").write_text(json.dumps(dict(reversed(CONFIG.items()))))
    found(folder)
    assert builds == [1], "the order of the fields is not"


def test_a_cache_that_cannot_be_written(home, monkeypatch):
    (home / "file").write_text("")
    for place in (home / "file", home / "file" / "below", Path("/proc/planc")):
        monkeypatch.setenv("PLANC_CACHE_DIR", str(place))
        assert found(written(home / "model"))[1] == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_is_read_only(home):
    (home / "cache").mkdir(mode=0o500)
    assert found(written(home / "model"))[1] == []
    assert list((home / "cache").iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(home, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert found(written(home / "model"))[1] == []
    assert list((home / "cache").iterdir()) == []


def test_without_the_cache_nothing_is_written(home):
    found(written(home / "model"), cache=False)
    assert not (home / "cache").exists()


def test_where_the_cache_is(monkeypatch, home):
    assert cache_folder() == home / "cache"
    monkeypatch.delenv("PLANC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert cache_folder() == home / "xdg" / "planc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(home))
    assert cache_folder() == home / ".cache" / "planc"


WRITE = """
import sys
from planc.diagnostics.diagnostic import Sink
from planc.model import cache
from planc.model.load import load
facts = load(sys.argv[1], Sink())
key = cache.key_of(__import__("json").load(open(sys.argv[1])))
for _ in range(300):
    cache.write(key, facts)
    again = cache.read(key, config_name=facts.config_name, stated_fields=facts.stated_fields)
    assert again == facts, "half an entry was seen"
"""


def test_two_processes_write_at_once(home):
    path = written(home / "model") / "config.json"

    def run(_):
        return subprocess.run(
            [sys.executable, "-c", WRITE, str(path)], capture_output=True, text=True, check=False
        )

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(run, range(2)):
            assert done.returncode == 0, done.stderr
    assert [p.name for p in cache_folder().iterdir()] == [entry().name]


def imported(model):
    """The heavy modules that loading a model in a new process imports, and whether it collects."""
    code = (
        "import gc, json, sys\nfrom planc.diagnostics.diagnostic import Sink\n"
        "from planc.model.load import load\nsink = Sink()\n"
        "assert load(sys.argv[1], sink) and not list(sink)\n"
        "heavy = ('torch', 'transformers', 'jsonschema', 'huggingface_hub')\n"
        "print(json.dumps([[m for m in heavy if m in sys.modules], gc.isenabled()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_a_warm_load_imports_nothing_heavy(home):
    folder = written(home / "model")
    cold, collects = imported(folder)
    assert {"torch", "transformers", "jsonschema"} <= set(cold)
    assert collects, "garbage collection is on again"
    assert imported(folder) == [[], True]


def test_an_entry_does_not_grow_with_depth(home, monkeypatch):
    sizes = []
    for layers in (2, 1024):
        monkeypatch.setenv("PLANC_CACHE_DIR", str(home / f"{layers}"))
        found(written(home / "model", num_hidden_layers=layers))
        sizes.append(entry().stat().st_size)
    assert sizes[1] < sizes[0] + 400  # the indices, as one number
