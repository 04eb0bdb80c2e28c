"""Silent errors of planc itself, which users or attacks have found, and of scripts that change a
model after the plan is applied.
"""

from silent_axis_cases import PIPELINE, SEQUENCE
from silent_cases import (
    AROUND,
    CHANGED,
    CHECKPOINT,
    CLIPPING,
    DROPPED,
    FP32,
    LAYOUT,
    LOST,
    LOUD,
    NORMALIZER,
    OUTPUTS,
    REFUSED,
    SWALLOWED,
    TOO_OFTEN,
    UPDATE,
    VOCABULARY,
    Case,
    own,
    whole,
)
from silent_fault_cases import LLAMA, TP4, faults
from silent_plan_cases import OWN

LOSS = own(OWN + "\nloss on tp {\n    lm_head : cross_entropy(chunks = 4)\n}\n")
LONG_ROTARY = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + n for n in range(8)],
        "factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "max_position_embeddings": 32,
}
EXPERTS_BY_MUON = own(
    'plan own for mixtral\n\nextend "mixtral.plan"\n\noptimizer {\n    root : adamw\n'
    "    $experts : muon\n}\n",
    base=("mixtral",),
)
FUSED = (
    'plan own for phi3\n\nextend "phi3.plan"\n\noptimizer {\n    root : adamw\n'
    "    $blocks.mlp.gate_up_proj : muon\n}\n"
)


def mended(kind, *rows):
    """A case for each (name, script, public cases, what is wrong, more arguments)."""
    for name, script, public, how, more in rows:
        yield Case(name=name, kind=kind, public=public, how=how, script=script, **{**LLAMA, **more})


