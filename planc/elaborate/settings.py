"""The settings that all families have. No other file knows their names as texts."""

from collections.abc import Iterable
from dataclasses import dataclass

from planc.ir.mesh_axes import CONTEXT, COPIES, EXPERT_TENSOR, EXPERTS, STAGES, TENSOR
from planc.syntax import ast

AUTO = "auto"
"""The value of a setting that planc decides; a condition takes it as true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSetting:
    """A value that `--set` changes in every plan that uses it.

    Args:
        word: its name in plans and on the command line.
        default: its value without `--set`; a value has its type.
        meaning: what it decides.
        section: the section of a plan that it makes or fills.
        axis: whether it is the size of an axis of the mesh, or of the ranks that divide experts.
        others: values besides those of the default's type.
    """

    word: str
    default: bool | int | str
    meaning: str
    section: str
    axis: bool = False
    others: tuple[bool | str, ...] = ()


TP = PlanSetting(
    word=TENSOR, default=1, axis=True, section="tensor", meaning="ranks that split each weight"
)
PP = PlanSetting(
    word=STAGES,
    default=1,
    axis=True,
    section="pipeline",
    meaning="ranks that hold different blocks; a rank's batch is cut into microbatches",
)
CP = PlanSetting(
    word=CONTEXT,
    default=1,
    axis=True,
    section="context",
    meaning="ranks that have a part of every sequence each, for long ones",
)
EP = PlanSetting(
    word=EXPERTS,
    default=1,
    axis=True,
    section="expert",
    meaning="ranks with different experts (expert parallelism), of those along dp_shard, cp and tp",
)
ETP = PlanSetting(
    word=EXPERT_TENSOR,
    default=1,
    axis=True,
    section="expert",
    meaning="1, or the size of tp: its ranks split each divided expert",
)
DP_REPLICATE = PlanSetting(
    word=COPIES, default=1, axis=True, section="fsdp", meaning="copies of the sharded model"
)
SEQUENCE = PlanSetting(
    word="sequence",
    default=AUTO,
    section="tensor",
    others=(True, False),
    meaning="hidden states between blocks are sharded on the sequence dim; auto: where all can be",
)
IMAGES = PlanSetting(
    word="images",
    default="whole",
    section="tensor",
    others=("rows",),
    meaning="rows: each rank of tp and of cp encodes a part of the images; whole: each all of them",
)
RECOMPUTE = PlanSetting(
    word="recompute",
    default=True,
    section="checkpoint",
    meaning="the activations of each block are computed again in the backward pass",
)
LOSS_CHUNKS = PlanSetting(
    word="loss_chunks",
    default=0,
    section="loss",
    meaning="parts of the tokens in which the loss is computed; 0: whole logits",
)
MICROBATCHES = PlanSetting(
    word="microbatches", default=8, section="pipeline", meaning="of a pipeline, in a batch"
)
SCHEDULE = PlanSetting(
    word="schedule",
    default="1f1b",
    section="pipeline",
    meaning="gpipe, 1f1b; interleaved_1f1b, zero_bubble, zbv, dualpipe_v: two stages a rank",
)
BY = PlanSetting(
    word="stages",
    default="blocks",
    section="pipeline",
    others=("work", "balanced"),
    meaning="blocks: as many in each stage; work: as many multiplications by weights, the head's "
    "too; balanced: as much estimated time",
)
STAGES_ROWS = PlanSetting(
    word="stages_rows",
    default=1,
    section="pipeline",
    meaning="rows of a rank's microbatch whose time is estimated for stages=balanced",
)
STAGES_SEQ = PlanSetting(
    word="stages_seq", default=4096, section="pipeline", meaning="tokens of each of these rows"
)
PARAM_DTYPE = PlanSetting(
    word="param_dtype",
    default="bf16",
    section="fsdp",
    meaning="the dtype in which FSDP all-gathers and computes",
)
REDUCE_DTYPE = PlanSetting(
    word="reduce_dtype",
    default="fp32",
    section="fsdp",
    meaning="the dtype in which gradients are reduced",
)

SETTINGS = {
    each.word: each
    for each in (
        TP, PP, CP, EP, ETP, DP_REPLICATE, SEQUENCE, IMAGES, RECOMPUTE, LOSS_CHUNKS, MICROBATCHES,
        SCHEDULE, BY, STAGES_ROWS, STAGES_SEQ, PARAM_DTYPE, REDUCE_DTYPE,
    )
}  # fmt: skip
"""All settings, by their words."""


def uses(setting: PlanSetting, files: Iterable[ast.File]) -> bool:
    """Whether a plan refers to a setting, or declares an option of its name."""
    return any(setting.word in file.first_mentions for file in files)
