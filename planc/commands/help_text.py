"""The text of `planc COMMAND --help` beside the arguments: defaults, examples, where to read on."""

import argparse
from importlib import import_module

_RUN = "llama-3.1-8b llama --world-size 64 --set tp=8"
_STEP = "--batch 64 --seq 4096"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": ("init.md", "path/to/model -o my.plan"),
    "import": ("coming-from.md", "axolotl.yaml -o my.plan", "ds_config.json --model qwen3-8b"),
    "audit": ("audit.md", "transformers apertus --patch fix.patch", "transformers --format sarif"),
    "check": ("ci.md", _RUN, "qwen3-8b my.plan --world-size 8 --fix", "--format github"),
    "lower": ("language/README.md", _RUN, f"{_RUN} --format python -o parallelize.py", "--check"),
    "estimate": ("estimate.md", f"{_RUN} {_STEP} --hardware h100-8x"),
    "measure": ("estimate.md", f"{_RUN} {_STEP}", f"{_RUN} {_STEP} --exact"),
    "suggest": ("estimate.md", f"llama-3.1-8b --world-size 64 {_STEP} -o fast.plan"),
    "calibrate": ("estimate.md", "steps.csv -o own.toml", "--cpu -o cpu.toml"),
    "diff": ("ci.md", f"{_RUN} --old-set tp=4", "llama-3.1-8b HEAD:my.plan my.plan"),
    "why": ("looking.md", f"{_RUN} model.layers.0.mlp.up_proj.weight"),
    "transfer": (
        "how-to/serving.md",
        f"{_RUN} rollout.plan --set serve.tp=4",
        f"{_RUN} rollout.plan --format json",
    ),
    "verify": ("how-to/verify.md", f"{_RUN} --processes 4"),
    "launch": (
        "how-to/cluster.md",
        f"{_RUN} --to slurm -o job.sh -- train.py --steps 100",
        f"{_RUN} --to skypilot --gpus-per-node H100:8 -- train.py",
    ),
    "preflight": ("how-to/preflight.md", f"{_RUN} --weights path/to/weights --file train.py"),
    "hang": ("how-to/hang.md", f"planc-hang {_RUN}", f"path/to/dumps {_RUN} --format json"),
    "show": ("looking.md", f"{_RUN} -o plan.html", f"{_RUN} --svg -o plan.svg"),
    "fmt": ("language/formatting.md", "my.plan plans/", "--check ."),
    "explain": ("diagnostics/README.md", "pl501"),
    "list": ("library.md", "plans", "models"),
    "cache": ("ci.md", "pack planc-pack.json", "unpack planc-pack.json", "show"),
    "lsp": ("editor.md", ""),
    "completion": (
        "how-to/terminal.md",
        "bash > ~/.local/share/bash-completion/completions/planc",
    ),
}
"""The page about each command, and the arguments of one or more calls."""

EXITS = {
    "audit": "0 all plans are proved, 1 some are refuted",
    "diff": "0 no changes, 1 changes",
    "estimate": "0 the step fits, 1 it does not",
    "measure": "0 the step fits, 1 it does not",
    "fmt": "0 done, 1 a file would change (--check, --diff)",
    "hang": "0 no rank waits, 1 some wait or are not there",
    "import": "0 done, 1 the family is a guess, or a key that may change numbers is left",
    "lower": "0 done, 1 errors in the plan, or a file that would change (--check)",
    "preflight": "0 passed, 1 findings",
    "verify": "0 verified, 1 refuted",
}
"""The exit codes of commands for which 1 is not errors in the plan; all have 2 for no answer."""


_HELP = {
    "format": "the form of what is printed",
    "optimizer": "whose states are counted",
    "attention": "how attention is computed",
    "model": "a model, as for check",
    "world_size": "the number of ranks",
    "set": "a mesh axis or an option",
}
"""The help of arguments that say no more themselves."""


class _Format(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults that say something are shown, and lines of an epilog are kept."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        stated = action.default in (None, False, []) or "default" in (action.help or "")
        return action.help if stated else super()._get_help_string(action)


def fill(parser: argparse.ArgumentParser, command: str) -> None:
    """Gives a parser the arguments of a command, and its examples."""
    import_module(f"planc.commands.{command}").arguments(parser)
    for action in parser._actions:
        side, _, name = action.dest.partition("_")
        of_side = side in ("old", "new") and bool(name)
        text = _HELP.get(name if of_side else action.dest, "")
        action.help = action.help or text + (f", of the {side} side alone" if of_side else "")
    page, *calls = EXAMPLES[command]
    lines = "".join(f"  planc {command} {call}".rstrip() + "\n" for call in calls)
    parser.formatter_class = _Format
    exits = f"exit code: {EXITS.get(command, '0 done, 1 errors in the plan')}, 2 no answer"
    parser.epilog = f"examples:\n{lines}\n{exits}\nread on: docs/{page}"
