"""`planc completion SHELL`: a script that completes commands, options, and names of plans."""

import argparse
from collections.abc import Iterator, Sequence
from shlex import quote

from planc.commands import help_text, output
from planc.diagnostics.codes import CODES
from planc.model.config import shipped_models
from planc.syntax.plan_files import shipped_plans

_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_BASH = """\
# planc, by `planc completion {shell}`
_planc() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words=
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}} $current" in
{cases}
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _planc planc"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to print for")


def run(options: argparse.Namespace) -> int:
    actions: dict[str, Sequence[argparse.Action]] = {}
    for name in options.commands:
        parser = argparse.ArgumentParser()
        help_text.fill(parser, name)
        actions[name] = parser._actions
    if options.shell == "fish":
        print("\n".join(_fish(actions, options.commands)))
        return output.CLEAN
    cases, commands = "\n".join(_cases(actions)), " ".join(actions)
    script = _BASH.format(shell=options.shell, cases=cases, commands=commands)
    print(_ZSH * (options.shell == "zsh") + script)
    return output.CLEAN


def _words(action: argparse.Action) -> str:
    """The words that an argument can be; names of files are the shell's business."""
    plans, models = shipped_plans(), shipped_models()
    known = {"model": models, "plan": plans, "old": plans, "new": plans, "code": tuple(CODES)}
    name = action.dest.removeprefix("old_").removeprefix("new_")
    return " ".join(map(str, action.choices or known.get(name, ())))


def _cases(actions: dict[str, Sequence[argparse.Action]]) -> Iterator[str]:
    """The words after each option, after a `-`, and elsewhere."""
    for name, of_command in actions.items():
        for flag, action in ((flag, a) for a in of_command for flag in a.option_strings):
            if action.nargs != 0:
                yield f'    "{name} {flag} "*) words="{_words(action)}" ;;'
        flags = " ".join(flag for a in of_command for flag in a.option_strings)
        yield f'    "{name} "*" -"*) words="{flags}" ;;'
        places = " ".join(_words(a) for a in of_command if not a.option_strings)
        yield f'    "{name} "*) words="{places}" ;;'


def _fish(actions: dict[str, Sequence[argparse.Action]], about: dict[str, str]) -> Iterator[str]:
    for name, of_command in actions.items():
        yield f"complete -c planc -n __fish_use_subcommand -f -a {name} -d {quote(about[name])}"
        for action in of_command:
            flags = [
                f"-{'l' if len(f) > 2 else 's'} {f.lstrip('-')}" for f in action.option_strings
            ]
            if flags and action.nargs != 0:  # no files where the words are all there are
                flags += ["-x" if action.choices else "-r"]
            flags += [f"-a {quote(_words(action))}"] if _words(action) else []
            text = quote((action.help or "").partition("%")[0])
            at = f"-n '__fish_seen_subcommand_from {name}'"
            if flags:
                yield " ".join(("complete -c planc", at, *flags, "-d", text))