MENDED_CASES = (
    *mended(
        NORMALIZER,
        (
            "smoothed loss by a class name",
            "Smoothed",
            ("huggingface/transformers#17960",),
            "a smoothed loss shifts labels if the name of the model's class is in a list, which "
            "FSDP changes",
            {"settings": FP32, "before": "class_names_of_fsdp"},
        ),
        (
            "smoothed loss of a Trainer",
            "SmoothedByTrainer",
            ("huggingface/transformers#17960",),
            "Trainer looks for the name of the model's class, which FSDP changes, in a list of "
            "those whose labels it shifts",
            {"before": "class_names_of_fsdp", "twin": "OfTrainer"},
        ),
        (
            "labels of a rank in a Trainer",
            "LabelsOfRank",
            ("huggingface/transformers#34242", "huggingface/transformers#39395"),
            "with `average_tokens_across_devices=False` each data rank divides by the number of "
            "its own labels",
            {"twin": "OfTrainer"},
        ),
        (
            "means of passes in a Trainer",
            "MeansOfPasses",
            ("huggingface/transformers#37766",),
            "the loss of a model that takes no number of labels is a mean over those of a data "
            "rank",
            {"before": "means_of_ranks", "twin": "OfTrainer"},
        ),
        (
            "labels of the next tokens",
            "NextLabels",
            ("huggingface/transformers#46204", "unslothai/unsloth-zoo#348"),
            "a step is divided by the number of `labels`, and the loss takes `shift_labels`",
            {"before": "labels_counted"},
        ),
        (
            "another ignored label",
            "OtherIgnored",
            ("karpathy/nanoGPT#297",),
            "a step is divided by the number of labels that are not -100, and the loss has another "
            "`ignore_index`",
            {**SEQUENCE, "before": "other_labels_counted"},
        ),
        (
            "count of local labels",
            "LocalCount",
            ("huggingface/transformers#34373",),
            "each data rank passes the number of the labels of its own rows",
            {},
        ),
        (
            "count without context ranks",
            "CountOfParts",
            ("verl-project/verl#5983",),
            "the number of labels leaves out the ranks of a context axis",
            {**SEQUENCE, "twin": "CountOfRows"},
        ),
        (
            "mean of a script's own loss",
            "OwnMeans",
            ("PrimeIntellect-ai/prime-rl#1960", "vllm-project/speculators#942"),
            "the script computes the cross entropy of logits, a mean over the labels of a rank",
            {"twin": "OwnSums"},
        ),
        (
            "own loss of a part",
            "ShiftedPart",
            ("modelscope/ms-swift#10185",),
            "the script shifts the labels of a part of a sequence",
            {**SEQUENCE, "twin": "NextOfPart"},
        ),
    ),
    *mended(
        LOST,
        (
            "frequencies of the longest row",
            "LongRows",
            ("QwenLM/Qwen#401", "huggingface/transformers#25104"),
            "rotary embeddings choose frequencies by the longest row of a data rank",
            {"before": "longest_of_a_rank", "changes": LONG_ROTARY},
        ),
    ),
    Case(
        name="sum of gradients",
        kind=NORMALIZER,
        public=("meta-pytorch/torchtune#2172", "radixark/miles#3231"),
        how="gradients of four data ranks are divided by three",
        settings=FP32,
        **own(
            f"{OWN}\noverride fsdp on dp_shard_cp, replicate on dp_replicate {{\n"
            "    divide = 4\n    precision(param = param_dtype, reduce = reduce_dtype)\n"
            "    $blocks : unit(reshard = except_last)\n    root : unit(reshard = never)\n}\n",
            ("divide = 4", "divide = 3"),
        ),
    ),
    *mended(
        CLIPPING,
        (
            "norm of one stage",
            "NormOfStage",
            ("pytorch/torchtitan#596", "Modalities/modalities#313"),
            "torch's `clip_grad_norm_` clips by the norm of the gradients of a pipeline stage",
            PIPELINE,
        ),
        (
            "norms of a loop over one stage",
            "NormOfLoop",
            ("pytorch/torchtitan#596",),
            "the script sums the norms of the gradients of a pipeline stage",
            PIPELINE,
        ),
        (
            "weights scaled by one stage",
            "WeightsOfStage",
            ("NVIDIA-NeMo/Megatron-Bridge#4998",),
            "the script scales weights to a norm that it computes of the weights of a pipeline "
            "stage",
            {**PIPELINE, "twin": "WeightsOfModel"},
        ),
    ),
    *mended(
        VOCABULARY,
        (
            "loss of the script replaced",
            "OwnLoss",
            ("huggingface/trl#5837",),
            "a loss in chunks takes the place of the loss that the script gives the model",
            {**LOSS, "twin": "LossOfTransformers"},
        ),
    ),
    *mended(
        CHECKPOINT,
        (
            "shards beside a file",
            "TwoCopies",
            ("Neph0s/CoSER#3", "Blaizzy/mlx-vlm#1464"),
            "the shards of an index are loaded, and `from_pretrained` loads the file beside them",
            {"before": "index_first", "twin": "Loaded"},
        ),
        (
            "weights without scales",
            "WithoutScales",
            ("unslothai/unsloth#6200",),
            "weights in fp8 are loaded without the scales of their values",
            {"before": "cast_as_they_are", "twin": "Loaded"},
        ),
    ),
    *mended(
        CHANGED,
        (
            "attention set later",
            "AttentionSet",
            ("huggingface/accelerate#4177",),
            "the configuration gets another attention, which sees the keys of one part",
            SEQUENCE,
        ),
        (
            "hook on tokens",
            "MixingHook",
            ("pytorch/torchtitan#1728",),
            "a forward hook takes the mean over tokens, of which each rank has a part",
            {**SEQUENCE, "twin": "ReadingHook"},
        ),
        (
            "hook on blocks of stages",
            "ScalingHook",
            ("pytorch/torchtitan#1728",),
            "a forward hook of a block is called where another stage has the block",
            PIPELINE,
        ),
        (
            "hook on a gradient",
            "GradientHook",
            ("meta-pytorch/torchrec#4268",),
            "a hook of a parameter in an FSDP unit is never called",
            {"twin": "DoubledGradient"},
        ),
        (
            "data of parameters",
            "OtherData",
            ("pytorch/pytorch#157391",),
            "FSDP computes with the values from before `parameter.data` was set",
            {"twin": "CopiedData"},
        ),
        (
            "parameter added later",
            "AddedParameter",
            ("areal-project/AReaL#313", "Tencent-Hunyuan/UniRL#7"),
            "nothing reduces the gradient of a parameter that a block gets later",
            {"settings": FP32, "twin": "AddedBefore"},
        ),
        (
            "attribute of a recomputed block",
            "Multiplier",
            ("pytorch/pytorch#78854",),
            "the wrapper of a recomputed block stores an attribute that the block's forward reads",
            {"model": "granite", "before": "attributes_on_wrappers", "twin": "MultiplierBefore"},
        ),
        (
            "module shared later",
            "SharedModule",
            ("facebookresearch/lingua#84",),
            "a block gets the MLP of another one, whose unit is another one too",
            {"settings": FP32},
        ),
        (
            "weight tied later",
            "TiedLater",
            ("meta-pytorch/torchtune#616",),
            "the head gets the weight of the embedding, which is sharded in another unit",
            {"settings": FP32},
        ),
    ),
    *mended(
        AROUND,
        (
            "penalty of gradients",
            "Penalty",
            ("soran-ghaderi/torchebm#244",),
            "`torch.autograd.grad` gives no gradients of parameters in FSDP units",
            {
                "settings": FP32,
            },
        ),
        (
            "call with other values",
            "OtherValues",
            ("soran-ghaderi/torchebm#244",),
            "`functional_call` computes with the model's own parameters, not with those it gets",
            {"settings": FP32},
        ),
    ),
    *mended(
        SWALLOWED,
        (
            "token outside the vocabulary",
            "UnknownToken",
            ("NVIDIA/Megatron-LM#2459",),
            "a token id that no rank has in its shard gets an embedding of zeros",
            {},
        ),
        (
            "label outside the vocabulary",
            "UnknownLabel",
            ("pytorch/torchtitan#4297",),
            "a label that no rank has in its shard is no label of a loss in chunks",
            {**LOSS, "before": "labels_unchecked"},
        ),
    ),
    *mended(
        LOUD,
        (
            "rank without rows",
            "RowsOnOneRank",
            ("NVIDIA-NeMo/Megatron-Bridge#5527", "LBANN/lbann#97"),
            "the last batch has rows for the first data rank alone",
            {"twin": "LabelsOnOneRank"},
        ),
        (
            "pass that raised",
            "RaisedPass",
            ("pytorch/torchtitan#1329",),
            "a backward pass raises, and the script continues with the next batch",
            {"before": "failed_passes_left"},
        ),
        (
            "full weights into shards",
            "FullWeights",
            ("pytorch/pytorch#136336",),
            "`load_state_dict` gets full tensors for shards",
            {"twin": "Loaded"},
        ),
        (
            "layers cut off",
            "FewerLayers",
            ("facebookresearch/fairseq#1403",),
            "the script cuts off blocks of a model under stages",
            PIPELINE,
        ),
        (
            "model pickled",
            "Pickled",
            ("pytorch/pytorch#67950",),
            "the script pickles a model whose classes FSDP has changed",
            {"before": "pickled_as_torch_does"},
        ),
    ),
    *mended(
        REFUSED,
        (
            "arguments passed on",
            "PassedArguments",
            ("huggingface/sentence-transformers#3509",),
            "the forward of the script's class is `(self, *args, **kwargs)`",
            {},
        ),
    ),
    *mended(
        DROPPED,
        (
            "tied by the script",
            "TiedBefore",
            ("NVIDIA-NeMo/RL#227", "NVIDIA-NeMo/RL#264"),
            "the script ties the head to the embedding, and the configuration does not say so",
            {"settings": FP32},
        ),
    ),
    Case(
        name="experts reduced in fp64",
        kind=TOO_OFTEN,
        public=("pytorch/pytorch#167178", "pytorch/pytorch#155903"),
        how="torch divides gradients of one rank twice, in all dtypes but fp32 and bf16",
        model="mixtral",
        settings=("ep=4", "param_dtype=fp32", "reduce_dtype=fp64"),
        before="divided_twice",
        **whole("mixtral"),
    ),
    *(
        Case(
            name=f"heads of {model}",
            kind=LAYOUT,
            public=("vipshop/cache-dit#581",),
            how="four ranks split six heads, whose features they can divide",
            model=model,
            changes=changes,
            right_changes={},
            settings=TP4,
            **whole(plan),
        )
        for model, plan, changes in (
            ("gpt_neox", "gpt_neox", {"num_attention_heads": 6, "hidden_size": 96}),
            (
                "deepseek_v3",
                "deepseek_v3",
                {"num_attention_heads": 6, "num_key_value_heads": 6},
            ),
        )
    ),
    *faults(
        OUTPUTS,
        (
            "end of the context",
            "context_ends_early",
            ("huggingface/accelerate#4177",),
            "a context ends at a block before the last one, which is of an earlier kind",
            {
                "model": "deepseek_v4",
                "settings": ("cp=2", *FP32),
                "changes": {
                    "num_hidden_layers": 4,
                    "layer_types": [
                        "sliding_attention",
                        "compressed_sparse_attention",
                        "heavily_compressed_attention",
                        "compressed_sparse_attention",
                    ],
                    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
                },
                **own('plan own for deepseek_v4\n\nextend "deepseek_v4"\n', base=()),
            },
        ),
    ),
    *faults(
        UPDATE,
        (
            "experts as one matrix",
            "fused_weight_as_one_matrix",
            ("NVIDIA/Megatron-LM#7077", "AI-Hypercomputer/maxtext#4798"),
            "gate and up of experts are two matrices under tp, and one under ep",
            {"model": "mixtral", "settings": ("ep=2", *FP32), **EXPERTS_BY_MUON},
        ),
    ),
    Case(
        name="parts of another weight",
        kind=UPDATE,
        public=("NVIDIA/Megatron-LM#7077",),
        how="gate and up are cut where one ends in the middle of the other",
        model="phi3",
        **own(FUSED, (": muon\n", ": muon(parts = [64, 128])\n"), base=("phi3",)),
    ),
    Case(
        name="router as a matrix",
        kind=UPDATE,
        public=("AI-Hypercomputer/maxtext#4843",),
        how="Muon orthogonalizes the update of a router",
        model="mixtral",
        **own(
            'plan own for mixtral\n\nextend "mixtral.plan"\n\noptimizer {\n    root : adamw\n}\n',
            ("    root : adamw\n", "    root : adamw\n    $blocks.mlp.gate : muon\n"),
            base=("mixtral",),
        ),
    ),
)
