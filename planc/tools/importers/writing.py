"""Settings -> the statements of a plan that extends the plan of a family."""

from collections.abc import Mapping
from math import prod
from typing import Any

from planc.elaborate.settings import (
    CP,
    LOSS_CHUNKS,
    MICROBATCHES,
    PARAM_DTYPE,
    PP,
    RECOMPUTE,
    REDUCE_DTYPE,
    SCHEDULE,
    SEQUENCE,
    PlanSetting,
)
from planc.ops.phrases import literal
from planc.tools.importers.family import Base
from planc.tools.importers.peer import COST, LEFT, LOST, Peer
from planc.tools.importers.transformers_plans import (
    expert_section,
    fsdp_units,
    record_stages,
    tensor_section,
)

BLOCKS = "$blocks"
"""The list of blocks of a plan that extends a family's."""

_ACTIONS = {
    "ops": "ops(save = [attention, matmul(every = 2), reduce, exchange])",
    "offload": "full(offload = cpu)",
}
_MESH = (
    ("pp_size", "pp = 1"),
    ("replicate_size", "dp_replicate = 1"),
    ("shard_size", "dp_shard = auto"),
    ("cp_size", "cp = 1"),
    ("tp_size", "tp = 1"),
    ("ep_size", "ep = 1"),
    ("etp_size", "etp = 1"),
)
"""The settings of the mesh, outermost axis first, and the axes without them."""

