"""`planc audit`: plans of transformers that are known to be right or wrong, and their patches."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import transformers
from console import call
from folders import ROOT

from planc.compat.transformers_distributed import ALL_PARALLEL_STYLES
from planc.diagnostics.diagnostic import Sink
from planc.model.sources.default_configs import types_with_plans
from planc.simulate.outcome import LIMIT
from planc.tools.audit.apply import StepErrors
from planc.tools.audit.audit import audit
from planc.tools.audit.repair import find_repair
from planc.tools.audit.styles import STYLES, code_place

FOLDER = Path(transformers.__file__).parent
FOLDER_OF_PAGES = ROOT / "docs" / "generated"


def judged(name, kind="tp_plan", repaired=("tp_plan",)):
    sink = Sink()
    [verdict] = audit([name], sink, [kind], repaired=repaired)
    return verdict, list(sink)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "tp_plan"), ("llama", "fsdp_plan"), ("llama", "pp_plan"), ("qwen3_moe", "ep_plan")],
)
def test_right_plans_are_proved(name, kind):
    verdict, findings = judged(name, kind)
    assert verdict.verdict == "proved" and not findings, verdict.reason


@pytest.mark.parametrize(
    ("name", "tensor", "least"),
    [
        ("apertus", "mlp.act_fn.alpha", 1.0),
        pytest.param("hrm_text", "the logits", 0.05, marks=pytest.mark.slow),
        pytest.param("inkling2_text", "gate_up_proj", 0.5, marks=pytest.mark.slow),
        pytest.param("gemma3n_text", "the logits", 0.3, marks=pytest.mark.slow),
    ],
)
def test_silently_wrong_plans_are_refuted_at_a_rule(name, tensor, least):
    """As `tests/coverage/theirs.py` measures them on two gloo processes."""
    verdict, [finding] = judged(name)
    assert verdict.verdict == "wrong" and tensor in verdict.tensor and verdict.error > least
    assert finding.code == "PL764" and tensor.rpartition(".")[2] in finding.message
    assert verdict.rule and finding.labels[0].span.source.name.startswith("transformers/models/")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("doge", "must match the size", marks=pytest.mark.slow),
        ("lfm2", "mixed torch.Tensor and DTensor"),
    ],
)
def test_plans_that_crash_are_refuted(name, reason):
    """lfm2 ties its head on all ranks: threads that construct models at once would disturb it."""
    for _ in range(3):
        verdict, [finding] = judged(name, repaired=())
        assert verdict.verdict == "crash" and reason in verdict.reason and finding.code == "PL765"


@pytest.mark.parametrize("dropped", ["down_proj", "gate_up_proj"])
def test_a_broken_expert_plan_is_refuted(dropped):
    """The judge of right plans runs them: without one of its rules a plan is wrong, or crashes."""
    from planc.tools.audit.audit import _audited_model

    made = _audited_model("qwen3_moe", Sink())
    rules = made.plan("ep_plan")
    assert made.run("ep_plan", rules).verdict == "proved"
    broken = {name: style for name, style in rules.items() if not name.endswith(dropped)}
    assert len(broken) < len(rules)
    assert made.run("ep_plan", broken).verdict in ("wrong", "crash")


def test_the_patch_makes_the_plan_right(tmp_path):
    """`git apply` changes the configuration and its modular file; the plan is then proved."""
    code, _, _ = call(
        "audit", "transformers", "apertus", "--plan", "tp_plan", "--patch", tmp_path / "p"
    )
    assert code == 1
    models = tmp_path / "src" / "transformers" / "models"
    shutil.copytree(FOLDER / "models" / "apertus", models / "apertus")
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "apply", str(tmp_path / "p")], check=True)
    for name in ("configuration_apertus.py", "modular_apertus.py"):
        text = (models / "apertus" / name).read_text()
        assert '"layers.*.mlp.act_fn": "replicated_with_grad_allreduce",' in text
        assert (
            text.count("\n") == (FOLDER / "models" / "apertus" / name).read_text().count("\n") + 1
        )


def test_the_formats(tmp_path):
    code, text, _ = call(
        "audit", "transformers", "apertus", "--plan", "tp_plan", "--format", "json"
    )
    found = json.loads(text)
    [verdict] = found["audits"]
    assert code == 1 and verdict["verdict"] == "wrong" and verdict["patch"].startswith("--- a/src/")
    assert found["diagnostics"][0]["code"] == "PL764"


def test_a_type_without_a_language_model_is_not_judged():
    sink = Sink()
    assert not list(audit(["clip"], sink)) and [d.code for d in sink] == ["PL766"]


@pytest.mark.parametrize(
    ("name", "help"), [("lama", "did you mean `llama`"), ("#", "name another type")]
)
def test_a_misspelled_type_is_an_error(name, help):
    code, text, _ = call("audit", "transformers", name, "--format", "json")
    [finding] = json.loads(text)["diagnostics"]
    assert code == 2 and finding["code"] == "PL600"
    assert finding["message"] == f"transformers has no model type '{name}'"
    assert finding["help"].startswith(help)


def test_styles_have_a_meaning_and_a_place():
    """Each style that transformers registers, at the line of its class."""
    assert set(ALL_PARALLEL_STYLES.keys()) <= STYLES.keys()
    for style in ALL_PARALLEL_STYLES:
        path, _, line = code_place(style).partition(":")
        assert (FOLDER / path).read_text().splitlines()[int(line) - 1].startswith("class ")
    assert {other for meaning in STYLES.values() for other in meaning.others} <= STYLES.keys()
    assert len(types_with_plans()) > 100


def test_the_page_has_all_verdicts():
    """Counts, a line for each plan that is not proved, and the page of the last run."""
    import audit_page

    common = {"type": "llama", "kind": "tp_plan", "tensor": "the logits", "reason": "E: a | b"}
    verdicts = ("proved", "proved", "wrong", "crash")
    text = audit_page.page([{**common, "verdict": v, "error": 0.5} for v in verdicts])
    assert "| `tp_plan` | 2 | 1 | 1 |" in text
    assert "| llama | `tp_plan` | wrong | the logits, off by 0.5 |" in text
    assert "| crash | E: a \\| b |" in text
    made = (FOLDER_OF_PAGES / "audit.md").read_text()
    assert made.partition("version")[0] == text.partition("version")[0]
    assert "| apertus | `tp_plan` | wrong |" in made


RULES = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
WRONG = StepErrors(verdict="wrong", logits=1.0)


@pytest.mark.parametrize(
    ("right", "removed", "changed", "added"),
    [
        (lambda r: r.get("model.layers.*.mlp.gate_up_proj", "packed_colwise") != "colwise", (),
         {"model.layers.*.mlp.gate_up_proj": "packed_colwise"}, {}),
        (lambda r: "model.layers.*.self_attn.q_proj" not in r,
         ("model.layers.*.self_attn.q_proj",), {}, {}),
        (lambda r: not any("mlp" in name for name in r), 
         ("model.layers.*.mlp.gate_up_proj", "model.layers.*.mlp.down_proj"), {}, {}),
    ],
)  # fmt: skip
def test_the_fewest_changes(right, removed, changed, added):
    def run(rules):
        return StepErrors(verdict="proved") if right(rules) else WRONG

    repair = find_repair(run, RULES, WRONG)
    assert (repair.removed, repair.changed, repair.added) == (removed, changed, added)
    assert find_repair(lambda _: WRONG, RULES, WRONG) is None


def test_a_gradient_that_is_a_sum_is_added():
    name, module = "model.layers.0.mlp.act.alpha", "model.layers.*.mlp.act"
    found = StepErrors(verdict="wrong", gradients={name: 4.3})

    def run(rules):
        return StepErrors(verdict="proved") if module in rules else found

    assert find_repair(run, RULES, found).added == {module: "replicated_with_grad_allreduce"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "apertus", "hrm_text", "qwen3_moe", "lfm2"])
def test_verdicts_are_those_of_processes(name, tmp_path):
    """Their own code on two gloo processes, loaded by `from_pretrained`, finds the same errors."""
    import theirs
    from pool import Pool

    pool = Pool(2)
    try:
        row = theirs.row(name, pool)
    finally:
        pool.close()
    verdict, _ = judged(name, repaired=())
    words = {"right": "proved", "wrong": "wrong", "crash": "crash"}
    assert words[row["verdict"]] == verdict.verdict
    if verdict.verdict == "wrong":
        measured = max(row["logits"], row["gradient"]) if verdict.error > LIMIT else 0
        assert verdict.error == pytest.approx(measured, rel=0.05)
