"""Silent errors of fp8 matmuls: which layers have them, with which scales and sizes.

They come last: they have torchao imported, beside which peft does not run. Few layers are rounded:
torchao sums emulated products in float32, so that a number on the border between two may be rounded
to either, and right twins differ, the more often the more numbers there are.
"""

from silent_cases import EIGHT_BITS, FP32, Case, own
from silent_fault_cases import faults
from silent_plan_cases import OWN

RULES = """
compile {
    $blocks : block
}

matmul {
    $blocks.mlp.down_proj : fp8
}
"""
TENSORWISE = own(OWN + RULES)
ROWWISE = OWN + RULES.replace("down_proj : fp8", "*_proj : fp8(recipe = rowwise)")
BLOCKS = own(OWN + RULES.replace("fp8", "mxfp8"))
STYLE = """
style theirs = python "torchao.float8.float8_tensor_parallel:Float8ColwiseParallel"

tensor on tp {
    override $blocks.mlp.{gate,up}_proj : theirs
}
"""
ROUTED = 'plan own for gemma4_text\n\nextend "gemma4.plan"\n' + RULES

EIGHT_BIT_CASES = (
    Case(
        name="router in fp8",
        kind=EIGHT_BITS,
        public=("axolotl-ai-cloud/axolotl#3791",),
        how="the linear layer that scores experts is rounded with all the others",
        model="gemma4-experts",
        changes={"num_experts": 16},
        settings=FP32,
        **own(
            ROUTED,
            ("_proj : fp8\n", "_proj : fp8\n    $blocks.router.proj   : fp8\n"),
            base=("gemma4",),
        ),
    ),
    Case(
        name="sizes of a rank",
        kind=EIGHT_BITS,
        public=("ROCm/Megatron-LM#130",),
        how="a rank has 24 features of an MLP, and a product in fp8 takes multiples of 16",
        changes={"intermediate_size": 48},
        right_changes={},
        **own(ROWWISE),
    ),
    Case(
        name="blocks of shards",
        kind=EIGHT_BITS,
        public=("ROCm/Megatron-LM#130",),
        how="layers that tensor parallelism splits are in mxfp8, with 64 features on a rank: whole "
        "blocks of 32, and not of 128",
        changes={"intermediate_size": 128},
        **own(ROWWISE, ("fp8(recipe = rowwise)", "mxfp8")),
    ),
    Case(
        name="style of another recipe",
        kind=EIGHT_BITS,
        public=("pytorch/torchtitan#3109",),
        how="torchao's style for one scale a tensor is on layers with a scale a row",
        **own(ROWWISE, ("\ncompile {", STYLE + "\ncompile {")),
    ),
    *faults(
        EIGHT_BITS,
        (
            "largest value of a shard",
            "largest_value_of_a_shard",
            ("pytorch/torchtitan#3109",),
            "the scale of a tensor is that of each rank's shard",
            TENSORWISE,
        ),
        (
            "largest value of data ranks",
            "largest_value_of_other_rows",
            ("NVIDIA/Megatron-LM#442",),
            "the scale of a tensor is taken over data ranks, and not over those that hold it",
            TENSORWISE,
        ),
        (
            "gradients in e5m2",
            "gradients_with_two_bits",
            ("NVIDIA-NeMo/Megatron-Bridge#638",),
            "gradients in mxfp8 are rounded to two bits of a fraction",
            {**BLOCKS, "settings": FP32},
        ),
    ),
)
