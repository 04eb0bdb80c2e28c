"""Silent errors that are replayed as a plan, or as options of one."""

from silent_cases import (
    DROPPED,
    FP32,
    IGNORED,
    LAYOUT,
    LOST,
    NORMALIZER,
    OUTPUTS,
    PRECISION,
    RECOMPUTED,
    TOO_OFTEN,
    TP2,
    UNSUMMED,
    Case,
    changed,
    edited,
    own,
    shipped,
    whole,
)

NO_SEQUENCE = (*TP2, "sequence=false")
OWN = 'plan own for llama\n\nextend "llama.plan"\n'
QK = "$blocks.self_attn.{q,k}_norm : sequence(dim = 2, local = true)"
MLA = "mla_kv(rope = config.qk_rope_head_dim)"

ATTENTION = """
override tensor on tp {
    $blocks {
        mlp.{gate,up}_proj : colwise
        mlp.down_proj      : rowwise
    }
}
"""
ALL_HEADS = """        mlp.down_proj      : rowwise
        self_attn              : attributes(num_key_value_groups = split)
        self_attn.q_proj       : colwise
        self_attn.{k,v}_proj   : replicate
        self_attn.o_proj       : rowwise
"""
WHOLE_MLP = """
override tensor on tp {
    $blocks {
        self_attn.{q,k,v}_proj : colwise
        self_attn.o_proj       : rowwise
    }
}
"""
PREFIXED = """
override tensor on tp {
    model.layers.*.self_attn.{q,k,v}_proj : colwise
    model.layers.*.self_attn.o_proj       : rowwise
    model.layers.*.mlp.{gate,up}_proj     : colwise
    model.layers.*.mlp.down_proj          : rowwise
}
"""
DATA_ONLY = """plan own for llama

mesh {
    dp_shard = auto
}

fsdp on dp_shard {
    model.layers.* : unit
    root           : unit
}
"""
PREFIX = own(OWN + PREFIXED, ("    model.layers.*.mlp.", "    layers.*.mlp."))
UNKNOWN_SETTING = {**whole("llama"), "ignored": shipped("llama")}
NO_REPLICAS = changed(
    "llama", ("fsdp on dp_shard_cp, replicate on dp_replicate {", "fsdp on dp_shard_cp {")
)

