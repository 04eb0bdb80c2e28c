"""`planc list`: the plans and models that can be named, and the settings of all families."""

import argparse
from collections.abc import Iterator

from planc.commands import output, terminal
from planc.elaborate.settings import SETTINGS
from planc.files.project import ProjectError, plan_folders
from planc.files.resources import PLANS
from planc.model.config import shipped_models
from planc.ops.phrases import literal
from planc.syntax.plan_files import families, plans_in, shown


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("plans", "models", "settings"), help="what to list")


def run(options: argparse.Namespace) -> int:
    if options.what == "models":
        print("\n".join(shipped_models()))
        return output.CLEAN
    try:
        rows = list(_settings() if options.what == "settings" else _plans())
    except ProjectError as error:
        return output.show_error("PL021", str(error))
    width = max((len(name) for name, _ in rows), default=0)
    lines = (f"{name:{width}}  {text}".rstrip() for name, text in rows)
    terminal.show("".join(f"{line}\n" for line in lines))
    return output.CLEAN


def _settings() -> Iterator[tuple[str, str]]:
    """(name = default, what it decides) of each setting."""
    for setting in SETTINGS.values():
        yield f"{setting.word} = {literal(setting.default)}", setting.meaning


def _plans() -> Iterator[tuple[str, str]]:
    """(name, the families it is for) of each plan, one's own first."""
    for folder in (*plan_folders(), PLANS):
        for path in plans_in(folder):
            name = path.stem if folder == PLANS else shown(path)
            yield name, ", ".join(families(path))
