"""Transformers of diffusers train on four processes as on one: by verify, apply and script."""

import json

import diffused
import pytest
from helpers import sampled, slow

from planc.diagnostics.diagnostic import Sink
from planc.files.resources import PLANS
from planc.proof.verify import verify

pytestmark = [pytest.mark.slow, diffused.needed]
LIMIT = 1e-4
CASES = [
    ("wan2.1-t2v-1.3b", "wan"),
    ("wan2.1-i2v-14b", "wan"),
    ("flux.1-dev", "flux"),
    ("hunyuanvideo", "hunyuan_video"),
    ("sd3-medium", "sd3"),
]
WAYS = [
    ["tp=2", "recompute=true"],
    ["tp=2", "dp_replicate=2", "recompute=false"],
    ["tp=4", "recompute=true"],
]
PARTS = {  # of images, over the ranks of cp
    "data": ["cp=2"],
    "tensor": ["cp=2", "tp=2"],
    "alone": ["cp=4", "recompute=false"],
    "ulysses, data": ["cp=2", "attention=ulysses", "recompute=false"],
    "ulysses, alone": ["cp=4", "attention=ulysses"],
    "ulysses, tensor": ["cp=2", "tp=2", "attention=ulysses"],
    "ring, data": ["cp=2", "attention=ring"],
    "ring, tensor": ["cp=2", "tp=2", "attention=ring", "recompute=false"],
    "ring, alone": ["cp=4", "attention=ring", "recompute=false"],
}


@pytest.mark.parametrize("settings", WAYS, ids=" ".join)
@pytest.mark.parametrize(("model", "plan"), CASES)
def test_apply(four, model, plan, settings):
    overrides = [*settings, 'param_dtype="fp32"']
    for errors in four.run("diffusion_jobs.compare", name=model, plan=plan, overrides=overrides):
        assert {n: e for n, e in errors.items() if not e < LIMIT} == {}


@pytest.fixture
def exchanged(tmp_path):
    """The path of a shipped plan with a setting for what attention exchanges."""

    def written(plan):
        text = (PLANS / f"{plan}.plan").read_text()
        head, _, rest = text.partition("\n")
        section = "override context on cp {\n    attention = attention\n}"
        path = tmp_path / f"{plan}.plan"
        path.write_text(f'{head}\n\noption attention = "all_gather"\n{rest}\n{section}\n')
        return str(path)

    return written


SPLIT = [(model, plan, way) for way in PARTS for model, plan in CASES]


@pytest.mark.parametrize(("model", "plan", "way"), sampled(SPLIT, 7))
def test_images_are_split(four, exchanged, model, plan, way):
    arguments = {"name": model, "plan": exchanged(plan)}
    arguments["overrides"] = [*PARTS[way], 'param_dtype="fp32"']
    applied = four.run("diffusion_jobs.compare", **arguments)
    for errors in applied:
        assert {n: e for n, e in errors.items() if not e < LIMIT} == {}
    assert four.run("diffusion_jobs.compare", **arguments, script=True) == applied


@pytest.mark.parametrize(("model", "plan"), sampled(CASES[1:], 4))
def test_blocks_of_split_images_are_compiled(four, tmp_path, model, plan):
    text = (PLANS / f"{plan}.plan").read_text()
    path = tmp_path / "compiled.plan"
    path.write_text(f"{text}\ncompile {{\n    $blocks : block\n}}\n")
    overrides = ["cp=2", 'param_dtype="fp32"']
    arguments = {"name": model, "plan": str(path), "overrides": overrides}
    for errors in four.run("diffusion_jobs.compiled", **arguments):
        assert {n: e for n, e in errors.items() if not e < LIMIT} == {}


def test_ranks_with_parts_of_images_have_the_same_noise(four):
    arguments = {"name": "flux.1-dev", "plan": "flux", "overrides": ["cp=2"]}
    for found, loss in four.run("diffusion_jobs.noise", seed="data", **arguments):
        assert found == [] and loss > 0
    for found, _ in four.run("diffusion_jobs.noise", seed="rank", **arguments):
        ((code, message),) = found
        assert code == "PL483"
        assert "of cp split the same layers and images and read different inputs" in message
        assert message.endswith("`hidden_states` differs")


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_the_emitted_python_does_the_same(four, model, plan):
    overrides = ["tp=2", 'param_dtype="fp32"']
    arguments = {"name": model, "plan": plan, "overrides": overrides}
    applied = four.run("diffusion_jobs.compare", **arguments)
    assert four.run("diffusion_jobs.compare", **arguments, script=True) == applied


@pytest.mark.parametrize("settings", [["tp=2"], slow(["cp=2"])], ids=str)
@pytest.mark.parametrize(("model", "plan"), CASES)
def test_bfloat16_trains(four, model, plan, settings):
    """As the plan is shipped: gathered and computed in bf16, gradients summed in fp32."""
    for losses in four.run("diffusion_jobs.mixed", name=model, plan=plan, overrides=settings):
        assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("settings", [["tp=2"], slow(["cp=2"])], ids=str)
@pytest.mark.parametrize(("model", "plan"), CASES)
def test_verify(model, plan, settings):
    sink = Sink()
    proof = verify(model, plan, sink, world_size=8, settings=settings)
    assert proof.verdict == "verified", [d.message for d in sink]
    found = proof.certificate
    assert found["errors"]["logits"] < 1e-5 and found["errors"]["gradients"] < 1e-5
    assert found["versions"]["diffusers"]
    assert json.dumps(found)


BROKEN = [
    ("wan2.1-t2v-1.3b", "wan", "attn{1,2}                     :", "attn1 :"),
    ("wan2.1-t2v-1.3b", "wan", ": features", ": parameters(weight = shard(0))"),
    ("flux.1-dev", "flux", "parts = [width, 4 * width]", "parts = 5"),
    (
        "flux.1-dev",
        "flux",
        "    $double {\n",
        "    $double {\n        attn.norm_{q,k} : replicate\n",
    ),
]


@pytest.mark.parametrize(("model", "plan", "right", "wrong"), BROKEN)
def test_a_broken_plan_is_refuted(tmp_path, model, plan, right, wrong):
    text = (PLANS / f"{plan}.plan").read_text()
    assert right in text
    path = tmp_path / "broken.plan"
    path.write_text(text.replace(right, wrong))
    sink = Sink()
    proof = verify(model, str(path), sink, settings=["tp=2"])
    assert proof.verdict == "refuted"
    assert {d.code for d in sink} & {"PL520", "PL521"}


def test_a_split_that_goes_with_nothing_is_said_before_it_is_run(tmp_path):
    text = (PLANS / "wan.plan").read_text()
    line = next(line for line in text.splitlines(keepends=True) if "ffn.net[2] " in line)
    path = tmp_path / "broken.plan"
    path.write_text(text.replace(line, ""))
    proof = verify("wan2.1-t2v-1.3b", str(path), sink := Sink(), settings=["tp=2"])
    assert proof.verdict == "unknown" and [d.code for d in sink] == ["PL525"]