PLAN_CASES = (
    Case(
        name="final norm",
        kind=UNSUMMED,
        public=("NVIDIA/Megatron-LM#1446",),
        how="under sequence parallelism the last norm gets its shard as a plain tensor",
        **changed(
            "llama",
            (
                "$final_norm : sequence",
                "$final_norm : input(shard(1) -> shard(1), local = true)",
            ),
        ),
    ),
    Case(
        name="block norm",
        kind=UNSUMMED,
        public=("NVIDIA/TransformerEngine#435", "EleutherAI/gpt-neox#1259"),
        how="one of the two norms of a block gets its shard of the sequence as a plain tensor",
        **changed(
            "llama",
            (
                "{input,post_attention}_layernorm : sequence",
                "input_layernorm          : sequence\n"
                "            post_attention_layernorm : "
                "input(shard(1) -> shard(1), local = true)\n"
                "            post_attention_layernorm : "
                "output(shard(1) -> shard(1), local = false)",
            ),
        ),
    ),
    Case(
        name="key norm",
        kind=UNSUMMED,
        public=("NVIDIA-NeMo/RL#3716",),
        how="the norm of the keys, which each rank applies to its own heads, has no rule",
        model="qwen3",
        **changed("qwen3", (QK, QK.replace("{q,k}_norm", "q_norm"))),
    ),
    Case(
        name="query and key norms",
        kind=UNSUMMED,
        public=("NVIDIA-NeMo/RL#3716",),
        how="both norms have no rule, without sequence parallelism",
        model="qwen3",
        settings=NO_SEQUENCE,
        **changed("qwen3", (f"    {QK}\n", "")),
    ),
    Case(
        name="norms of one layer",
        kind=UNSUMMED,
        public=("NVIDIA/Megatron-LM#1446",),
        how="the rule of both norms reaches the first layer, and not the others",
        model="qwen3",
        **changed("qwen3", (QK, QK.replace("$blocks", "model.layers[0]"))),
    ),
    Case(
        name="shared rotary key",
        kind=UNSUMMED,
        public=("NVIDIA/TransformerEngine#1975", "NVIDIA/Megatron-LM#6839"),
        how="the rotary part of a latent (MLA), which the heads of all ranks read, is replicated",
        model="deepseek_v3",
        settings=NO_SEQUENCE,
        **changed("deepseek_v3", (MLA, "replicate")),
    ),
    Case(
        name="keys and values of one head",
        kind=UNSUMMED,
        public=("bigcode-project/Megatron-LM#37",),
        how="the heads of the queries are split and the one head of keys and values is replicated",
        settings=NO_SEQUENCE,
        changes={"num_key_value_heads": 1},
        **own(OWN + ATTENTION, ("        mlp.down_proj      : rowwise\n", ALL_HEADS)),
    ),
    Case(
        name="parameters outside units",
        kind=UNSUMMED,
        public=("areal-project/AReaL#313", "Tencent-Hunyuan/UniRL#7"),
        how="the last norm is in no FSDP unit",
        **changed(
            "llama",
            ("    root : unit(reshard = never)\n", ""),
            ("group($final_norm, $head) : unit", "$head : unit"),
        ),
    ),
    Case(
        name="ignored parameters",
        kind=UNSUMMED,
        public=("areal-project/AReaL#313",),
        how="FSDP ignores the last norm, which trains",
        settings=(),
        **own(
            DATA_ONLY,
            ("fsdp on dp_shard {\n", "fsdp on dp_shard {\n    ignore model.norm\n"),
            base=(),
        ),
    ),
    Case(
        name="latent summed again",
        kind=TOO_OFTEN,
        public=("inclusionAI/AReno#496",),
        how="the whole gradient of a latent's projection (MLA) is summed, of which all but the "
        "rotary part is whole already",
        model="deepseek_v3",
        settings=NO_SEQUENCE,
        **changed("deepseek_v3", (MLA, "replicate(gradient = sum)")),
    ),
    Case(
        name="norm of whole activations",
        kind=TOO_OFTEN,
        public=("modelscope/mcore-bridge#101",),
        how="the gradient of a norm is summed, whose input is replicated",
        settings=NO_SEQUENCE,
        **own(
            OWN + "\ntensor on tp {\n    model.norm : replicate\n}\n",
            (": replicate", ": replicate(gradient = sum)"),
        ),
    ),
    Case(
        name="whole MLP summed",
        kind=OUTPUTS,
        public=("lightseekorg/tokenspeed#80",),
        how="the MLP is not split, and its output is summed as if it were",
        settings=NO_SEQUENCE,
        **own(
            OWN + WHOLE_MLP,
            (
                "o_proj       : rowwise\n",
                "o_proj : rowwise\n        mlp : output(partial -> replicate)\n",
            ),
        ),
    ),
    Case(
        name="attention not summed",
        kind=OUTPUTS,
        public=("FlashML-org/FreeToken#429",),
        how="each rank keeps its part of the sum of the output projection",
        settings=NO_SEQUENCE,
        **changed(
            "llama",
            ("self_attn.o_proj : rowwise\n", "self_attn.o_proj : rowwise(-> partial)\n"),
        ),
    ),
    Case(
        name="wrong from a degree on",
        kind=OUTPUTS,
        public=("sgl-project/sglang#20967",),
        how="from tp = 4 on nothing sums the MLP's output",
        settings=("tp=4", *FP32, "sequence=false"),
        changes={"num_key_value_heads": 4},
        **changed(
            "llama",
            (
                "            mlp.down_proj : rowwise\n",
                "            when tp >= 4 {\n"
                "                mlp.down_proj : rowwise(-> partial)\n"
                "            } else {\n"
                "                mlp.down_proj : rowwise\n"
                "            }\n",
            ),
        ),
    ),
    Case(
        name="bias on every rank",
        kind=OUTPUTS,
        public=("huggingface/text-generation-inference#1036", "Wenyueh/MinivLLM#80"),
        how="every rank adds the bias of the last projection of experts to its part of a sum",
        model="gpt_oss",
        **changed("gpt_oss", ("down_proj_bias = partial", "down_proj_bias = replicate")),
    ),
    Case(
        name="norm over all heads",
        kind=OUTPUTS,
        public=("turboderp-org/exllamav3#141", "EleutherAI/gpt-neox#1424"),
        how="a norm over all heads takes the mean over the heads of its rank",
        model="olmo2",
        **changed(
            "olmo2",
            (
                "self_attn.{q,k}_norm : sequence(dim = 2, local = true)",
                "self_attn.{q,k}_norm : parameters(weight = shard(0))",
            ),
        ),
    ),
    Case(
        name="gate and up of experts",
        kind=LAYOUT,
        public=("NVIDIA-NeMo/Automodel#1324",),
        how="the weight of gate and up of all experts is split as one",
        model="mixtral",
        **changed("mixtral", ("shard(1, parts = 2)", "shard(1)")),
    ),
    Case(
        name="gate and up",
        kind=LAYOUT,
        public=("pytorch/torchtitan#4535", "NVIDIA-NeMo/Automodel#1324"),
        how="the weight of gate and up of an MLP is split as one",
        model="phi3",
        **changed("phi3", ("shard(-1), parts = 2)", "shard(-1))")),
    ),
    Case(
        name="interleaved gate and up",
        kind=LAYOUT,
        public=("vllm-project/vllm#36242",),
        how="a weight whose gate and up alternate is split in halves",
        model="gpt_oss",
        **changed(
            "gpt_oss",
            (
                "gate_up_proj = shard(2, parts = 2, interleaved = true)",
                "gate_up_proj = shard(2, parts = 2)",
            ),
        ),
    ),
    Case(
        name="auxiliary loss",
        kind=NORMALIZER,
        public=("NVIDIA/Megatron-LM#3672",),
        how="a router's auxiliary loss over the rows of each data rank is not that of the batch",
        model="mixtral",
        changes={"output_router_logits": True},
        right_changes={},
        **whole("mixtral"),
    ),
    Case(
        name="positions of a shard",
        kind=LOST,
        public=("vllm-project/speculators#871",),
        how="the embedding returns its shard of the sequence, and the model counts positions in it",
        **changed(
            "llama",
            (
                "$embedding : rowwise(-> shard(1), local = false)",
                "$embedding : rowwise(-> shard(1))",
            ),
        ),
    ),
    Case(
        name="tie in two units",
        kind=DROPPED,
        public=("huggingface/accelerate#4171", "NVIDIA-NeMo/RL#264"),
        how="the tied embedding and head are in two FSDP units",
        model="llama-tied",
        **changed(
            "llama",
            (
                "group($embedding, $final_norm, $head) : unit(reshard = never)",
                "$embedding : unit\n        group($final_norm, $head) : unit(reshard = never)",
            ),
        ),
    ),
    Case(
        name="frozen head",
        kind=DROPPED,
        public=("huggingface/peft#1750", "huggingface/transformers#11903"),
        how="freezing the head freezes the embedding, which is tied to it",
        model="llama-tied",
        **own(
            OWN + "\ntrain {\n    model.norm : frozen\n}\n",
            ("    model.norm : frozen\n", "    model.norm : frozen\n    lm_head    : frozen\n"),
        ),
    ),
    Case(
        name="keys without a prefix",
        kind=IGNORED,
        public=("huggingface/transformers#37549",),
        how="two rules name modules without the `model.` in front of them",
        settings=NO_SEQUENCE,
        ignored=edited(
            PREFIX["right"],
            "own.plan",
            ("    model.layers.*.mlp.{gate,up}_proj     : colwise\n", ""),
            ("    model.layers.*.mlp.down_proj          : rowwise\n", ""),
        ),
        **PREFIX,
    ),
    Case(
        name="unapplied option",
        kind=IGNORED,
        public=("pytorch/torchtitan#3869",),
        how="asynchronous tensor parallelism is asked for, and nothing reads the option",
        **own(OWN, ('llama.plan"\n', 'llama.plan"\n\noption async_tp = true\n')),
    ),
    Case(
        name="unknown mode",
        kind=IGNORED,
        public=("Tencent-Hunyuan/UniRL#321",),
        how="units are to be resharded in a mode that does not exist",
        ignored=edited(
            shipped("llama"),
            "llama.plan",
            ("unit(reshard = except_last)", "unit(reshard = always)"),
        ),
        **changed("llama", ("unit(reshard = except_last)", "unit(reshard = hybrid)")),
    ),
    Case(
        name="replicas that are none",
        kind=IGNORED,
        public=("Tencent-Hunyuan/UniRL#410",),
        how="two replicas are asked for, and no section works over their axis",
        settings=("dp_replicate=2", *FP32),
        ignored=edited(
            NO_REPLICAS["wrong"],
            "llama.plan",
            ("    dp_replicate = 1\n", ""),
            ("mesh {", "option dp_replicate = 1\n\nmesh {"),
        ),
        **NO_REPLICAS,
    ),
    Case(
        name="dropout drawn again",
        kind=RECOMPUTED,
        public=("allenai/OLMo-core#828", "pytorch/torchtitan#1323"),
        how="the recomputation of blocks with dropout draws other masks than the forward pass",
        model="gpt2",
        changes={"resid_pdrop": 0.1},
        settings=(),
        beside=True,
        **own(
            'plan own for gpt2\n\nextend "gpt2.plan"\n\n'
            "override checkpoint {\n    transformer.h.* : full\n}\n",
            (": full", ": full(preserve_rng = false)"),
            base=("gpt2",),
        ),
    ),
    Case(
        name="optimizer in 16 bits",
        kind=PRECISION,
        public=("areal-project/AReaL#1292", "meta-pytorch/torchtune#2254"),
        how="the optimizer steps bf16 parameters without a copy in fp32",
        **own(OWN + "\nload {\n    dtype = fp32\n}\n", ("dtype = fp32", "dtype = bf16")),
    ),
)
