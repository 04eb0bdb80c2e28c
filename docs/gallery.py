"""`make docs`: a picture of every plan that ships, as a page of the site.

    python docs/gallery.py [PLAN ...]

Writes gallery/README.md and an SVG a plan beside this file; git ignores them.
"""

import json
import sys
from pathlib import Path

from planc import PlanError, lower
from planc.cli import main as planc
from planc.files import atomic_write
from planc.files.resources import PLANS
from planc.syntax.plan_files import plan_of_family, shipped_plans

FOLDER = Path(__file__).parent / "gallery"
INTRODUCTION = """# Every plan as a picture

What `planc show --svg` draws of each plan that ships, for a shape that ships, on 8 ranks: the mesh
with the groups of one rank, and the modules with their styles. The [library](../library.md) says
what each plan is for.
"""


def models():
    """(plan, a model that it is for)."""
    found = {"classifier": "llama-3.2-1b-classes"}  # whose family has the plan of the whole model
    for path in sorted((PLANS / "models").glob("*.json")):
        values = json.loads(path.read_text())
        place = plan_of_family(values.get("model_type") or values["_class_name"])
        if place is not None:
            found.setdefault(place.path.stem, path.stem)
    return found


def draw(plan, model):
    """The text of the page about a plan, whose picture is written.

    Raises:
        SystemExit: the plan cannot be drawn.
    """
    try:
        lower(model, plan, world_size=8, overrides="tp=2")
        settings = ["--set", "tp=2"]
    except PlanError:  # one key head, which no ranks can divide
        settings = []
    command = ["show", model, plan, "--world-size", "8", *settings, "--svg", "-o"]
    if planc([*command, str(FOLDER / f"{plan}.svg")]) != 0:
        raise SystemExit(f"{plan} cannot be drawn for {model}")
    shown = " ".join([*command, f"{plan}.svg"])
    return f"\n## {plan}\n\n    planc {shown}\n\n![{plan} on 8 ranks]({plan}.svg)\n"


def main(names):
    FOLDER.mkdir(exist_ok=True)
    known = models()
    page = [draw(plan, known[plan]) for plan in names or shipped_plans()]
    atomic_write.write(FOLDER / "README.md", INTRODUCTION + "".join(page))


if __name__ == "__main__":
    main(sys.argv[1:])