_HEADER = ("model", "flavor", "block_class", "world", "nodes", "gpus")
_SIZES = ("shard_size", "replicate_size", "cp_size", "tp_size", "pp_size")
_VIRTUAL = ("virtual", "virtual_layers")
_FROZEN: dict[str, tuple[tuple[str, ...], tuple[str, str]]] = {
    "frozen_embeddings": ((), ("same", "")),
    "frozen_vision": (
        ("vision_tower", "visual", "vision_model"), ("same", "without effect: no vision tower")
    ),
    "frozen_projector": (
        ("multi_modal_projector", "merger"), ("lost", LOST["frozen"])
    ),
    "frozen_language": (("language_model",), ("lost", LOST["frozen"])),
}  # fmt: skip
"""Settings that freeze a part of the model: its names in families' plans, and where none has it."""
_TITAN = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
"""torchtitan's names of linear layers, and those of transformers."""
_LORA = {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout"}


class Writer:
    """Writes each setting where a plan has it, and records what became of it.

    Attributes:
        fate: for each setting that was given, `plan` and its line, or `same` or `lost` and why.
    """

    def __init__(
        self, base: Base, peer: Peer, given: Mapping[str, Any], keys: Mapping[str, str]
    ) -> None:
        self.base, self.peer = base, peer
        self.given, self.keys = dict(given), dict(keys)
        self.fate: dict[str, tuple[str, str]] = {}
        self.aliases: dict[str, str] = {}
        self.name = f"{base.plan}.plan"

    def plan_lines(self) -> list[str]:
        """The lines of the plan after its header."""
        self.fate.update((word, ("plan", "the header")) for word in _HEADER)
        if "," in self.given.get("block_class", ""):
            self.record("cost", COST["units"], "block_class")
        self._strategy()
        lines = [f'extend "{self.name}"', ""]
        for part in (
            self._blocks, self._options, self._mesh, self._stages, self._context, self._experts,
            self._load, self._adapters, self._train, self._tensor, self._checkpoint, self._compile,
            self._matmul, self._fsdp,
        ):  # fmt: skip
            lines += part()
        return lines

    @property
    def header(self) -> list[str]:
        """Comments: what checks the plan, and the keys that name the model and the ranks."""
        check = (
            f"planc check {self.base.model or 'MODEL'} THIS.plan --world-size {self.world or 'N'}"
        )
        keys = ", ".join(filter(None, (self.keys.get(word) for word in _HEADER)))
        guess = "# The family is a guess from a name in the file; --model MODEL says it for sure"
        guessed = bool(self.base.family and not self.base.model and not self.peer.exact)
        ranks = f"# The model and the ranks: {keys}"
        note = f"# {self.peer.note}"
        noted = bool(self.peer.note)
        return [f"# Prove it: {check}", *[ranks] * bool(keys), *[guess] * guessed, *[note] * noted]

    @property
    def implied_fates(self) -> dict[str, tuple[str, str]]:
        """The fate of keys that follow from other settings, by the reason that they have alone."""
        result = {}
        if (self.given.get("pp_size") or 1) == 1:
            result[COST["pipeline"]] = ("same", "without effect: one pipeline stage")
        if any(self.fate.get(w, ("",))[0] == "plan" for w in ("offload", "offload_device")):
            result[COST["offload_optimizer"]] = ("plan", "offload(cpu)")
        return result

    @property
    def world(self) -> int:
        """The number of ranks, as far as the file tells; else 0."""
        given = self.given
        sizes = [given.get(word) or 1 for word in _SIZES]
        if given.get("shard_size") and "auto" not in sizes:
            return prod(sizes)
        gpus = given.get("gpus") or 8 * bool(given.get("nodes"))
        return int(given.get("world") or (given.get("nodes") or 1) * gpus)

    # How a setting is recorded ----------------------------------------------------------------

    def add_line(self, text: str, *words: str) -> list[str]:
        """A line of the plan, with the keys that it comes from."""
        self.fate.update((word, ("plan", text.strip())) for word in words)
        keys = ", ".join(filter(None, (self.keys.get(word) for word in words)))
        return [f"{text}    # {keys or f'the default of {self.peer.title}'}"]

    def record(self, kind: str, why: str, *words: str) -> list[str]:
        self.fate.update((word, (kind, why)) for word in words)
        return []

    def _option(self, word: str, setting: PlanSetting, value: Any) -> list[str]:
        """A setting of the family's plan, where its default is another."""
        name = setting.word
        if name not in self.base.options:
            return self.record("lost", f"{self.name} has no setting {name}", word)
        shown = literal(value)
        if self.base.options[name] == value:
            return self.record("same", f"{name} = {shown} in {self.name}", word)
        return self.add_line(f"override option {name} = {shown}", word)

    def _alias(self, word: str, value: Any, *by: str) -> None:
        """Sets a setting that others of the file decide, which then share its fate."""
        self.given[word] = value
        self.keys[word] = ", ".join(filter(None, (self.keys.get(each) for each in by)))
        self.aliases.update((each, word) for each in by)

    def fate_of(self, word: str) -> tuple[str, str]:
        return self.fate.get(self.aliases.get(word, word), ("lost", "import cannot write it here"))

    # Sections ---------------------------------------------------------------------------------

    def _strategy(self) -> None:
        """ZeRO stages and FSDP's strategies: the sizes of axes, and how units are resharded."""
        given = self.given
        strategy = given.get("sharding_strategy") if given.get("full_sharding") else None
        for word, meant in (("full_sharding", "shard"), ("distributed_optimizer", "grad")):
            given[word] = meant if given.get(word) and not strategy else None
        given["sharding_strategy"] = strategy
        words = ("sharding_strategy", "full_sharding", "distributed_optimizer", "zero_stage",
                 "strategy")  # fmt: skip
        self.record("same", "parameters, gradients and optimizer state are sharded", *words)
        word = next((w for w in words if given.get(w)), "")
        kind, _, offload = (given.get(word) or "").partition(" ")
        if offload:
            self._alias("offload", True, word)
        if kind == "copy" and not given.get("shard_size"):
            self._alias("shard_size", 1, word)
            self._alias("replicate_size", "auto", word)
        elif kind == "grad":
            self._alias("reshard", False, word)
        elif kind == "hybrid" and not given.get("replicate_size"):
            self.record("cost", "set the axis dp_replicate to the number of nodes", word)
        if (mics := given.get("mics_size")) and not given.get("shard_size"):
            self._alias("shard_size", mics, "mics_size")
            given["replicate_size"] = given.get("replicate_size") or "auto"
            self.keys.setdefault("replicate_size", self.keys["mics_size"])

    def _blocks(self) -> list[str]:
        """The wrapped class, where no plan of a family says what blocks are."""
        name = self.given.get("block_class", "")
        if self.base.known or not name.isidentifier():
            return []
        return [*self.add_line(f"override let {BLOCKS[1:]} = **<{name}>", "block_class"), ""]

    def _options(self) -> list[str]:
        given, lines = self.given, list[str]()
        many = (given.get("tp_size") or 1) > 1
        if not many:
            self.record("same", "without effect: tp = 1", "sequence_parallel")
        elif "sequence_parallel" in given:
            value = given["sequence_parallel"]
            lines += self._option("sequence_parallel", SEQUENCE, value)
        self.record("same", "the family's plan says which dtypes", "casts")
        if given.get("casts"):
            self._alias("bf16", True, "casts")
        self.record("same", "`ep_size` has the number of ranks", "expert_parallel")
        if given.get("expert_parallel") and not given.get("ep_size"):
            self._alias("ep_size", given.get("tp_size"), "expert_parallel")
        self._mixed_precision()
        half = next((word for word in ("bf16", "fp16") if given.get(word)), "fp32")
        if given.get("bf16") is not None or given.get("fp16"):
            given["param_dtype"] = half
        else:
            self.record("same", "off", "fp16")
        for word in ("bf16", "fp16", "param_dtype"):
            if word in given and "param_dtype" in given:
                lines += self._option(word, PARAM_DTYPE, given["param_dtype"])
        self.record("same", "gradients are reduced in fp32", "reduce_bf16")
        if given.get("reduce_bf16"):
            self._alias("reduce_dtype", "bf16", "reduce_bf16")
        if "reduce_fp32" in given:
            dtype = "fp32" if given["reduce_fp32"] else given.get("param_dtype", "bf16")
            self._alias("reduce_dtype", dtype, "reduce_fp32")
        if given.get("reduce_as_param") and given.get("replicate_size") != "auto":
            given.setdefault("reduce_dtype", given.get("param_dtype"))
        if given.get("reduce_dtype"):
            lines += self._option("reduce_dtype", REDUCE_DTYPE, given["reduce_dtype"])
        if given.get("checkpoint_off"):
            self._alias("checkpoint", "none", "checkpoint_off")
        self.record("same", "off", "checkpoint_off")
        if given.get("checkpoint") in ("none", "full"):
            lines += self._option("checkpoint", RECOMPUTE, given["checkpoint"] == "full")
        first = {line.partition("    #")[0]: line for line in reversed(lines)}
        return [*reversed(first.values()), *self._pipeline(), *self._loss(many), ""]

    def _mixed_precision(self) -> None:
        """One key for the dtype of compute and for fp8, beside which it is bf16."""
        if mixed := self.given.get("mixed"):
            low = mixed == "fp8"
            self._alias("param_dtype", "bf16" if low else mixed, "mixed")
            if low:
                self._alias("fp8", True, "mixed")

    def _loss(self, many: bool) -> list[str]:
        given, lines = self.given, list[str]()
        for word, chunks in (("chunked_loss", 8), ("chunk_tokens", 8), ("loss", given.get("loss")),
                             ("loss_over_tp", int(many)), ("no_loss_over_tp", 0)):  # fmt: skip
            if given.get(word) and chunks and not lines:
                lines = self._option(word, LOSS_CHUNKS, chunks)
            else:
                self.record("same", "the loss is computed from whole logits", word)
        return lines

    def _pipeline(self) -> list[str]:
        given = self.given
        words = ("pp_size", "schedule", "microbatches", "microbatch_rows", *_VIRTUAL)
        self.fate |= dict.fromkeys(("rows", "all_rows"), ("left", LEFT["batch"]))
        self.fate["layers"] = ("left", LEFT["model_left"])
        if (given.get("pp_size") or 1) == 1:
            return self.record("same", "without effect: one pipeline stage", *words)
        if PP.word not in self.base.axes:
            return self.record("lost", f"{self.name} has no pipeline", *words)
        if self._stages_of_a_rank() > 1 and "schedule" not in given:
            word = "virtual" if given.get("virtual") else "virtual_layers"
            self._alias("schedule", "interleaved_1f1b", word)
        size, rows = given.get("microbatch_rows"), given.get("rows")
        ranks = self.world // prod(given.get(w) or 1 for w in ("pp_size", "tp_size", "cp_size"))
        if size and rows and rows >= size:
            self._alias("microbatches", rows // size, "microbatch_rows", "rows")
        elif rows and given.get("all_rows") and "microbatches" not in given:
            if ranks and (count := given["all_rows"] // (rows * ranks)):
                self._alias("microbatches", count, "rows", "all_rows")
            else:
                why = "a plan has `microbatches`, of one data rank; their number is not in the file"
                self.record("lost", why, "all_rows")
        else:
            self.record("lost", "a plan has the number of microbatches", "microbatch_rows")
        lines = list[str]()
        for word, setting in (("schedule", SCHEDULE), ("microbatches", MICROBATCHES)):
            if word in given:
                lines += self._option(word, setting, given[word])
        return lines

    def _stages_of_a_rank(self) -> int:
        """The number of stages on each rank of the pipeline; 0 if the file does not tell."""
        given = self.given
        if count := given.get("virtual"):
            return int(count)
        if not (each := given.get("virtual_layers")):
            return 1
        layers, of_all = given.get("layers") or 0, given["pp_size"] * each
        if not layers or layers % of_all:
            why = f"a plan has the stages of a rank: `stages = even({BLOCKS}, each = N)`"
            self.record("lost", why, "virtual_layers")
            return 0
        return int(layers // of_all)

    def _stages(self) -> list[str]:
        """The section of a pipeline whose ranks hold more stages than the family's plan says."""
        record_stages(self)
        if self.fate.get("pp_size", ("",))[0] != "plan":
            return []
        count, word = self._stages_of_a_rank(), "virtual"
        usual = 1 if self.given.get("schedule", "1f1b") in ("gpipe", "1f1b") else 2
        if count == 0:
            return []
        if count == usual:
            return self.record("same", f"{usual} stages a rank in {self.name}", *_VIRTUAL)
        if "virtual" not in self.given:
            word = "virtual_layers"
        stages = self.add_line(f"    override stages = even({BLOCKS}, each = {count})", word)
        return [f"pipeline on {PP.word} {{", *stages, "}", ""]

    def _mesh(self) -> list[str]:
        """The axes whose sizes differ."""
        given = self.given
        total, copies = given.get("data_size"), given.get("replicate_size") or 1
        self.record("same", "the ranks that tp, cp and pp leave", "data_size")
        if total and not given.get("shard_size") and copies != "auto" and total % copies == 0:
            self._alias("shard_size", total // copies, "data_size")
        lines = list[str]()
        for word, without in _MESH:
            size, axis = given.get(word), without.partition(" ")[0]
            if axis not in self.base.axes and size not in (None, 1):
                self.record("lost", f"{self.name} has no axis {axis}", word)
            elif size and f"{axis} = {size}" != without and word not in self.fate:
                lines += self.add_line(f"    override {axis} = {size}", word)
            else:
                self.fate.setdefault(word, ("same", without))
        return ["mesh {", *lines, "}", ""] if lines else []

    def _context(self) -> list[str]:
        if self.fate["cp_size"][0] != "plan":
            return self.record("same", "without effect: cp = 1", "attention")
        how = self.given.get("attention") or "all_gather"
        if how == "all_gather":
            return self.record("same", "keys and values are all-gathered", "attention")
        line = self.add_line(f"    override attention = {how}", "attention")
        return ["context on cp {", *line, "}", ""]

    def _experts(self) -> list[str]:
        """The lines that limit the tokens of an expert, choose those that are dropped, and say how
        tokens reach their experts.
        """
        lines = expert_section(self, "$experts")
        capacity, drop = self.given.get("capacity"), self.given.get("drop") or "probs"
        if not capacity:
            self.record("same", "no token is dropped", "capacity", "drop")
            return lines
        text = f"    $experts : dispatch(all_to_all, capacity = {capacity:g}, drop = {drop})"
        line = self.add_line(text, *(word for word in ("capacity", "drop") if word in self.given))
        note = f"# A plan counts slots in each row, {self.peer.title} in each rank's micro-batch"
        return [note, "override expert on ep {", *line, "}", ""]

    def _load(self) -> list[str]:
        lines = self.record("same", "`run.load` decides how weights are read", "from_rank0")
        if self.given.get("from_rank0"):
            lines = self.add_line("    weights = rank0", "from_rank0")
        if dtype := self.given.get("load_dtype"):
            lines += self.add_line(f"    dtype = {dtype}", "load_dtype")
        return ["load {", *lines, "}", ""] if lines else []

    def _adapters(self) -> list[str]:
        given = self.given
        words = ["adapter", *_LORA.values(), "lora_targets", "lora_all", "rank_stabilized", "dora",
                 "lora_parameters", "four_bits", "double_quantized"]  # fmt: skip
        for word in ("finetuning", "adapter_on"):
            if given.get(word) in ("lora", True):
                self._alias("adapter", "lora", word)
            else:
                self.record("same", "all parameters are trained", word)
        if not given.get("adapter", bool(self.keys.get("lora_rank")) and "adapter_on" not in given):
            given.pop("adapter", None)
            self.record("same", "no adapter", *words)
            if given.get("four_bits"):
                self.record("lost", "4-bit weights are those of adapters: `qlora`", "four_bits")
            return []
        kind = "qlora" if given.get("four_bits") or given.get("adapter") == "qlora" else "lora"
        arguments = {k: given.get(word) for k, word in _LORA.items()}
        rank = arguments["rank"] = arguments["rank"] or 8
        if given.get("alpha_of_rank"):  # the library's default is a multiple of the rank
            arguments["alpha"] = arguments["alpha"] or rank * given["alpha_of_rank"]
        arguments["rslora"] = "true" if given.get("rank_stabilized") else None
        arguments["dora"] = "true" if kind == "lora" and given.get("dora") else None
        arguments["double"] = "true" if kind == "qlora" and given.get("double_quantized") else None
        shown = _shown(arguments)
        names = given.get("lora_targets") or ("*",)
        target = _selector(names)
        if given.get("lora_all") or "*" in names:
            target = f"{BLOCKS}.**<Linear>"
        if kind == "qlora":
            words.remove("dora")
            self.record("lost", "no DoRA of 4-bit weights: `lora(..., dora = true)`", "dora")
        if kind == "lora":
            words.remove("double_quantized")
            self.record("same", "without effect: no 4-bit weights", "double_quantized")
        lines = self._of_experts(arguments)
        used = [word for word in words if word in given and word != "lora_parameters"]
        if not lines or any(word in given for word in ("lora_targets", "lora_all")):
            lines = [*self.add_line(f"    {target} : {kind}({shown})", *used), *lines]
        return ["adapters {", *lines, "}", ""]

    def _of_experts(self, arguments: dict[str, Any]) -> list[str]:
        """The rules of the weights of experts that peft's `target_parameters` names."""
        weights_by_module: dict[str, list[str]] = {}
        for name in self.given.get("lora_parameters") or ():
            module, _, weight = name.rpartition(".")
            weights_by_module.setdefault(module or "experts", []).append(weight)
        lines, left = [], ("dropout", "dora", "double")  # peft has none there
        for module, weights in weights_by_module.items():
            named = f"[{', '.join(weights)}]"
            shown = _shown({**arguments, **dict.fromkeys(left), "parameters": named})
            words = ("adapter", "lora_parameters", "rank_stabilized", *_LORA.values())
            used = [word for word in words if word in self.given]
            lines += self.add_line(f"    {_selector((module,))} : lora({shown})", *used)
        return lines

    def _train(self) -> list[str]:
        given, rules = self.given, list[str]()
        for word, (names, none) in _FROZEN.items():
            if not given.get(word):
                self.record("same", "nothing is frozen", word)
            elif "adapter" in given:
                self.record("same", "with adapters all else is frozen", word)
            elif word == "frozen_embeddings":
                rules += self.add_line("    **<Embedding> : frozen", word)
            elif modules := [name for name in names if name in self.base.names]:
                rules += self.add_line(f"    **.{modules[0]} : frozen", word)
            elif self.keys.get(word):
                self.record(*none, word)
        if too := given.get("trained_too"):
            rules += self.add_line(f"    {_selector(too)} : trainable", "trained_too")
        return ["train {", *rules, "}", ""] if rules else []

    def _tensor(self) -> list[str]:
        return tensor_section(self, BLOCKS)

    def _checkpoint(self) -> list[str]:
        kind = self.given.get("checkpoint")
        self.record("same", "no activations are offloaded", "activation_offload")
        if self.given.get("activation_offload") and kind == "full":
            kind = "offload"
        if kind == "offload" and self.given.get("compile"):
            why = "activations of compiled blocks are not offloaded (PL473)"
            return self.record("lost", why, "checkpoint", "activation_offload")
        if kind not in _ACTIONS:
            return []
        override = "override " if "checkpoint" in self.base.sections else ""
        words = ["checkpoint", *["activation_offload"] * (kind != self.given["checkpoint"])]
        rule = self.add_line(f"    {BLOCKS} : {_ACTIONS[kind]}", *words)
        return [f"{override}checkpoint {{", *rule, "}", ""]

    def _compile(self) -> list[str]:
        self.record("same", "nothing is compiled", "compile", "no_compile")
        word = "compile" if "compile" in self.given else "no_compile"
        if self.given.get(word) is not (word == "compile"):
            return []
        return ["compile {", *self.add_line(f"    {BLOCKS} : block", word), "}", ""]

    def _matmul(self) -> list[str]:
        """The linear layers of all blocks, but for those that the file leaves out."""
        given = self.given
        words = [w for w in ("fp8", "converters", "fp8_recipe", "fp8_gather", "fp8_backend",
                             "fp8_skip") if w in given]  # fmt: skip
        if not (given.get("fp8") or given.get("converters")):
            return self.record("same", "no fp8 matmuls", *words)
        recipe = given.get("fp8_recipe") or "tensorwise"
        if given.get("fp8_backend") == "other" or given.get("converters") == "mx":
            return self.record("lost", LOST["low_bits"], *words)
        if recipe == "high":
            why = "a recipe with gradients of weights in 16 bits has no counterpart"
            return self.record("lost", why, *words)
        if "adapter" in given:
            return self.record("lost", "layers with adapters keep their precision (PL622)", *words)
        gather = given.get("fp8_gather") and recipe == "tensorwise"
        if gather and (given.get("pp_size") or 1) > 1:
            gather = self.record("cost", "stages gather no weights in fp8 (PL625)", "fp8_gather")
        else:
            why = f"weights of {recipe} are gathered in the parameters' dtype"
            self.record("same", why, "fp8_gather")
        action = f"fp8(recipe = {recipe}{', gather = fp8' if gather else ''})"
        used = [w for w in words if w != "fp8_skip" and (w != "fp8_gather" or gather)]
        lines = self.add_line(f"    {BLOCKS}.**<Linear> : {action}", *used)
        if self.peer.name in ("accelerate", "axolotl"):
            first = f"# {self.peer.title} also leaves out the first linear layer of the model:"
            lines += [f"    {first} `override MODULE : none` does"]
        return ["matmul {", *lines, *self._left_out(), "}", ""]

    def _left_out(self) -> list[str]:
        """Layers of blocks that a filter or a library leaves out; the head is in no block."""
        skip = self.given.get("fp8_skip") or ()
        named = [name for name in skip if name not in ("output", "lm_head", "router.gate")]
        if not named:
            self.record("same", "the head and routers keep their precision", "fp8_skip")
        elif all(name in _TITAN for name in named):
            rules = [f"    override {BLOCKS}.{_TITAN[name]} : none" for name in named]
            return [*self.add_line(rules[0], "fp8_skip"), *rules[1:]]
        else:
            why = f"write `override {BLOCKS}.MODULE : none` for what is left out"
            self.record("lost", why, "fp8_skip")
        return []

    def _fsdp(self) -> list[str]:
        given, lines = self.given, list[str]()
        chunked = f"override option {LOSS_CHUNKS.word}" in self.fate_of("loss")[1]
        if self.given.get("loss") and chunked:
            self.record("lost", "a loss in parts makes no logits to cast", "output_dtype")
        elif output := given.get("output_dtype"):
            casts = f"param = {PARAM_DTYPE.word}, reduce = {REDUCE_DTYPE.word}, output = {output}"
            lines += self.add_line(f"    override precision({casts})", "output_dtype")
        inner = given.get("inner_size")
        if inner and given.get("reshard") is not False:
            if BLOCKS in self.base.units:
                unit = f"    override {BLOCKS} : unit(reshard = {inner})"
                lines += self.add_line(unit, "inner_size")
            else:
                why = f"override the family's units with `reshard = {inner}`"
                self.record("cost", why, "inner_size")
        else:
            self.record("same", "without effect: units are not sharded again", "inner_size")
        if given.get("reshard") is not False:
            self.record("same", "units reshard after forward, but for the last", "reshard")
        elif BLOCKS in self.base.units:
            lines += self.add_line(f"    override {BLOCKS} : unit(reshard = never)", "reshard")
        else:
            self.record("lost", "override the family's units with `reshard = never`", "reshard")
        ahead = [word for word in ("prefetch_forward", "prefetch_backward") if given.get(word)]
        if ahead:
            counts = ", ".join(
                f"{word.removeprefix('prefetch_')} = {given[word]}" for word in ahead
            )
            lines += self.add_line(f"    prefetch({counts})", *ahead)
        for word in ("offload", "offload_device"):
            if given.get(word):
                lines += self.add_line("    offload(cpu)", word)
            else:
                self.record("same", "nothing is offloaded", word)
        lines += fsdp_units(self, BLOCKS)
        head = "fsdp on dp_shard_cp" if CP.word in self.base.axes else "fsdp on dp_shard"
        return [f"{head}, replicate on dp_replicate {{", *lines, "}", ""] if lines else []


def _shown(arguments: dict[str, Any]) -> str:
    """The arguments of a call that have a value."""
    return ", ".join(f"{name} = {value}" for name, value in arguments.items() if value)


def _selector(names: tuple[str, ...]) -> str:
    """A selector of all modules whose path ends in one of the names."""
    return f"**.{{{','.join(names)}}}" if len(names) > 1 else f"**.{names[0]}"
