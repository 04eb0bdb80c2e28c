"""Silent errors that are replayed as a mistake in the runtime or in the training script; and those
of kinds of parallelism that planc does not have.
"""

from silent_cases import (
    CHECKPOINT,
    CLIPPING,
    DROPPED,
    FP32,
    GROUP,
    LOST,
    NORMALIZER,
    OUTPUTS,
    RANKS,
    RECOMPUTED,
    TOO_OFTEN,
    UNSUMMED,
    VOCABULARY,
    Case,
    Waiting,
    own,
    whole,
)
from silent_plan_cases import NO_SEQUENCE, OWN

REPLICAS = ("dp_replicate=2", "dp_shard=2", *FP32)
LORA = OWN + "\nadapters {\n    $blocks.self_attn.{q,k,v,o}_proj : lora(rank = 4)\n}\n"
TUNED = own(LORA)
MOE = {"model": "mixtral", **whole("mixtral")}
LLAMA = whole("llama")
SPLIT_LOSS = own(
    OWN + "\nloss on tp {\n    lm_head : cross_entropy(chunks = 2, label_smoothing = 0.1)\n}\n"
)
TP4 = ("tp=4", *FP32)


def faults(kind, *rows):
    """A case for each (name, fault, public cases, what is wrong, more arguments)."""
    for name, fault, public, how, more in rows:
        yield Case(name=name, kind=kind, public=public, how=how, fault=fault, **{**LLAMA, **more})


def scripts(kind, *rows):
    """A case for each (name, script, public cases, what is wrong, more arguments)."""
    for name, script, public, how, more in rows:
        yield Case(name=name, kind=kind, public=public, how=how, script=script, **{**LLAMA, **more})


