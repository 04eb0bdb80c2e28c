"""The settings that all families have. No other file knows their names as texts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value that `--set` changes in every plan that uses it.

    Args:
        word: its name in plans and on the command line.
        default: its value without `--set`; a value has its type.
        meaning: what it decides.
        section: the section of a plan that it makes or fills.
        axis: whether it is the size of an axis of the mesh, or of the ranks that divide experts.
        former: names that it had in plans.
    """

    word: str
    default: bool | int | str
    meaning: str
    section: str
    axis: bool = False
    former: str = ""


TP = Setting(
    word="tp", default=1, axis=True, section="tensor", meaning="ranks that split each weight"
)
PP = Setting(
    word="pp",
    default=1,
    axis=True,
    section="pipeline",
    former="pipeline_stages",
    meaning="ranks that hold different blocks; a rank's batch is cut into microbatches",
)
CP = Setting(
    word="cp",
    default=1,
    axis=True,
    section="context",
    former="context_parallel",
    meaning="ranks that have a part of every sequence each, for long ones",
)
EP = Setting(
    word="ep",
    default=1,
    axis=True,
    section="expert",
    meaning="ranks that divide the experts, of those along dp_shard, cp and tp",
)
ETP = Setting(
    word="etp",
    default=1,
    axis=True,
    section="expert",
    meaning="1, or the size of tp: its ranks split each divided expert",
)
DP_REPLICATE = Setting(
    word="dp_replicate",
    default=1,
    axis=True,
    section="fsdp",
    meaning="copies of the sharded model",
)
SEQUENCE = Setting(
    word="sequence",
    default=True,
    section="tensor",
    former="sequence_parallel",
    meaning="norms and residuals are sharded on the sequence dim between blocks",
)
RECOMPUTE = Setting(
    word="recompute",
    default=True,
    section="checkpoint",
    former="checkpointing",
    meaning="the activations of each block are computed again in the backward pass",
)
LOSS_CHUNKS = Setting(
    word="loss_chunks",
    default=0,
    section="loss",
    meaning="parts of the tokens in which the loss is computed; 0: whole logits",
)
MICROBATCHES = Setting(
    word="microbatches", default=8, section="pipeline", meaning="of a pipeline, in a batch"
)
SCHEDULE = Setting(
    word="schedule",
    default="1f1b",
    section="pipeline",
    former="pipeline_schedule",
    meaning="gpipe, 1f1b; interleaved_1f1b, zero_bubble, zbv, dualpipe_v: two stages a rank",
)
PARAM_DTYPE = Setting(
    word="param_dtype",
    default="bf16",
    section="fsdp",
    meaning="the dtype in which FSDP all-gathers and computes",
)
REDUCE_DTYPE = Setting(
    word="reduce_dtype",
    default="fp32",
    section="fsdp",
    meaning="the dtype in which gradients are reduced",
)

SETTINGS = {
    each.word: each
    for each in (
        TP, PP, CP, EP, ETP, DP_REPLICATE, SEQUENCE, RECOMPUTE, LOSS_CHUNKS, MICROBATCHES, SCHEDULE,
        PARAM_DTYPE, REDUCE_DTYPE,
    )
}  # fmt: skip
"""All settings, by their words."""

FORMER = {each.former: each for each in SETTINGS.values() if each.former}
"""The settings by names that they had in plans."""
