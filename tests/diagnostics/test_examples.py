"""The example of every page of the diagnostics gives the code of its page, when it is run."""

import re
import shlex
import textwrap

import pytest
from console import call

from planc.diagnostics import explain
from planc.diagnostics.codes import CODES, PRESUMED

MODELS = {
    "llama": "llama-3.1-8b",
    "qwen2": "qwen2.5-0.5b",
    "qwen3": "qwen3-8b",
    "phi3": "phi-4",
    "gpt2": "gpt2",
    "mixtral": "mixtral-8x7b",
    "bloom": "bloom-7b1",
    "mamba2": "mamba-codestral-7b",
    "gemma4_text": "gemma-4-e4b",
    "WanTransformer3DModel": "wan2.1-t2v-1.3b",
    "ernie4_5_moe": "ernie-4.5-21b-a3b",
    "FluxTransformer2DModel": "flux.1-dev",
}
EXAMPLE = re.compile(r"## Example\n\n(.+?)\n\n## ", re.S)
UNREACHED = {
    "PL740": "a plan in an editor; test_lsp.py opens one",
    "PL741": "a plan in an editor; test_lsp.py opens one",
    "PL742": "pygls is a part of the tests; test_lsp.py hides it",
    "PL744": "libraries of other versions; tests/compat/test_tested_versions.py names some",
    "PL743": "a library of another version; tests/compat/test_names.py takes a name away",
    "PL189": "a run on processes; test_lora.py has it",
    "PL187": "peft is a part of the tests; test_adapters.py hides it",
    "PL627": "test_matmul.py runs without torchao",
    "PL628": "test_matmul.py stands in for an older GPU",
    "PL629": "test_matmul.py seeds wrong scales",
    "PL685": "test_adapters.py hides bitsandbytes",
    "PL686": "a run on processes; test_quantization.py has it",
    "PL688": "a run on processes; test_lora.py has it",
    "PL687": "a run on processes; test_quantization.py has it",
    "PL675": "diffusers is a part of the tests; test_diffusion.py hides it",
    "PL415": "no shipped model mixes dtypes; test_checks.py has one that does",
    "PL457": "a run on processes; test_loading.py has it",
    "PL691": "a configuration that says otherwise; tests/specs/load.md has one",
    "PL459": "a run on processes; test_saving.py has it",
    "PL460": "processes of srun; test_launchers.py sets their variables",
    "PL643": "a job; test_preflight.py runs some",
    "PL644": "a job; test_preflight.py runs some",
    "PL645": "a job; test_preflight.py runs some",
    "PL646": "a job; test_preflight.py runs some",
    "PL613": "needs a style of one's own; tests/specs/order.md has one",
    "PL614": "needs ranks that wait; test_order.py has some",
    "PL615": "needs a style of one's own; tests/specs/order.md has one",
    "PL618": "needs files of a run; test_hang.py has some",
    "PL461": "a run on processes; test_loading.py has it",
    "PL469": "batches at run time; test_pipeline.py has them",
    "PL619": "a call of run.accumulation; test_accumulation.py makes some",
    "PL474": "the model that apply was given; test_standalone_loading.py gives one",
    "PL475": "a call of run.load; test_standalone_loading.py makes one",
    "PL650": "the model of the plan's header is taken; test_elaborate.py gives another",
    "PL508": "needs a model of one's own; test_flow.py makes one",
    "PL534": "needs a model of one's own; test_real_size.py makes one",
    "PL524": "needs a model of one's own; test_infer_layouts.py has models that do not run",
    "PL172": "only apply imports; test_python_styles.py does",
    "PL476": "inputs at run time; test_apply.py has them",
    "PL462": "a pass of a run; test_undone.py makes some",
    "PL463": "a call of torch's; test_undone.py makes it",
    "PL464": "an optimizer at run time; test_undone.py has it",
    "PL465": "an optimizer at run time; test_undone.py has it",
    "PL467": "a run on processes; test_saving.py has it",
    "PL468": "a run on processes; test_loading.py has it",
    "PL422": "a loss at run time; test_counted_labels.py has some",
    "PL423": "an optimizer at run time; test_undone.py has some",
    "PL424": "batches at run time; test_uneven_lengths.py has some",
    "PL425": "a change after apply; test_undone.py makes some",
    "PL426": "a call of autograd; test_undone.py makes some",
    "PL427": "a step of a pipeline; test_undone.py runs one",
    "PL437": "a call of a model's method; test_undone.py makes some",
    "PL454": "a call of a model's method; test_undone.py makes some",
    "PL455": "a hook on a parameter; test_undone.py has one",
    "PL591": "only apply imports; test_optimizer_classes.py does",
    "PL592": "a step of a run; test_optimizer_classes.py makes one",
    "PL580": "a call of run.optimizer; test_optimizer.py makes one",
    "PL477": "a call of save_pretrained; test_apply_on_meta.py makes one",
    "PL509": "a fault of planc or of a style; test_trial.py seeds one",
    "PL479": "a run on ranks; test_first_passes.py has one",
    "PL478": "a run on processes; test_safeguards.py has it",
    "PL510": "needs a configuration beside the plan; test_trial.py has one",
    "PL512": "needs a model of one's own; test_rows.py makes one",
    "PL385": "needs a model of one's own; test_rows.py makes one",
    "PL513": "needs a model of one's own; test_rows.py makes one",
    "PL515": "a step of a run; test_counted_labels.py makes some",
    "PL516": "needs a model of one's own; test_uneven_lengths.py has one",
    "PL517": "a model that leaks, or a batch; test_leaks.py has some",
    "PL519": "a batch, or a layer of another function; test_document_resets.py has them",
    "PL518": "a model that leaks, or a batch; test_leaks.py has some",
    "PL558": "a model that planc cannot run; test_leaks.py has one",
    "PL553": "an estimate; test_low_precision.py has one",
    "PL557": "a script; test_loss.py has some",
    "PL720": "a model of 405 billion parameters; tests/specs/estimate.md has one",
    "PL721": "an estimate with offloading; tests/specs/estimate.md has one",
    "PL703": "needs a model of one's own; test_estimates.py has one",
    "PL021": "settings in pyproject.toml; tests/specs/project.md has them",
    "PL612": "needs a model that takes no images; test_inputs.py has one",
    "PL611": "several plans in a folder; test_library.py makes two",
    "PL022": "a model of a family without a plan; tests/specs/project.md has one",
    "PL544": "a batch at run time; test_context_parallel.py has one",
    "PL545": "batches at run time; test_one_loop.py has them",
    "PL565": "needs a configuration; test_pipeline.py writes one",
    "PL566": "needs a model of one's own; test_pipeline.py makes one",
    "PL568": "needs a schedule file next to the plan; test_schedule_files.py writes some",
    "PL697": "a run on processes; test_transfer.py has some",
    "PL698": "a run on processes; test_transfer.py has some",
    "PL694": "a model of other code; test_serve.py has one",
    "PL710": "a model of a family without a plan; tests/specs/suggest.md has one",
    "PL718": "needs a file of measurements; tests/specs/calibrate.md has some",
    "PL705": "needs a lowered plan; tests/specs/estimate.md has one",
    "PL760": "torch is a part of the tests; test_pack.py hides it",
    "PL762": "needs a pack of another planc; test_pack.py makes one",
    "PL900": "a bug in planc; test_cli.py makes one",
}
"""Codes whose example can't be run here, and why. PL48x, PL49x and PL52x come on processes."""