FAULT_CASES = (
    *faults(
        UNSUMMED,
        (
            "inputs of experts",
            "unsummed_inputs",
            ("pytorch/torchtitan#4054", "pytorch/torchtitan#1805"),
            "each rank keeps its part of the gradients of all inputs of split experts",
            MOE,
        ),
        (
            "router scores",
            "unsummed_scores",
            ("pytorch/torchtitan#2387",),
            "each rank keeps its part of the gradient of the router's scores",
            MOE,
        ),
        (
            "gather without autograd",
            "gathered_without_autograd",
            ("NVIDIA-NeMo/Automodel#2995",),
            "the router's scores are gathered by a collective that autograd does not see",
            MOE,
        ),
        (
            "replicas not reduced",
            "replicas_not_reduced",
            ("verl-project/verl#7493", "verl-project/verl#7494"),
            "the all-reduce of gradients over the replicas is off",
            {"settings": REPLICAS},
        ),
        (
            "unit not reduced",
            "last_unit_not_synchronized",
            ("pytorch/pytorch#118298",),
            "after accumulation the gradients of one unit stay switched off",
            {},
        ),
        (
            "adapter after a split input",
            "adapter_b_not_summed",
            ("modelscope/mcore-bridge#173",),
            "the replicated factor behind a rowwise layer sees a shard of the sequence",
            TUNED,
        ),
        (
            "adapter before split outputs",
            "adapter_a_not_summed",
            ("NVIDIA-NeMo/Megatron-Bridge#5634",),
            "the gradient of the replicated factor of an adapter on a colwise layer is not summed",
            {**TUNED, "settings": NO_SEQUENCE},
        ),
    ),
    *faults(
        TOO_OFTEN,
        (
            "expert gradients twice",
            "experts_summed_twice",
            ("pytorch/pytorch#160285",),
            "the gradients of split experts are twice the right ones",
            MOE,
        ),
        (
            "expert gradients by an axis",
            "experts_times_axis",
            ("deepspeedai/DeepSpeed#5618",),
            "the gradients of split experts are multiplied by the size of the axis",
            {**MOE, "settings": TP4, "changes": {"num_key_value_heads": 4}},
        ),
        (
            "identical gradients added",
            "inputs_summed_again",
            ("THUDM/slime#1748",),
            "gradients that all ranks have in full are added up in the backward of a gather",
            MOE,
        ),
        (
            "group of too many ranks",
            "one_unit_divided_again",
            ("NVIDIA/Megatron-LM#6660",),
            "the gradients of one unit are divided by a group of another size",
            {},
        ),
    ),
    *faults(
        OUTPUTS,
        (
            "gradient of a shared bias",
            "bias_gradient_divided",
            ("pytorch/torchtitan#4332",),
            "the share of a bias that each rank adds divides its gradient too",
            {"model": "gpt_oss", **whole("gpt_oss")},
        ),
    ),
    *faults(
        NORMALIZER,
        (
            "tokens of one rank",
            "tokens_of_one_rank",
            ("huggingface/transformers#34373",),
            "each data rank divides its loss by the number of its own tokens",
            {},
        ),
        (
            "divided by all processes",
            "divided_by_all_processes",
            ("meta-pytorch/torchtune#2420",),
            "gradients are divided by the world size, and not by the number of data ranks",
            {},
        ),
    ),
    *scripts(
        NORMALIZER,
        (
            "mean of means",
            "MeanOfMeans",
            ("huggingface/transformers#34191", "meta-pytorch/torchtune#1875"),
            "the loss is the mean over ranks and passes of their means over tokens",
            {},
        ),
    ),
    *faults(
        GROUP,
        (
            "tokens of all processes",
            "tokens_of_all_processes",
            ("OpenPipe/ART#619",),
            "tokens are counted over the global group, so each row counts once per tensor rank",
            {},
        ),
        (
            "rows by global rank",
            "rows_by_global_rank",
            ("huggingface/accelerate#3092",),
            "the index of a rank's rows is that of its process, not of its data rank",
            {},
        ),
    ),
    *faults(
        CLIPPING,
        (
            "norm of own shards",
            "norm_of_own_shards",
            ("pytorch/pytorch#170862",),
            "each rank clips by the norm of its own shards",
            {},
        ),
        (
            "replicated gradients counted again",
            "norm_counts_replicas",
            ("NVIDIA-NeMo/RL#3788",),
            "gradients that are replicated over tp count once per rank",
            {},
        ),
        (
            "norm of experts",
            "norm_without_reducing_experts",
            ("NVIDIA-NeMo/Automodel#3816",),
            "the part of the experts in the norm is not reduced",
            MOE,
        ),
        (
            "norm over one axis",
            "norm_over_one_axis",
            ("NVIDIA/Megatron-LM#6489",),
            "gradients that two axes split are reduced over one of them",
            {},
        ),
        (
            "never clipped",
            "never_clipped",
            ("NVIDIA-NeMo/Automodel#576",),
            "the norm is right, and gradients are not scaled by it",
            {},
        ),
    ),
    *faults(
        LOST,
        (
            "mask dropped",
            "mask_dropped",
            ("areal-project/AReaL#1442",),
            "the attention mask does not reach the model",
            {},
        ),
        (
            "position ids dropped",
            "positions_dropped",
            ("NVIDIA/Megatron-LM#453", "NVIDIA-NeMo/Automodel#2377"),
            "the positions of packed documents do not reach the model",
            {},
        ),
    ),
    *faults(
        DROPPED,
        (
            "tie not restored",
            "ties_not_restored",
            ("NVIDIA-NeMo/RL#227", "facebookresearch/lingua#75"),
            "sharding makes two parameters of a tied one",
            {"model": "llama-tied"},
        ),
    ),
    *faults(
        RECOMPUTED,
        (
            "recomputed without collectives",
            "recomputed_without_reductions",
            ("deepspeedai/DeepSpeed#8357",),
            "all-reduces are left out while activations are recomputed",
            {"settings": NO_SEQUENCE},
        ),
    ),
    *faults(
        VOCABULARY,
        (
            "gradient of labels only",
            "gradient_of_labels_only",
            ("pytorch/pytorch#190746",),
            "the softmax of split logits has no gradient, only the label's logit has",
            SPLIT_LOSS,
        ),
        (
            "softmax of own entries",
            "softmax_of_own_entries",
            ("pytorch/pytorch#190746",),
            "each rank's softmax is over its own part of the vocabulary",
            SPLIT_LOSS,
        ),
        (
            "smoothing by the local vocabulary",
            "smoothing_by_local_vocabulary",
            ("pytorch/pytorch#190746",),
            "label smoothing divides by the entries of a rank, not by the vocabulary",
            SPLIT_LOSS,
        ),
    ),
    *scripts(
        CHECKPOINT,
        (
            "packed weights by rank",
            "SavedByRank",
            ("ROCm/Megatron-LM#63", "huggingface/transformers#48569"),
            "the script saves packed weights in the order of the ranks, with its own code",
            {"model": "phi3", **whole("phi3")},
        ),
    ),
    *scripts(
        RANKS,
        (
            "sampler without a data rank",
            "OwnSampler",
            ("modelscope/DiffSynth-Studio#1223",),
            "every process reads rows of its own, those of a tensor axis too",
            {},
        ),
        (
            "collator that draws",
            "OwnMask",
            ("axolotl-ai-cloud/axolotl#3920",),
            "the collator draws another mask on each rank of a tensor axis",
            {},
        ),
        (
            "same rows everywhere",
            "SameRows",
            ("huggingface/datasets#5360",),
            "every data rank reads the same rows",
            {},
        ),
        (
            "other seeds",
            "OwnSeed",
            ("pytorch/torchtitan#166", "pytorch/pytorch#75870"),
            "each rank builds other weights",
            {},
        ),
        (
            "early optimizer",
            "EarlyOptimizer",
            ("huggingface/accelerate#3394", "pytorch/pytorch#149205"),
            "the optimizer holds the parameters that were there before the plan was applied",
            {},
        ),
    ),
)

WAITING = (
    Waiting(
        kind=GROUP,
        public=("huggingface/transformers#48167",),
        how="evaluation under a context axis reports the loss times the number of its ranks",
        needs="evaluation",
    ),
)
