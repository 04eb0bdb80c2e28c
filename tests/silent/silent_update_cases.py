"""Silent errors of the optimizer: which parameters it takes for matrices, in which groups, with
which states.
"""

from silent_cases import FP32, UPDATE, Case, own
from silent_fault_cases import faults
from silent_plan_cases import OWN

RULES = OWN + "\noptimizer {\n    root : adamw\n    $blocks.{self_attn,mlp}.*_proj : muon\n}\n"
MUON = own(RULES)
DATA = {**MUON, "settings": FP32}
QV = "$blocks.self_attn.{q,v}_proj"
THIN = own(
    f"{OWN}\noptimizer {{\n    {QV} : muon\n}}\n\nadapters {{\n    {QV} : lora(rank = 1)\n}}\n"
)
FACTORS = own(RULES.replace(": muon", ": muon(lr = 4)"))
CODES = own(OWN + "\noptimizer {\n    root : adamw(state = int8, block = 8)\n}\n")
FUSED = {
    "model": "phi3",
    **own(
        'plan own for phi3\n\nextend "phi3.plan"\n\noptimizer {\n    root : adamw\n'
        "    $blocks.self_attn.qkv_proj : muon(parts = [64, 32, 32])\n"
        "    $blocks.mlp.gate_up_proj   : muon(parts = 2)\n}\n",
        base=("phi3",),
    ),
}
TIED = {
    **MUON,
    "model": "llama-tied",
    "settings": ("pp=2", "microbatches=2", "dp_shard=2", *FP32),
}

UPDATE_CASES = (
    *faults(
        UPDATE,
        (
            "each rank its shard",
            "each_rank_orthogonalizes_its_shard",
            ("deepspeedai/DeepSpeed#8437",),
            "each rank orthogonalizes its shard of a matrix, and the gradients are right",
            MUON,
        ),
        (
            "shards of FSDP",
            "each_rank_orthogonalizes_its_shard",
            ("NVIDIA/Megatron-LM#5961",),
            "without tensor parallelism each data rank orthogonalizes its shard",
            DATA,
        ),
        (
            "ranks without rows",
            "no_rows_to_pick",
            ("microsoft/dion#83",),
            "a rank whose shard is empty raises, and the others wait for it",
            {**THIN, "settings": FP32},
        ),
        (
            "factor of local rows",
            "scaled_by_local_rows",
            ("deepspeedai/DeepSpeed#8437",),
            "the update is scaled by the number of rows of a shard",
            MUON,
        ),
        (
            "fused matrix",
            "fused_weight_as_one_matrix",
            ("InternLM/xtuner#2030", "deepspeedai/DeepSpeed#8580"),
            "the weights of q, k and v, and of gate and up, are orthogonalized as one matrix",
            FUSED,
        ),
        (
            "parts in stored order",
            "parts_in_stored_order",
            ("NVIDIA/Megatron-LM#6326",),
            "the parts of a fused weight are cut in the order in which ranks store its rows",
            FUSED,
        ),
        (
            "tied weight in two groups",
            "last_stage_orthogonalizes_the_head",
            ("NVIDIA/Megatron-LM#4641", "NVIDIA/Megatron-LM#4642"),
            "AdamW steps the tied embedding of the first stage, Muon that of the last one",
            TIED,
        ),
        (
            "groups discarded",
            "factors_of_groups_lost",
            ("deepspeedai/DeepSpeed#8440",),
            "the learning rate of each group is that of the first one",
            FACTORS,
        ),
        (
            "gradients of one group kept",
            "one_group_keeps_its_gradients",
            ("KempnerInstitute/KempnerForge#182",),
            "the gradients of what AdamW steps beside Muon are not zeroed after a step",
            MUON,
        ),
        (
            "states by local size",
            "small_shards_keep_wide_states",
            ("pytorch/ao#4912", "bitsandbytes-foundation/bitsandbytes#2080"),
            "whether a state is in 8 bits follows from the size of a shard",
            CODES,
        ),
    ),
    Case(
        name="embedding as a matrix",
        kind=UPDATE,
        public=("vllm-project/speculators#866", "deepspeedai/DeepSpeed#7641"),
        how="Muon orthogonalizes the update of an embedding",
        **own(RULES, ("    root : adamw\n", "    root : adamw\n    $embedding : muon\n")),
    ),
)
