"""The registry of diagnostic codes.

A code means the same forever; `docs/diagnostics` has a page for each, whose title is the one here.
The exit code of a command follows from the phases of its errors (`exit_code`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["input", "plan", "proof", "runtime", "internal"]
"""What a finding is about.

`input`: planc could not read, build or write what the command names, or lacks a library for it, so
    nothing was judged.
`plan`: the plan, alone or for this model and this mesh.
`proof`: what a run of the plan showed (layout flow, `planc verify`, `planc init`).
`runtime`: a training job while it applies a plan, loads or saves weights.
`internal`: planc failed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One diagnostic code.

    Args:
        name: `PLnnn`.
        severities: of its findings; two where the same fact is harmless in one case only.
        phase: what its findings are about.
        title: the title of its page, without a full stop.
        presumed: whether the structure of the plan only suggests the finding. A run of the model
            that computes the right numbers overrules it (`Sink.overrule`).
    """

    name: str
    severities: tuple[str, ...]
    phase: Phase
    title: str
    presumed: bool


PRESUMED = frozenset({"PL151", "PL160", "PL161", "PL162", "PL163", "PL205"})

_ROWS: tuple[tuple[str, str, Phase, str], ...] = (
    ("PL001", "error", "plan", "this is not the syntax of a plan"),
    ("PL002", "error", "plan", "the plan is empty"),
    ("PL003", "error", "plan", "this text cannot be a plan"),
    ("PL004", "error", "plan", "a bracket has no partner"),
    ("PL005", "error", "plan", "a string is not closed on its line"),
    ("PL006", "error", "input", "a plan cannot be read"),
    ("PL007", "error", "input", "a file is not a lowered plan that this planc reads"),
    ("PL008", "error", "plan", "plans extend each other in a circle"),
    ("PL009", "error", "plan", "the plan has no header"),
    ("PL010", "error", "plan", "not supported yet"),
    ("PL011", "error", "plan", "this has no place here"),
    ("PL012", "error", "plan", "an argument is wrong"),
    ("PL020", "error", "input", "a file cannot be written"),
    ("PL100", "error", "plan", "a name stands for nothing"),
    ("PL101", "error", "plan", "a selector matches nothing"),
    ("PL102", "error", "plan", "two rules decide the same"),
    ("PL103", "error", "plan", "an override of nothing"),
    ("PL104", "warning", "plan", "an option or a let is never used"),
    ("PL105", "error", "plan", "there is no such style or action"),
    ("PL106", "error", "plan", "a setting names nothing, or has the wrong type"),
    ("PL107", "error", "plan", "a name is defined twice"),
    ("PL108", "error", "plan", "a value depends on itself"),
    ("PL109", "error", "plan", "an expression has no value"),
    ("PL110", "error", "plan", "a requirement of the plan does not hold"),
    ("PL112", "error", "plan", "a range or braces that pick nothing sensible"),
    ("PL130", "error", "input", "the model has no module and no parameter of that name"),
    ("PL150", "error", "plan", "a style on a module that cannot take it"),
    ("PL151", "warning", "plan", "several projections in one weight, split as one"),
    ("PL152", "error", "plan", "a list has no forward"),
    ("PL160", "warning", "plan", "a projection without its partner"),
    ("PL161", "warning", "plan", "a norm on split heads, whose gradient nothing sums"),
    ("PL162", "warning", "plan", "a norm on a part of the sequence, without a rule"),
    ("PL163", "warning", "plan", "nothing splits what a sequence rule takes"),
    ("PL170", "error", "plan", "a name that is a style already"),
    ("PL171", "error", "plan", "a style that names no class"),
    ("PL172", "error", "runtime", "code that the plan names"),
    ("PL180", "error", "plan", "an adapter on a module that cannot take one"),
    ("PL181", "error", "plan", "a number that an adapter cannot have"),
    ("PL182", "warning", "plan", "an adapter no smaller than its layer"),
    ("PL183", "error", "plan", "an adapters section that adapts nothing"),
    ("PL184", "error", "plan", "an adapter whose styles do not follow from its layer"),
    ("PL185", "error", "plan", "dropout that differs between ranks of one tensor axis"),
    ("PL186", "error", "plan", "adapters that cannot be units of their own"),
    ("PL187", "error", "runtime", "adapters without peft"),
    ("PL188", "error", "plan", "freezing what adapters have frozen"),
    ("PL189", "error", "runtime", "adapters that are not there, or of which nothing is said"),
    ("PL201", "error", "plan", "attention heads that cannot be split"),
    ("PL202", "error", "plan", "a dim that does not divide, where that breaks"),
    ("PL203", "warning", "plan", "an uneven split"),
    ("PL204", "info", "plan", "what tensor parallelism leaves whole"),
    ("PL205", "warning", "plan", "projections that meet are not split alike"),
    ("PL220", "error", "plan", "a dim, or a part of it, that does not divide"),
    ("PL221", "error", "plan", "parts that are not the whole"),
    ("PL222", "error", "plan", "a parameter that the module does not have"),
    ("PL223", "error", "plan", "a weight in parts, and activations as one"),
    ("PL224", "error", "plan", "a style inside of what is replicated"),
    ("PL225", "error", "plan", "a parameter of experts that nobody decides"),
    ("PL300", "error", "plan", "a mesh axis has an impossible size"),
    ("PL301", "error", "plan", "the mesh is not the world"),
    ("PL302", "error", "plan", "two axes are auto"),
    ("PL303", "error", "plan", "nothing whole is left for auto"),
    ("PL304", "error", "plan", "an axis is named twice"),
    ("PL305", "error", "plan", "a section works over axes that there are not"),
    ("PL306", "error", "plan", "an axis that no section uses"),
    ("PL307", "info", "plan", "auto counts as 1"),
    ("PL308", "error", "plan", "the plan has no mesh"),
    ("PL309", "error", "plan", "the mesh depends on itself"),
    ("PL310", "error", "plan", "an axis both shards and replicates"),
    ("PL350", "error", "plan", "tensor parallelism and FSDP over one axis"),
    ("PL351", "warning", "plan", "context ranks that share no work"),
    ("PL352", "error", "plan", "one weight split over two axes"),
    ("PL380", "error", "plan", "experts on ranks of their own"),
    ("PL381", "error", "plan", "a unit over an axis that a style splits over"),
    ("PL382", "error", "plan", "a dim that the ranks do not divide"),
    ("PL383", "info", "plan", "fewer rows than ranks"),
    ("PL384", "error", "plan", "a spread without a unit around"),
    ("PL401", "warning", "plan", "tied parameters split differently"),
    ("PL402", "error", "plan", "tied parameters in two units"),
    ("PL410", "error", "plan", "a group that holds a module and what is inside it"),
    ("PL411", "error", "plan", "a unit without parameters"),
    ("PL412", "warning", "plan", "a block outside the units of its list"),
    ("PL413", "error", "plan", "parameters that no unit holds"),
    ("PL414", "warning", "plan", "tensor parallelism without FSDP"),
    ("PL415", "error", "plan", "a unit of several dtypes"),
    ("PL416", "error", "plan", "a precision that no unit uses"),
    ("PL417", "error", "plan", "a partial reshard that does not divide"),
    ("PL418", "error", "plan", "a group without a unit around it"),
    ("PL419", "warning", "plan", "no unit is the root"),
    ("PL430", "error", "plan", "checkpointed modules that nest"),
    ("PL431", "error", "plan", "compiled modules that nest"),
    ("PL432", "error", "plan", "compiled blocks behind a vocabulary-parallel embedding"),
    ("PL433", "error", "plan", "the model itself is checkpointed"),
    ("PL434", "error", "plan", "one graph around a unit"),
    ("PL435", "error", "plan", "a vocabulary-parallel embedding is compiled"),
    ("PL440", "error", "plan", "ignored parameters that train"),
    ("PL441", "error", "plan", "ignored, and decided by another rule"),
    ("PL442", "error", "plan", "axes that a unit cannot be sharded over"),
    ("PL443", "error", "plan", "no parameter has the dim to split"),
    ("PL444", "error", "plan", "nothing to prefetch along"),
    ("PL445", "error", "plan", "prefetching what backward skips"),
    ("PL446", "error", "plan", "two sections that spread the model"),
    ("PL447", "error", "plan", "offloading what stays on the device"),
    ("PL448", "error", "plan", "a search for units that finds none"),
    ("PL449", "warning", "plan", "a prefetch of the whole list"),
    ("PL450", "error", "plan", "an option that only shards have"),
    ("PL451", "error", "plan", "freezing that changes nothing"),
    ("PL452", "error", "plan", "nothing trains"),
    ("PL453", "error", "plan", "one tensor, frozen under one of its names"),
    ("PL470", "error", "plan", "operators that torch does not have"),
    ("PL471", "error", "plan", "an operator that is never seen"),
    ("PL472", "error", "plan", "an operator in a save list twice"),
    ("PL473", "error", "plan", "offload in what is compiled"),
    ("PL474", "error", "runtime", "a model that has memory where the plan starts without"),
    ("PL475", "error", "runtime", "a call that loads otherwise than the plan says"),
    ("PL490", "error", "runtime", "the run has another number of ranks than the plan"),
    ("PL491", "error", "runtime", "the ranks disagree on the plan"),
    ("PL492", "error", "runtime", "torch refused an operation"),
    ("PL493", "error", "runtime", "the model is parallel already"),
    ("PL494", "error", "runtime", "the model is not the one the plan was lowered for"),
    ("PL495", "error", "runtime", "there is no process group or mesh to work on"),
    ("PL496", "error", "runtime", "the weights do not fit the model"),
    ("PL497", "error", "runtime", "a checkpoint folder cannot be read or written"),
    ("PL498", "error", "plan", "more than Megatron-FSDP does"),
    ("PL499", "error", "runtime", "Megatron-FSDP cannot run, or be asked for this"),
    ("PL501", "error", "proof", "the plan computes something else"),
    ("PL502", "error", "proof", "a gradient is wrong under this plan"),
    ("PL503", "error", "proof", "the model dies under this plan"),
    ("PL504", "warning error", "proof", "layout flow cannot say"),
    ("PL505", "warning error", "proof", "what arrives is not what the plan says"),
    ("PL506", "warning", "proof", "a redistribution that the plan does not state"),
    ("PL507", "error", "proof", "a size was read off a local part of the sequence"),
    ("PL508", "error", "proof", "an FSDP unit that is never called"),
    ("PL520", "error", "proof", "the plan trains another model"),
    ("PL521", "error", "proof", "a rank failed"),
    ("PL522", "error", "proof", "no answer in time"),
    ("PL523", "error", "proof", "this plan can't be proved"),
    ("PL600", "error", "input", "there is no such model"),
    ("PL601", "error", "input", "the configuration cannot be read"),
    ("PL602", "error", "input", "the configuration is not a JSON object"),
    ("PL603", "error", "input", "a field of the configuration is missing or wrong"),
    ("PL604", "error", "input", "transformers does not know this model_type"),
    ("PL605", "error", "input", "there is no causal language model to build"),
    ("PL606", "error", "input", "transformers cannot build this model"),
    ("PL607", "error", "input", "MODEL is code, which is not run unasked"),
    ("PL608", "error", "input", "the model's own code failed"),
    ("PL609", "info error", "input", "the model brings code of its own, which was not run"),
    ("PL610", "info", "input", "quantization is not looked at"),
    ("PL650", "error", "plan", "the plan is for another family"),
    ("PL660", "warning", "proof", "a drafted plan that is not proved"),
    ("PL661", "info", "plan", "a rule of transformers' own plan matches nothing"),
    ("PL670", "info", "plan", "random numbers that no proof compares"),
    ("PL671", "warning", "plan", "layers left out at random"),
    ("PL675", "error", "input", "diffusers is not installed"),
    ("PL676", "error", "input", "diffusers does not have this class of models"),
    ("PL677", "error", "plan", "an attribute that the module does not have"),
    ("PL678", "error", "plan", "an attribute that does not split over the ranks"),
    ("PL680", "error", "plan", "4-bit weights that FSDP would cast"),
    ("PL681", "error", "plan", "a layer that 4 bits are not for"),
    ("PL682", "error", "plan", "a tied weight in 4 bits"),
    ("PL683", "error", "plan", "a 4-bit weight that is to train"),
    ("PL684", "error", "plan", "4-bit weights whose parts are no whole blocks"),
    ("PL685", "error", "runtime", "4-bit weights without bitsandbytes"),
    ("PL686", "error", "runtime", "an export of weights in 4 bits"),
    ("PL687", "error", "runtime", "a checkpoint and weights in 4 bits"),
    ("PL688", "error", "runtime", "a layer that trains beside its own adapter"),
    ("PL690", "error", "plan", "islands without a cast"),
    ("PL900", "error", "internal", "planc itself failed"),
)

CODES = {
    name: Code(
        name=name,
        severities=tuple(severities.split()),
        phase=phase,
        title=title,
        presumed=name in PRESUMED,
    )
    for name, severities, phase, title in _ROWS
}
"""Every code by its name, in order."""


def exit_code(errors: Iterable[str]) -> int:
    """The exit code of a command: 0 without errors, 2 where it could not do its work, else 1.

    Args:
        errors: the codes of the errors that it reports.
    """
    phases = {CODES[code].phase for code in errors}
    if not phases:
        return 0
    return 2 if phases & {"input", "internal"} else 1
