"""Silent errors of pipelines, split sequences and divided experts."""

from silent_cases import (
    DROPPED,
    FP32,
    LAYOUT,
    LOST,
    NORMALIZER,
    OUTPUTS,
    TOO_OFTEN,
    UNSUMMED,
    Case,
    own,
    whole,
)

LAYERS = "layers are dropped at a split"
LOST_PASSES = "gradients of a pass are lost"
PIPELINE = {
    **whole("llama"),
    "settings": ("pp=2", "microbatches=2", "dp_shard=2", *FP32),
}
SEQUENCE = {
    **own(
        """plan own for llama

mesh {
    dp_shard = auto
    cp       = 2
}

context on cp {
    attention = all_gather
    balance   = head_tail
}

fsdp on dp_shard * cp {
    model.layers.* : unit
    root           : unit
}
"""
    ),
    "settings": (),
}
IMAGES = {
    "model": "qwen3_vl",  # the plan that states its layouts has neither axis
    **own('plan own for qwen3_vl\n\nextend "qwen3_vl"\n', base=()),
}
PARTS_OF_IMAGES = """override context on cp {
    attention = ulysses
}
"""
DENOISED = {
    "model": "flux.1-dev",
    **own('plan own for FluxTransformer2DModel\n\nextend "flux"\n', base=()),
    "settings": ("cp=2", *FP32),
}
DENOISED_VIDEO = {
    "model": "hunyuanvideo",
    **own(
        "plan own for HunyuanVideoTransformer3DModel\n\n"
        f'extend "hunyuan_video"\n\n{PARTS_OF_IMAGES}',
        base=(),
    ),
    "settings": ("cp=2", *FP32),
}
EXPERTS = {"model": "mixtral", **whole("mixtral"), "settings": ("ep=2", *FP32)}
ADAPTED = {
    "model": "mixtral",
    **own(
        'plan own for mixtral\n\nextend "mixtral.plan"\n\nadapters {\n'
        "    $experts : lora(rank = 4)\n}\n",
        base=("mixtral",),
    ),
}


def rows(arguments, *cases):
    """A case for each (name, fault, kind, public cases, what is wrong, more arguments)."""
    for name, fault, kind, public, how, more in cases:
        given = {**arguments, **more}
        yield Case(name=name, kind=kind, public=public, how=how, fault=fault, **given)


