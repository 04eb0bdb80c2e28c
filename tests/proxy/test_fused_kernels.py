"""Small models run where kernels of other packages are installed, which run on GPUs alone."""

import os
import subprocess
import sys

import pytest

LIBRARY = '''
class Kernel:
    """Any function of a package, at any path, which needs a GPU."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs):
        raise RuntimeError("0 active drivers ([]). There should only be one.")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Kernel()
'''


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with packages of the names that transformers looks for."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("fla", "causal_conv1d", "mamba_ssm"):
        (folder / f"{name}.py").write_text(LIBRARY)
    return folder


def run(installed, folder, *words):
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PLANC_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
        cwd=folder,
    )


def test_the_packages_would_be_called(installed, tmp_path):
    """Without this the tests below would show nothing."""
    text = """
from transformers import AutoConfig, AutoModelForCausalLM
import torch
config = AutoConfig.for_model("qwen3_next", hidden_size=32, num_hidden_layers=2, vocab_size=32,
    num_attention_heads=2, num_key_value_heads=2, num_experts=2, num_experts_per_tok=1,
    linear_num_value_heads=2, linear_num_key_heads=2,
    layer_types=["linear_attention", "full_attention"])
AutoModelForCausalLM.from_config(config)(torch.ones(1, 8, dtype=torch.long))
"""
    assert "0 active drivers" in run(installed, tmp_path, "-c", text).stderr


def test_check_proves_the_plan(installed, tmp_path):
    words = "check qwen3-next-80b-a3b qwen3_next --world-size 8 --set cp=2"
    done = run(installed, tmp_path, "-m", "planc.cli", *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layout flow (proved" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-next-80b-a3b qwen3_next", "nemotron-h-8b nemotron_h"])
def test_verify_and_measure_run_it(installed, tmp_path, family):
    verify = f"verify {family} --world-size 2 --processes 2 --set cp=2"
    done = run(installed, tmp_path, "-m", "planc.cli", *verify.split())
    assert "Verified on 2 processes" in done.stdout, done.stdout + done.stderr
    measure = f"measure {family} --world-size 8 --batch 8 --seq 512"
    done = run(installed, tmp_path, "-m", "planc.cli", *measure.split())
    assert "memory of a rank" in done.stdout, done.stdout + done.stderr
