"""The command `planc`: which module runs a command, and what ends the process."""

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from planc.files.version import VERSION

COMMANDS = {
    "init": "write a first plan for a model, and prove it",
    "import": "write a plan from the configuration of another library",
    "audit": "judge the parallel plans that transformers ships",
    "check": "report what is wrong with a plan for a model",
    "lower": "print the lowered plan: the torch calls that a plan means",
    "estimate": "estimate memory and time of a training step",
    "measure": "count what one rank holds in a step, by running it",
    "suggest": "search the fastest plan that fits, and write it",
    "calibrate": "fit a hardware profile to measured steps",
    "diff": "compare two lowered plans",
    "why": "show which lines decide a module or a parameter",
    "show": "draw a plan as a page: its mesh, modules, memory and lines",
    "transfer": "say which slices of a training plan fill those of a serving engine",
    "verify": "prove a plan on real processes, with a proxy model",
    "launch": "write the file that starts a plan on a cluster",
    "preflight": "check the nodes of a job, before it trains",
    "hang": "say which ranks of a run that hangs wait where, and for whom",
    "fmt": "rewrite plans in the canonical layout, comments kept",
    "explain": "explain a diagnostic code",
    "lsp": "answer an editor, over standard input and output",
    "completion": "print a script that completes planc's words in a shell",
    "list": "list the plans and models that planc knows by name",
    "cache": "pack what is known of models and plans, for planc without torch",
}
"""Each is a module of `planc.commands` with `arguments(parser)` and `run(options)`."""
HAVE_NO_CPU_MODELS = {"fmt", "explain", "completion", "list", "preflight"}
"""Commands that run no model, or one on the job's devices."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 clean, 1 findings, 2 could not run."""
    gc.set_threshold(50_000, 20, 20)  # what is imported and parsed stays until the end
    # what the libraries warn of while a proxy model runs is not about the user's model
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        return _report_unknown_command(arguments[0])
    try:
        options = _options(arguments or ["--help"])
        if options.command not in HAVE_NO_CPU_MODELS:
            import_module("planc.model.fused_kernels").hide()
        code: int = import_module(f"planc.commands.{options.command}").run(options)
        if not sys.stdout.closed:  # the language server's ends with the editor's
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `planc lower ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("PLANC_TRACEBACK"):
            raise
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("planc"):
            return _missing(arguments[0], error.name or str(error))
        return _refusal(error) or _internal(error)


def command() -> None:
    """Entry point of the script `planc`: runs a command and exits with its code."""
    try:
        sys.exit(main())
    finally:
        gc.freeze()  # else Python, as it ends, searches all that is left for cycles, several times


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments of a command, with only the parser of that command, to save time."""
    name, *words = arguments
    if name not in COMMANDS:
        return _parser().parse_args(arguments)
    script: list[str] = []
    if name == "launch" and "--" in words:  # what follows is another program's
        at = words.index("--")
        words, script = words[:at], words[at + 1 :]
    options: argparse.Namespace
    parser = _single_command(name)
    options, unknown = parser.parse_known_args(words)
    if unknown and not any(map(_option, words[:1] + unknown)):
        # argparse consumes positionals greedily: words after options are parsed again
        rest = [word for at, word in enumerate(words) if word not in unknown or at == 0]
        at = next((i for i, word in enumerate(rest) if _option(word)), len(rest))
        parser = _single_command(name)
        options, unknown = parser.parse_known_args([*rest[:at], *unknown, *rest[at:]])
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.command, options.commands = name, COMMANDS
    if script:
        options.script = script
    return options


def _single_command(name: str) -> "_Command":
    return _Command(
        prog=f"planc {name}",
        description=_sentence(COMMANDS[name]),
        formatter_class=partial(argparse.HelpFormatter, width=80),  # which need not find it out
    )


def _option(word: str) -> bool:
    return word.startswith("-") and word != "-"


def _sentence(help: str) -> str:
    return f"{help[0].upper()}{help[1:]}."


def _report_unknown_command(word: str) -> int:
    from planc.diagnostics.diagnostic import did_you_mean

    advice = did_you_mean(word, COMMANDS, "`planc --help` lists the commands")
    print(f"planc: error: there is no command `{word}`; {advice}", file=sys.stderr)
    return 2


def _missing(command: str, module: str) -> int:
    from planc.commands import output
    from planc.model.cache import INSTALL, needs

    message = needs(f"planc {command}", module.partition(".")[0])
    return output.show_error("PL760", message, INSTALL)


def _refusal(error: Exception) -> int:
    """Shows the findings that ended a command; 0 for an error of another kind."""
    from planc.commands import output
    from planc.diagnostics.diagnostic import PlanError, Sink

    if not isinstance(error, PlanError):
        return 0
    sink = Sink()
    sink.add(*error.diagnostics)
    output.show(sink, "full", sys.stderr)
    return output.exit_code(sink)


def _internal(error: Exception) -> int:
    from planc.commands import output

    hint = "this is a bug in planc; run again with PLANC_TRACEBACK=1 and report it"
    return output.show_error("PL900", f"planc itself failed: {type(error).__name__}: {error}", hint)


class _Command(argparse.ArgumentParser):
    """The parser of one command, which imports the command when its arguments are parsed."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        from planc.commands import help_text

        help_text.fill(self, self.prog.split()[-1])
        result, unknown = super().parse_known_args(args, namespace)
        if option := next((word for word in unknown if word.startswith("--")), None):
            from planc.diagnostics.diagnostic import did_you_mean

            known = [name for name in self._option_string_actions if name.startswith("--")]
            advice = did_you_mean(option.partition("=")[0], known, f"see `{self.prog} --help`")
            self.error(f"there is no option `{option}`; {advice}")
        return result, unknown


def _parser() -> argparse.ArgumentParser:
    """Its `command` is the name of the command."""
    result = argparse.ArgumentParser(
        prog="planc",
        description="A compiler for parallel training plans.",
        epilog="`planc COMMAND --help` has examples, and says where to read on.",
    )
    result.set_defaults(commands=COMMANDS)
    result.add_argument("--version", action="version", version=f"planc {VERSION}")
    commands = result.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND", parser_class=_Command
    )
    for name, help in COMMANDS.items():
        commands.add_parser(name, help=help, description=_sentence(help))
    return result


if __name__ == "__main__":
    command()