AXIS_CASES = (
    *rows(
        PIPELINE,
        (
            "block of no stage",
            "stage_without_a_block",
            LAYERS,
            ("pytorch/torchtitan#963", "NVIDIA/Megatron-LM#1304", "NVIDIA/Megatron-LM#844"),
            "the first of two stages leaves out the second of its blocks",
            {"changes": {"num_hidden_layers": 4}},
        ),
        (
            "masks of microbatches",
            "microbatches_with_the_first_mask",
            LOST,
            ("pytorch/torchtitan#1723", "NVIDIA-NeMo/Automodel#3208"),
            "each microbatch of a pipeline gets the mask and the positions of the first",
            {},
        ),
        (
            "microbatches average",
            "microbatches_scale_gradients",
            NORMALIZER,
            ("pytorch/torchtitan#2972",),
            "the schedule divides gradients by the number of microbatches, which the loss does too",
            {},
        ),
        (
            "tokens of all stages",
            "gradients_times_tokens",
            NORMALIZER,
            ("pytorch/torchtitan#2972",),
            "gradients of pipeline stages are multiplied by a number of data ranks too many",
            {},
        ),
        (
            "tied ends of a pipeline",
            "ends_apart",
            DROPPED,
            ("uw-syfi/piper#13",),
            "the embedding and the head that are tied get the gradients of their own stage",
            {"model": "llama-tied"},
        ),
        (
            "accumulated before the last batch",
            "gradients_of_the_last_batch",
            LOST_PASSES,
            ("NVIDIA-NeMo/Automodel#3530",),
            "a stage forgets the gradients of the batches before the last one of a step",
            {},
        ),
    ),
    *rows(
        SEQUENCE,
        (
            "label of one part",
            "halved_by_the_other_part",
            NORMALIZER,
            ("NVIDIA/Megatron-LM#906", "PrimeIntellect-ai/prime-rl#2562"),
            "the loss is divided by the labels of all context ranks, and averaged over these too",
            {},
        ),
        (
            "documents of a split sequence",
            "documents_see_each_other",
            LOST,
            ("huggingface/trl#6843", "PrimeIntellect-ai/prime-rl#2392"),
            "packed documents see each other where their sequence is split",
            {},
        ),
        (
            "padding of a split sequence",
            "padding_seen",
            LOST,
            ("huggingface/accelerate#3700",),
            "queries of one rank see the padding that another rank holds",
            {},
        ),
        (
            "labels of a split sequence",
            "labels_shifted_late",
            LOST,
            ("huggingface/transformers#48491", "NVIDIA-BioNeMo/bionemo-recipes#1449"),
            "labels are shifted after the split: the last token of each part predicts nothing",
            {},
        ),
        (
            "positions of a split sequence",
            "positions_from_zero",
            LOST,
            ("NVIDIA/Megatron-LM#5243",),
            "positions begin at zero in the part of each rank",
            {},
        ),
        (
            "keys of a split sequence",
            "keys_of_one_rank",
            UNSUMMED,
            ("huggingface/diffusers#14265", "NVIDIA/Megatron-LM#1464"),
            "keys get the gradient of the queries of their own rank alone",
            {},
        ),
    ),
    *rows(
        {},
        (
            "documents of one state",
            "documents_share_a_state",
            LOST,
            ("PrimeIntellect-ai/prime-rl#3000",),
            "where a sequence is split, the state of a packed document goes on in the next one",
            {"model": "nemotron_h", **whole("nemotron_h"), "settings": ("cp=2", *FP32)},
        ),
        (
            "delta rule over documents",
            "delta_rule_over_documents",
            LOST,
            ("THUDM/slime#1686", "NovaSky-AI/SkyRL#2056"),
            "convolutions end with a packed document, and the state of the delta rule does not",
            {"model": "qwen3_next", **whole("qwen3_next")},
        ),
        (
            "images of one part",
            "images_of_one_part",
            UNSUMMED,
            ("NVIDIA-NeMo/Megatron-Bridge#4784", "NVIDIA/Megatron-LM#3816"),
            "features of images get the gradient of the tokens that one rank of a sequence has",
            {**IMAGES, "settings": ("cp=2", *FP32)},
        ),
        (
            "loss of all patches",
            "patches_without_a_scale",
            NORMALIZER,
            ("verl-project/verl-omni#59",),
            "each rank gives its own patches the gradient of one loss, and the mean over the ranks "
            "divides it again",
            DENOISED,
        ),
        (
            "mask of text and patches",
            "mask_in_another_order",
            LOST,
            ("verl-project/verl-omni#59",),
            "where heads are exchanged for tokens, the mask stands in another order than text and "
            "patches of all ranks",
            DENOISED_VIDEO,
        ),
        (
            "features of later stages",
            "features_not_sent",
            OUTPUTS,
            ("vllm-project/vllm#40282",),
            "blocks of later stages do not get the features of images that are added after them",
            {**IMAGES, "settings": ("pp=2", "microbatches=2", "dp_shard=2", *FP32)},
        ),
        (
            "adapters of split experts",
            "factors_of_experts_not_summed",
            UNSUMMED,
            ("NVIDIA-NeMo/Megatron-Bridge#5634",),
            "the factors that each rank of a tensor axis has whole keep their own gradients",
            ADAPTED,
        ),
        (
            "adapters of other experts",
            "factors_of_other_experts",
            LAYOUT,
            ("unslothai/unsloth-zoo#1269",),
            "each expert is changed by one factor of its own and one of another expert",
            {**ADAPTED, "settings": ("ep=2", *FP32)},
        ),
    ),
    *rows(
        EXPERTS,
        (
            "divisor of expert gradients",
            "experts_without_a_divisor",
            TOO_OFTEN,
            ("pytorch/pytorch#160285", "deepspeedai/DeepSpeed#5618"),
            "gradients of dispatched experts are multiplied by the number of their ranks",
            {},
        ),
        (
            "dispatch summed twice",
            "dispatch_summed_twice",
            TOO_OFTEN,
            ("deepspeedai/DeepSpeed#5618",),
            "the gradients of tokens that come back from experts count twice",
            {},
        ),
        (
            "router of dispatched tokens",
            "router_without_gradient",
            OUTPUTS,
            ("NVIDIA-NeMo/Automodel#2995", "NVIDIA-NeMo/Automodel#2092"),
            "tokens come back weighted, and the weights get no gradient",
            {},
        ),
    ),
)
