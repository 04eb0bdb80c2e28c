"""What planc computed before a mistake in it was reported: contexts as those of `silent_faults`."""

import contextlib
from dataclasses import replace
from unittest import mock

import silent_faults
from torch import Tensor
from torch.distributed.tensor import DTensor

from planc.ops.context import ContextParallel
from planc.runtime import counted_labels, gradients, training_step
from planc.runtime.safeguards import changes, guards, torch_calls
from planc.runtime.standalone import (
    fsdp,
    load_weights,
    loss,
    passes,
    rotary,
    safetensors_files,
)
from planc.sections.loss import runtime as loss_runtime


@contextlib.contextmanager
def without_safeguards():
    """Nothing looks at what a script does with a model."""
    from planc.integrations import trainer

    nothing = (
        *((changes.ModelChanges, "watch"), (changes.ModelChanges, "require")),
        *((torch_calls, "cover"), (guards, "_guard_lookups"), (guards, "_guard_loading")),
        *((training_step, "observe_statistics"), (training_step, "_require_as_many")),
        (trainer, "_require_undecided"),
    )
    with contextlib.ExitStack() as stack:
        for owner, name in nothing:
            stack.enter_context(mock.patch.object(owner, name, lambda *_: None))
        stack.enter_context(mock.patch.object(loss_runtime, "replaced_loss", lambda _: ""))
        stack.enter_context(mock.patch.object(DTensor, "data", Tensor.data, create=True))
        yield


def class_names_of_fsdp():
    """FSDP's subclasses have names of their own."""

    def rename(run):
        for kind in {type(module) for module in silent_faults.units(run)}:
            kind.__name__ = f"FSDP{kind.__mro__[2].__name__}"

    return silent_faults.after(rename)


def means_of_ranks():
    """planc's Trainer weighs no pass by its labels."""
    from planc.integrations.trainer import PlancTrainerMixin

    return mock.patch.object(PlancTrainerMixin, "_decide_weights", lambda _: None)


@contextlib.contextmanager
def failed_passes_left():
    """Modules list unsharded parameters after a pass that raised."""
    with (
        mock.patch.object(gradients, "reset_failed_pass", lambda _: None),
        mock.patch.object(passes, "reset_failed_pass", lambda _: None),
    ):
        yield


def pickled_as_torch_does():
    return silent_faults.after(lambda run: run.model.__dict__.pop("__reduce_ex__"))


def attributes_on_wrappers():
    """A wrapper of a recomputed block stores the attributes that a script sets on the block."""
    return mock.patch.object(guards, "write_to_blocks", lambda _: None)


def labels_counted():
    """A step weighs passes by `labels`, also where the loss takes `shift_labels`."""
    return mock.patch.object(counted_labels, "next_labels_of", lambda _batch: None)


def other_labels_counted():
    """A step counts the labels that are not -100, whatever `ignore_index` is."""
    return mock.patch.object(counted_labels, "IGNORE_INDEX", "")


def longest_of_a_rank():
    """Rotary embeddings see the rows of their rank alone."""
    return mock.patch.object(rotary.LongestPosition, "meshes", lambda _: [])


def labels_unchecked():
    return mock.patch.object(loss.HeadPart, "require_known", lambda *_: None)


def divided_twice():
    return mock.patch.object(fsdp, "divide_once", lambda *_: None)


def index_first():
    """The shards of an index are read where a folder has a single file too."""
    real = safetensors_files.entry_of

    def entry_of(folder):
        indexed = (folder / safetensors_files.INDEX).is_file()
        return safetensors_files.INDEX if indexed else real(folder)

    return mock.patch.object(safetensors_files, "entry_of", entry_of)


def cast_as_they_are():
    floats = (*load_weights.FLOATS, "F8_E4M3")
    return mock.patch.object(load_weights, "FLOATS", floats)


def context_ends_early():
    """The context ends at the block before the last one."""

    def early(op):
        if not isinstance(op, ContextParallel):
            return op
        path, _, number = op.blocks[-1].rpartition(".")
        return replace(op, blocks=(op.blocks[0], f"{path}.{int(number) - 1}"))

    def wrong(real, model, lowered, **arguments):
        return real(model, lowered.map_ops(lambda ops: map(early, ops)), **arguments)

    return silent_faults.applied(wrong)
