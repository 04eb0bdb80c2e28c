"""Encoders that ranks run together as operations, and the collectives of features."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from planc.ir.nodes import Plan
from planc.lowering.fsdp import data_axes
from planc.lowering.step import EXCHANGE, During, Sent, Step, gather_template
from planc.model.facts import Facts
from planc.model.layer_kinds import DEEPSTACK_FIELD
from planc.model.module_table import parts_of_images, puts_images, puts_sound
from planc.ops.registry import AnyOp
from planc.sections.images.ops import DivideImages, ShareTower


def lower(plan: Plan, facts: Facts) -> Iterator[AnyOp]:
    """Yields the operations for the encoders of a model; none for a model of text."""
    yield from _divided_images(plan, facts)
    yield from _shared_towers(plan, facts)


def _divided_images(plan: Plan, facts: Facts) -> Iterator[DivideImages]:
    """Ranks that have the same images, each of which runs the tower on some of them: those of a
    tensor axis divide the images that a rank of a context axis has.
    """
    wide = [s for s in plan.images if s.divided and plan.mesh.size(s.axis) > 1]
    for setting, holder in product(wide, puts_images(facts)):
        yield DivideImages(
            modules=holder,
            tower=tuple(f"{holder}.{n}".removeprefix(".") for n in parts_of_images(holder)),
            axis=setting.axis,
            parts=setting.parts,
            times=setting.times,
            origin=setting.origin,
        )


def _shared_towers(plan: Plan, facts: Facts) -> Iterator[ShareTower]:
    """Data ranks that train a tower, or gather its weights, run it in the same passes."""
    axes = tuple(axis for axis in data_axes(plan) if plan.mesh.size(axis) > 1)
    if axes:
        for holder in (*puts_images(facts), *puts_sound(facts)):
            yield ShareTower(modules=holder, axes=axes)


def sends(op: AnyOp, step: Step) -> Iterator[Sent]:
    """The features of the images of rows whose tokens are all of images, once for the embeddings,
    and once for each block that adds some; and their gradients, where each rank has a part.
    """
    if not isinstance(op, DivideImages):
        return
    divisions, config = step.lowered.find_ops(DivideImages), step.config.get("vision_config")
    layers = config.get(DEEPSTACK_FIELD) if isinstance(config, Mapping) else None
    tensors = 1 + len(layers if isinstance(layers, list) else ())
    # the rows of a context axis are whole, of whose images those of a tensor axis have a run
    outer = any(other.parts for other in divisions if other is not op)
    size = step.size(1 if outer else step.lowered.sequence_parts, step.hidden)
    template = replace(
        gather_template(op.WORD, op.modules, (op.axis,)), times=step.passes * tensors, size=size
    )
    yield template
    if op.parts and step.backward.count_trained(op.modules):
        yield replace(template, kind=EXCHANGE, during=During.BACKWARD)
