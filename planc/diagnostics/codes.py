"""The registry of diagnostic codes.

A code means the same forever; `docs/diagnostics` has a page for each, whose title is the one here.
The exit code of a command follows from the phases of its errors (`exit_code`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from planc.sections import SECTIONS

Phase = Literal["input", "plan", "proof", "runtime", "internal"]
"""The subject of a finding.

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
    """

    name: str
    severities: tuple[str, ...]
    phase: Phase
    title: str


PRESUMED = frozenset({"PL151", "PL160", "PL161", "PL162", "PL401"})
"""Only suggested by the structure of the plan: a run of the model that computes the right numbers
overrules them (`Sink.overrule`)."""

WITHOUT_LAYOUTS = frozenset({"PL505", "PL524", "PL525", "PL526"})
"""Reported where inference finds no layouts that go with the splits of a plan."""

TIES = frozenset({"PL401"})
"""Replaced by what a run shows of tied parameters (PL501, PL502, PL503)."""

REAL_SIZES = frozenset({"PL226", "PL417"}).union(*(s.real_sizes for s in SECTIONS.values()))
"""About the bytes of real layers, or the ranks of data axes: a simulation has others."""

NO_TORCH = frozenset({"PL760"})
"""Codes that state only that torch is not installed; the input of the command may be right."""

_ROWS: tuple[tuple[str, str, Phase, str], ...] = (
    ("PL001", "error", "plan", "syntax error in a plan"),
    ("PL002", "error", "plan", "the plan is empty"),
    ("PL003", "error", "plan", "the text cannot be a plan"),
    ("PL004", "error", "plan", "unmatched bracket"),
    ("PL005", "error", "plan", "unterminated string"),
    ("PL006", "error", "input", "the plan file cannot be read"),
    ("PL007", "error", "input", "the file is not a lowered plan that this version of planc reads"),
    ("PL008", "error", "plan", "plans extend each other in a cycle"),
    ("PL009", "error", "plan", "the plan has no header"),
    ("PL010", "error", "plan", "not supported yet"),
    ("PL011", "error", "plan", "a statement in the wrong place"),
    ("PL012", "error", "plan", "invalid argument"),
    ("PL020", "error", "input", "the output file cannot be written"),
    ("PL021", "error", "input", "the settings in pyproject.toml cannot be used"),
    ("PL022", "error", "input", "no plan is for this family"),
    ("PL023", "error", "input", "there is nothing to check"),
    ("PL100", "error", "plan", "undefined name"),
    ("PL101", "error", "plan", "a selector matches nothing"),
    ("PL102", "error", "plan", "two rules decide the same thing"),
    ("PL103", "error", "plan", "an override that replaces nothing"),
    ("PL104", "warning", "plan", "an unused option or let"),
    ("PL105", "error", "plan", "unknown style or action"),
    ("PL106", "error", "plan", "a setting with an unknown name or a value of the wrong type"),
    ("PL107", "error", "plan", "a name is defined twice"),
    ("PL108", "error", "plan", "a value depends on itself"),
    ("PL109", "error", "plan", "an expression has no value"),
    ("PL110", "error", "plan", "a requirement of the plan is not met"),
    ("PL112", "error", "plan", "invalid range or too many alternatives"),
    ("PL114", "error", "plan", "a role that the model lacks"),
    ("PL130", "error", "input", "the model has no module or parameter of that name"),
    ("PL150", "error", "plan", "a style on a module that does not support it"),
    ("PL151", "warning", "plan", "a fused projection that is sharded as one"),
    ("PL152", "error", "plan", "a module list has no forward"),
    ("PL160", "warning", "plan", "stated layouts do not go together"),
    ("PL161", "warning", "plan", "a partial gradient that no rule sums"),
    ("PL162", "warning", "plan", "a module without a rule takes or gives another layout"),
    ("PL170", "error", "plan", "the name is already a style"),
    ("PL171", "error", "plan", "a custom style or optimizer whose path names no class"),
    (
        "PL172",
        "error",
        "runtime",
        "a custom style or optimizer that needs permission, or cannot be imported",
    ),
    ("PL180", "error", "plan", "an adapter on a module that does not support one"),
    ("PL181", "error", "plan", "an adapter setting out of range"),
    ("PL182", "warning", "plan", "an adapter that is not smaller than its layer"),
    ("PL183", "error", "plan", "an adapters section without an adapter"),
    ("PL184", "error", "plan", "an adapter whose tensor-parallel styles cannot be derived"),
    ("PL186", "error", "plan", "adapters that cannot be FSDP units"),
    ("PL187", "error", "runtime", "adapters need peft"),
    ("PL189", "error", "runtime", "a wrong call for adapters"),
    ("PL201", "error", "plan", "attention heads that cannot be split"),
    ("PL202", "error", "plan", "a dim that is not divisible where equal shards are required"),
    ("PL203", "info warning", "plan", "an uneven split"),
    ("PL204", "info", "plan", "parameters that stay replicated over the tensor axis"),
    ("PL220", "error", "plan", "a dim, or a part of it, that is not divisible"),
    ("PL221", "error", "plan", "parts that do not add up to the dim"),
    ("PL222", "error", "plan", "a parameter or dim that the module does not have"),
    ("PL223", "error", "plan", "a fused weight whose activations are gathered as one"),
    ("PL224", "error", "plan", "a style inside a replicated module"),
    ("PL225", "error", "plan", "a parameter of experts without a rule"),
    ("PL226", "error", "plan", "experts whose shards a grouped matrix product cannot read"),
    ("PL300", "error", "plan", "invalid size of a mesh axis"),
    ("PL301", "error", "plan", "the mesh size differs from the world size"),
    ("PL302", "error", "plan", "two axes are auto"),
    ("PL303", "error", "plan", "auto is not an integer"),
    ("PL304", "error", "plan", "an axis is named twice"),
    ("PL305", "error", "plan", "a section names unknown axes, or the wrong number of axes"),
    ("PL306", "error", "plan", "an unused axis"),
    ("PL307", "info", "plan", "auto counts as 1"),
    ("PL308", "error", "plan", "the plan has no mesh"),
    ("PL309", "error", "plan", "the mesh depends on itself"),
    ("PL310", "error", "plan", "an axis both shards and replicates"),
    ("PL350", "error", "plan", "tensor parallelism and FSDP over one axis"),
    ("PL351", "error", "plan", "context-parallel ranks that repeat the same work"),
    ("PL352", "error", "plan", "one weight sharded over two axes"),
    ("PL381", "error", "plan", "a unit over an axis that already has a style"),
    ("PL382", "error", "plan", "a dim that is not divisible by the number of ranks"),
    ("PL383", "info", "plan", "fewer rows than ranks"),
    ("PL384", "error", "plan", "a spread rule that applies to no FSDP unit's parameters"),
    ("PL385", "warning", "proof", "a buffer that each data rank computes from its own rows"),
    ("PL401", "warning", "plan", "tied parameters that are sharded differently"),
    ("PL402", "error", "plan", "tied parameters in two units"),
    ("PL410", "error", "plan", "a group that contains a module and its submodule"),
    ("PL411", "error", "plan", "a unit without parameters"),
    ("PL412", "warning", "plan", "a block that is not a unit, unlike the others of its list"),
    ("PL413", "error", "plan", "parameters outside every unit"),
    ("PL414", "warning", "plan", "tensor parallelism without FSDP"),
    ("PL415", "error", "plan", "a unit with several dtypes"),
    ("PL416", "error", "plan", "a precision that applies to no unit"),
    ("PL417", "error", "plan", "an invalid size for partial resharding"),
    ("PL418", "error", "plan", "a group without an enclosing unit"),
    ("PL419", "warning", "plan", "the model is not an FSDP unit"),
    ("PL420", "warning", "plan", "an optimizer that steps parameters in 16 bits"),
    ("PL421", "info", "plan", "16 bits for parameters that the model keeps in float32"),
    ("PL422", "error", "runtime", "a loss that shifts a part of a sequence"),
    ("PL423", "error warning", "runtime", "an optimizer that couples the stages of a pipeline"),
    ("PL424", "error", "runtime", "data ranks pass rows of different padded lengths"),
    ("PL425", "error", "runtime", "modules or parameters changed after the plan was applied"),
    ("PL426", "error", "runtime", "gradients of shards that autograd does not compute"),
    ("PL427", "error warning", "runtime", "a norm of one pipeline stage"),
    ("PL437", "error", "runtime", "full tensors loaded into a model under a plan"),
    ("PL440", "error", "plan", "ignored parameters that train"),
    ("PL441", "error", "plan", "ignored modules with another rule"),
    ("PL442", "error", "plan", "axes that a unit cannot be sharded over"),
    ("PL443", "error", "plan", "no parameter can be sharded on this dim"),
    ("PL444", "error", "plan", "no list of units to prefetch"),
    ("PL445", "error", "plan", "prefetching blocks that backward never reaches"),
    ("PL446", "error", "plan", "two sections that distribute the model"),
    ("PL447", "error", "plan", "offloading parameters that stay on the device"),
    ("PL448", "error", "plan", "an automatic unit rule that finds no module"),
    ("PL449", "warning", "plan", "a prefetch of the entire list"),
    ("PL450", "error", "plan", "an option that replicate does not have"),
    ("PL454", "error", "runtime", "a script undoes what the plan relies on"),
    ("PL455", "error", "runtime", "hooks on parameters that would never be called"),
    ("PL457", "error", "runtime", "a folder of quantized weights"),
    ("PL459", "error", "runtime", "a state that no other rank could load"),
    ("PL460", "error", "runtime", "several processes without torchrun's variables"),
    ("PL461", "error", "runtime", "the ranks load different files"),
    ("PL462", "warning", "runtime", "a cache in passes that recompute blocks"),
    ("PL463", "error", "runtime", "a copy of a model under a plan"),
    ("PL464", "error", "runtime", "an optimizer whose states are on meta"),
    ("PL465", "error", "runtime", "an optimizer that cannot step sharded parameters"),
    ("PL467", "error", "runtime", "a checkpoint leaves out weights that the model lacks"),
    ("PL468", "error", "runtime", "a parameter that is not new, or cannot be"),
    ("PL469", "error", "runtime", "the ranks pass different numbers of batches, or no rows"),
    ("PL474", "error", "runtime", "the plan starts on the meta device, but the model is allocated"),
    ("PL475", "error", "runtime", "run.load contradicts the plan"),
    ("PL476", "error", "runtime", "inputs_embeds in place of a sharded embedding"),
    ("PL477", "error", "runtime", "a library would save the shards of one rank"),
    ("PL478", "warning", "runtime", "data ranks take the means of different numbers of labels"),
    ("PL479", "error", "runtime", "data ranks pass images or sound, and others none"),
    ("PL480", "error", "runtime", "the plan is known to be refuted"),
    ("PL481", "error", "runtime", "the run requires a proved plan"),
    ("PL482", "error", "runtime", "the run requires a plan that is verified on processes"),
    ("PL483", "error", "runtime", "the ranks of a tensor axis read different inputs"),
    ("PL484", "error", "runtime", "the ranks have different weights"),
    ("PL485", "error", "runtime", "compiled attention that torch cannot recompute on the CPU"),
    ("PL486", "error", "runtime", "an optimizer of parameters that the plan has replaced"),
    ("PL487", "warning", "runtime", "all ranks of a data axis read the same inputs"),
    ("PL488", "error", "runtime", "a batch that cannot be cut into microbatches"),
    ("PL489", "error", "runtime", "a model that peft or torch.compile has changed"),
    ("PL490", "error", "runtime", "the world size of the run differs from the plan's"),
    ("PL491", "error", "runtime", "the ranks disagree on the plan"),
    ("PL492", "error", "runtime", "torch raised in an operation"),
    ("PL493", "error", "runtime", "the model is already parallelized"),
    ("PL494", "error", "runtime", "the model is not the one the plan was lowered for"),
    ("PL495", "error", "runtime", "no process group or device mesh"),
    ("PL496", "error", "runtime", "the weights do not fit the model"),
    ("PL497", "error", "runtime", "a checkpoint folder cannot be read or written"),
    ("PL498", "error", "plan", "not supported by the backend that shards the model"),
    ("PL499", "error", "runtime", "the backend cannot run here, or does not support this call"),
    ("PL501", "error", "proof", "an output is wrong under this plan"),
    ("PL502", "error", "proof", "a gradient is wrong under this plan"),
    ("PL503", "error", "proof", "the model fails under this plan"),
    ("PL504", "warning error", "proof", "layout flow cannot decide"),
    ("PL505", "warning error", "proof", "an input has another layout than the plan states"),
    ("PL506", "warning", "proof", "an implicit redistribution that the plan does not state"),
    ("PL507", "error", "proof", "a size was read from a local shard of the sequence"),
    ("PL508", "error", "proof", "an FSDP unit whose forward is never called"),
    ("PL509", "error", "proof", "the gradients are right and the step is wrong"),
    ("PL510", "warning", "proof", "the loss of a batch is not the mean over the data ranks"),
    ("PL511", "warning error", "proof", "random numbers are not those of the plain model"),
    ("PL512", "error", "proof", "parameters that only some data ranks use"),
    ("PL513", "warning", "proof", "a module mixes the rows of a batch"),
    ("PL515", "warning", "runtime", "a loss whose labels planc cannot count"),
    ("PL516", "warning error", "proof", "lengths that the tensor axis does not divide"),
    ("PL517", "info error", "proof", "packed documents that see each other"),
    ("PL518", "info error", "proof", "padding that other tokens see"),
    ("PL519", "error", "runtime", "documents of a row that cannot be kept apart"),
    ("PL520", "error", "proof", "the plan trains another model"),
    ("PL521", "error", "proof", "a rank failed"),
    ("PL522", "error", "proof", "no answer in time"),
    ("PL523", "error", "proof", "the plan cannot be proved"),
    ("PL524", "error", "plan", "layouts cannot be inferred"),
    ("PL525", "error", "plan", "no layouts go with these splits"),
    ("PL526", "error", "plan", "hidden states cannot be sharded on the sequence"),
    ("PL527", "info", "plan", "hidden states are whole in some blocks"),
    ("PL528", "error", "plan", "an input that does not come"),
    ("PL529", "error", "plan", "experts whose tokens cannot be limited"),
    ("PL533", "error", "plan", "a tensor rule and an optimizer rule state different parts"),
    ("PL534", "error", "proof", "a shape that cannot be at the real size of the model"),
    ("PL540", "error", "plan", "context-parallel ranks whose gradients nothing averages"),
    ("PL541", "error", "proof", "a model that is wrong on sequence shards"),
    ("PL542", "error", "plan", "heads that ulysses cannot split"),
    ("PL544", "error", "runtime", "a batch that cannot be split over the context axis"),
    ("PL545", "error", "runtime", "ranks of a context axis or a pipeline read other batches"),
    ("PL546", "warning", "plan", "an exchange of recurrent states that the model does not have"),
    ("PL547", "error", "plan", "patches of images that cannot be split over a context axis"),
    ("PL550", "error", "plan", "a number of expert-parallel ranks that does not fit"),
    ("PL551", "error", "plan", "a module whose experts cannot be divided"),
    ("PL552", "error", "plan", "experts in a unit over ranks with other experts"),
    ("PL558", "info warning", "proof", "unknown isolation of packed documents and padding"),
    ("PL560", "error", "plan", "a block that is in no stage, or in two"),
    ("PL561", "error", "plan", "microbatches that the schedule cannot run"),
    ("PL562", "error", "plan", "stages that the schedule cannot run"),
    ("PL563", "error", "plan", "more stages than blocks"),
    ("PL564", "error", "plan", "stages whose time cannot be estimated"),
    ("PL565", "error", "plan", "the loss takes more than hidden states from earlier stages"),
    ("PL566", "error", "plan", "a model that cannot be cut into stages"),
    ("PL567", "error", "plan", "not supported in a pipeline"),
    ("PL568", "error", "plan", "a pipeline schedule that cannot be run"),
    ("PL569", "warning", "plan", "checkpoints under a schedule that splits backward passes"),
    ("PL570", "warning error", "plan", "gradients in fp16 without a loss scale"),
    ("PL571", "error", "plan", "attention that gathers tokens, in a model without attention"),
    ("PL575", "error", "plan", "a trainable parameter that no rule of the optimizer section steps"),
    ("PL576", "error", "plan", "a matrix optimizer on an embedding, a head or a router"),
    ("PL577", "error", "plan", "the units of a matrix optimizer do not fit the weight"),
    ("PL578", "error", "plan", "a fused weight whose parts a matrix optimizer does not know"),
    ("PL579", "warning", "plan", "an optimizer rule that steps nothing"),
    ("PL580", "error", "runtime", "the script's optimizer and that of the plan"),
    ("PL581", "error", "plan", "transformers has no tensor-parallel plan for a model"),
    ("PL582", "error", "plan", "an adapter that peft cannot have on experts"),
    ("PL585", "warning", "plan", "an imbalance of experts that no rank can have"),
    ("PL590", "error", "plan", "states in 8 bits whose blocks a mesh cuts"),
    ("PL591", "error", "runtime", "arguments that a custom optimizer does not take"),
    ("PL592", "error", "runtime", "a state of a custom optimizer that no other mesh can have"),
    ("PL600", "error", "input", "unknown model"),
    ("PL601", "error", "input", "the configuration cannot be read"),
    ("PL602", "error", "input", "the configuration is not a JSON object"),
    ("PL603", "error", "input", "a field of the configuration is missing or wrong"),
    ("PL604", "error", "input", "transformers does not know this model_type"),
    ("PL605", "error", "input", "no model class to build"),
    ("PL606", "error", "input", "transformers cannot build this model"),
    ("PL607", "error", "input", "MODEL is code, which needs permission to run"),
    ("PL608", "error", "input", "the model's own code failed"),
    ("PL609", "info error", "input", "the model brings its own code, which was not run"),
    ("PL610", "info", "input", "the quantization of the model is ignored"),
    ("PL611", "error", "input", "several plans of one's own are for the family"),
    ("PL612", "info", "input", "inputs that a draft's proof did not have"),
    ("PL613", "error", "plan", "ranks that meet in different collectives"),
    ("PL614", "error", "plan", "ranks that wait forever"),
    ("PL615", "error", "plan", "a rank that leaves the order of the others"),
    ("PL616", "warning", "plan", "an order of collectives that is not known"),
    ("PL617", "error", "input", "dumps that cannot be read"),
    ("PL618", "error", "input", "dumps of another plan"),
    ("PL619", "error", "runtime", "a global batch that the ranks cannot share"),
    ("PL620", "error", "plan", "a number of nodes without a world size"),
    ("PL630", "error", "input", "a measurement that no file takes"),
    ("PL640", "error", "plan", "ranks that do not fill whole nodes"),
    ("PL641", "error warning", "plan", "a tensor axis that crosses nodes"),
    ("PL642", "error", "input", "a job without what its file needs"),
    ("PL643", "error", "runtime", "nodes that are not alike"),
    ("PL644", "error", "runtime", "a rank that gives no sign of life"),
    ("PL645", "error", "runtime", "a slow rank or a slow link"),
    ("PL646", "error", "runtime", "too little memory or disk on a node"),
    ("PL647", "warning", "input", "the family of an imported plan is a guess"),
    ("PL650", "error", "plan", "the plan is for another family"),
    ("PL660", "warning", "proof", "a drafted plan that is not proved"),
    ("PL661", "info", "plan", "a rule of transformers' plan matches nothing"),
    ("PL662", "info", "plan", "a plan that ships splits more than the drafted one"),
    ("PL663", "info", "plan", "much of the model stays whole in the drafted plan"),
    ("PL675", "error", "input", "diffusers is not installed"),
    ("PL676", "error", "input", "diffusers does not have this model class"),
    ("PL677", "error", "plan", "an attribute that the module does not have"),
    ("PL678", "error", "plan", "an attribute that is not divisible by the number of ranks"),
    ("PL688", "error", "runtime", "a layer that trains and has an adapter"),
    ("PL690", "error", "plan", "islands without a dtype"),
    ("PL691", "error", "plan", "another quantization than that of the configuration"),
    ("PL695", "error", "plan", "a plan whose slices of the weights are not known"),
    ("PL697", "error", "runtime", "an engine that does not fit the table of a transfer"),
    ("PL698", "error", "runtime", "a transfer that stopped in the middle"),
    ("PL700", "error", "input", "unknown hardware or stack profile"),
    ("PL701", "error", "input", "a profile that cannot be used"),
    ("PL702", "error", "plan", "a batch that the mesh cannot split"),
    ("PL703", "warning", "plan", "layers whose activations are unknown"),
    ("PL704", "error", "plan", "a rank needs more memory than it has"),
    ("PL705", "error", "input", "an estimate of a lowered plan"),
    ("PL710", "error", "input", "no plan that a suggestion could extend"),
    ("PL711", "error", "input", "a requirement that cannot be evaluated"),
    ("PL712", "error", "plan", "no plan can be suggested"),
    ("PL714", "warning", "plan", "tensor parallelism across nodes"),
    ("PL715", "warning", "plan", "checkpointing although memory is free"),
    ("PL716", "warning", "plan", "units that take much memory while gathered"),
    ("PL717", "error", "input", "measurements that cannot be read"),
    ("PL718", "error", "input", "measurements that a profile cannot be fitted to"),
    ("PL719", "error", "input", "a profile that cannot be written"),
    ("PL720", "warning", "plan", "units that are gathered in float32"),
    ("PL721", "warning", "plan", "offloading that takes much of the time"),
    ("PL727", "error", "input", "a step that one rank alone cannot run"),
    ("PL730", "error", "input", "the file to import cannot be read"),
    ("PL731", "error", "input", "the file to import is not in its format"),
    ("PL732", "error", "input", "the file to import belongs to no library that planc knows"),
    ("PL733", "warning", "input", "an imported plan for an unknown family"),
    ("PL734", "warning", "input", "imported keys that planc does not know"),
    ("PL735", "warning", "input", "an imported value that planc does not know"),
    ("PL736", "warning", "input", "imported keys that a plan does not have"),
    ("PL737", "error", "input", "a Python file without the configuration that is named"),
    ("PL738", "warning", "input", "an imported argument that stands twice"),
    ("PL739", "error warning", "plan", "a plan that a tp_plan cannot say"),
    ("PL740", "error", "input", "a comment that names no target"),
    ("PL741", "info", "input", "no model to judge the plan by"),
    ("PL742", "error", "input", "an editor's server needs pygls"),
    ("PL743", "error", "input", "a library lacks a name that planc uses"),
    ("PL744", "info warning", "input", "a version that planc is not tested with"),
    ("PL745", "error", "plan", "a plan in another version of the language"),
    ("PL750", "error", "input", "half of a step to estimate"),
    ("PL760", "error", "input", "what needs torch, where torch is not installed"),
    ("PL761", "error", "input", "a pack that cannot be read or made"),
    ("PL762", "warning", "input", "a pack with verdicts of another planc"),
    ("PL763", "warning", "input", "an empty `tp_plan`, which transformers refuses"),
    ("PL764", "error", "proof", "a plan of transformers trains another model"),
    ("PL765", "error", "proof", "a plan of transformers that does not run"),
    ("PL766", "warning", "proof", "a type of transformers that is not judged"),
    ("PL767", "warning", "plan", "what a DistributedConfig cannot say"),
    ("PL900", "error", "internal", "internal error in planc"),
)
_SECTION_ROWS = (row for section in SECTIONS.values() for row in section.codes)

CODES = {
    name: Code(name=name, severities=tuple(severities.split()), phase=phase, title=title)
    for name, severities, phase, title in sorted((*_ROWS, *_SECTION_ROWS))
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