@pytest.mark.parametrize(
    "code",
    [c for c in CODES if c not in UNREACHED and not c.startswith(("PL48", "PL49", "PL52"))],
)
def test_example(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if code == "PL676":
        pytest.importorskip("diffusers")
    text = EXAMPLE.search(explain.explain(code))[1]
    more = ["--level", "structure"] if code in PRESUMED else []  # a proof may overrule it
    assert code in findings(textwrap.dedent(text).strip() + "\n", tmp_path, more)


def findings(example, folder, more=()):
    """What planc prints of an example: a command, a config.json, or a plan for its family."""
    for name in re.findall(r"\w+\.json", example):
        (folder / name).write_text("{}")
    (folder / "checkpoints" / "run-7").mkdir(parents=True)
    lines = example.splitlines()
    commands = [line.removeprefix("$ ") for line in lines if "planc " in line and "->" not in line]
    commands = [c.partition(" > ")[0] for c in commands if c.startswith("planc ")]
    command = commands[-1] if commands else None
    command = command or next((line for line in lines if line.startswith("planc ")), None)
    if command:
        if lines[0].startswith("# "):  # a file that the command names
            file = folder / lines[0][2:]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(lines[1 : lines.index("")]) + "\n")
        words = shlex.split(command)[1:]
    elif example.startswith("{"):
        (folder / "config.json").write_text(example)
        words = ["check", ".", "llama"]
    else:
        (folder / "a.plan").write_text(example)
        header = re.search(r"plan \w+ for (\w+)", example)
        model = MODELS.get(header[1] if header else "", "llama-3.1-8b")
        words = ["check", model, "a.plan", "--world-size", "24"]
    return "".join(
        call(*words, *(["--format", "concise", *more] if words[0] == "check" else []))[1:]
    )
