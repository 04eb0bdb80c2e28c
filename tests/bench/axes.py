"""Steps with stages, with parts of sequences, and with divided experts, beside torch by hand.

Each function gives two steps of the same model on four ranks, by planc and as one writes it with
torch for this one model. `steps.py time` has them take turns in the same processes.
"""

import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import planc
from planc.runtime.standalone.expert_parallel import LocalExperts, by_all_to_all

ROWS, TOKENS, WORDS, STAGES, MICROBATCHES = 8, 128, 4_000, 2, 4
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "attn_implementation": "sdpa",
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
PLAIN = ["param_dtype=fp32", "recompute=false"]
POLICY = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)


def llamas():
    """Two models with the same weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
    return model, deepcopy(model)


def tokens(rows):
    """The rows of a rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (rows, TOKENS), generator=generator)


def labels_of(ids):
    """The next token of each."""
    return functional.pad(ids, (0, 1), value=-100)[:, 1:]


def cross_entropy(logits, labels):
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def stepped(model, pass_of_step):
    """A step, a forward and backward pass and the optimizer's, that gives the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step():
        loss = pass_of_step()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_planc(model, plan, ids, *settings):
    run = planc.apply(model, plan, overrides=[*PLAIN, *settings], device_type="cpu", compare=0)
    batch = {"input_ids": ids, "labels": ids}
    return stepped(model, lambda: float(run.forward_backward([batch])))


def sharded(model, mesh, blocks, others, *, reshard=True):
    """FSDP, with the units that planc's plans have."""
    for block in blocks:
        last = block is blocks[-1]
        fully_shard(block, mesh=mesh, mp_policy=POLICY, reshard_after_forward=reshard and not last)
    for unit, stays in others:
        fully_shard(unit, mesh=mesh, mp_policy=POLICY, reshard_after_forward=reshard and not stays)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, reshard_after_forward=False)


# Stages -------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """Half of a llama."""

    def __init__(self, model, first):
        super().__init__()
        body, half = model.model, len(model.model.layers) // STAGES
        self.rotary_emb = body.rotary_emb
        self.embed_tokens = body.embed_tokens if first else None
        self.layers = body.layers[:half] if first else body.layers[half:]
        self.norm, self.lm_head = (None, None) if first else (body.norm, model.lm_head)

    def forward(self, values):
        if self.embed_tokens is not None:
            values = self.embed_tokens(values)
        positions = torch.arange(values.shape[1])[None]
        turned = self.rotary_emb(values, positions)
        for layer in self.layers:
            values = layer(values, position_embeddings=turned, attention_mask=None)
        return values if self.lm_head is None else self.lm_head(self.norm(values))


def pipeline():
    """Two stages on two data ranks, 1F1B."""
    mine, theirs = llamas()
    mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pp", "dp"))
    index, ids = mesh.get_local_rank("pp"), tokens(ROWS)
    part = Stage(theirs, index == 0)
    ends = [part.norm, part.lm_head]
    others = [(part.embed_tokens, False)] if index == 0 else [(ends, True)]
    sharded(part, mesh["dp"], part.layers, others, reshard=False)
    stage = PipelineStage(part, index, STAGES, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=cross_entropy)

    def one_pass():
        if index == 0:
            schedule.step(ids)
            return None
        losses = []
        schedule.step(target=labels_of(ids), losses=losses)
        return float(sum(losses)) / MICROBATCHES

    settings = (f"pp={STAGES}", f"microbatches={MICROBATCHES}")
    return {
        "hand": stepped(part, one_pass),
        "planc": by_planc(mine, "llama", ids, *settings),
    }


# Parts of sequences -------------------------------------------------------------------------------


def context():
    """Two ranks with half of each sequence, on two data ranks; keys and values are all-gathered."""
    mine, theirs = llamas()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group, rank = mesh.get_group("cp"), mesh.get_local_rank("cp")
    quarters = torch.arange(TOKENS).chunk(4)
    parts = [torch.cat([quarters[i], quarters[3 - i]]) for i in range(2)]
    part = parts[rank]
    seen = torch.cat(parts) <= part[:, None]

    def attention(_module, query, key, value, _mask, scaling, **_options):
        both = all_gather_tensor_autograd(torch.cat([key, value], -1), 2, group)
        key, value = both.chunk(2, -1)
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("by_hand", attention)
    theirs.set_attn_implementation("by_hand")
    body = theirs.model
    others = [(body.embed_tokens, False), ([body.norm, theirs.lm_head], True)]
    sharded(theirs, mesh["dp", "cp"]._flatten(), body.layers, others)
    ids = tokens(ROWS)
    positions, labels = part[None], labels_of(ids)[:, part]

    def one_pass():
        given = {"position_ids": positions, "use_cache": False}
        loss = cross_entropy(theirs(ids[:, part], **given).logits, labels)
        loss.backward()
        return float(loss)

    return {
        "hand": stepped(theirs, one_pass),
        "planc": by_planc(mine, "llama", ids, "cp=2"),
    }


# Experts ------------------------------------------------------------------------------------------


class Dispatched(nn.Module):
    """Half of the experts, for the tokens of two ranks."""

    def __init__(self, experts, group):
        super().__init__()
        self.group, self.count = group, experts.num_experts // group.size()
        first = self.count * group.rank()
        for parameter in (experts.gate_up_proj, experts.down_proj):
            parameter.data = parameter.data[first : first + self.count].clone()
        experts.num_experts = self.count
        self.experts = experts

    def forward(self, hidden, index, weights):
        ranks, flat = self.group.size(), index.flatten()
        sizes = torch.bincount(flat, minlength=ranks * self.count)
        theirs = torch.empty_like(sizes)
        distributed.all_to_all_single(theirs, sizes, group=self.group)
        sent = sizes.view(ranks, -1).sum(1).tolist()
        received = theirs.view(ranks, -1).sum(1).tolist()
        order = flat.argsort(stable=True)
        rows = hidden[order // index.shape[1]]
        rows = all_to_all_single_autograd(rows, received, sent, self.group)
        numbers = torch.arange(self.count).repeat(ranks).repeat_interleave(theirs)
        out = self.experts(rows, numbers[:, None], rows.new_ones(len(rows), 1))
        out = all_to_all_single_autograd(out, sent, received, self.group)
        every = out.new_zeros(len(flat), out.shape[-1]).index_copy(0, order, out)
        return (every.view(*index.shape, -1) * weights[..., None]).sum(1)


def experts():
    """Two ranks with half of the experts each, made of four data ranks; tokens go all-to-all."""
    torch.manual_seed(0)
    mine = MixtralForCausalLM(MixtralConfig(**SHAPE, **EXPERTS)).train()
    theirs = deepcopy(mine)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "ep"))
    body = theirs.model
    for layer in body.layers:
        layer.mlp.experts = Dispatched(layer.mlp.experts, mesh.get_group("ep"))
        unit = layer.mlp.experts
        fully_shard(unit, mesh=mesh["ep_shard"], mp_policy=POLICY, reshard_after_forward=True)
        unit.set_gradient_divide_factor(4)
        unit.set_force_sum_reduction_for_comms(True)  # gloo cannot divide on the way
    others = [(body.embed_tokens, False), ([body.norm, theirs.lm_head], True)]
    sharded(theirs, mesh["ep_shard", "ep"]._flatten(), body.layers, others)
    ids = tokens(ROWS // 2)

    def one_pass():
        loss = cross_entropy(theirs(ids, use_cache=False).logits, labels_of(ids))
        loss.backward()
        return float(loss)

    return {"hand": stepped(theirs, one_pass), "planc": by_planc(mine, "mixtral", ids, "ep=2")}


def dispatch():
    """Tokens to their experts on four ranks and back, with gradients, and nothing computed there:
    beside torch's all-to-all of the same rows alone, which have to be counted and sorted.
    """
    group, count, width, chosen, local = distributed.group.WORLD, 2_048, 512, 2, 2
    torch.manual_seed(distributed.get_rank())
    hidden = torch.randn(count, width, requires_grad=True)
    index = torch.rand(count, local * group.size()).topk(chosen).indices
    weights = torch.rand(count, chosen)
    own = LocalExperts(lambda rows, _index, weights: rows * weights, local, group)
    sizes = torch.bincount(index.flatten(), minlength=local * group.size())
    sent, theirs = sizes.view(-1, local).sum(1), torch.empty(group.size(), dtype=torch.int64)
    distributed.all_to_all_single(theirs, sent, group=group)
    sent, received = sent.tolist(), theirs.tolist()
    sorted_rows = torch.randn(count * chosen, width, requires_grad=True)

    def theirs_alone():
        rows = all_to_all_single_autograd(sorted_rows, received, sent, group)
        all_to_all_single_autograd(rows, sent, received, group).sum().backward()

    def ours():
        by_all_to_all(own, hidden, index, weights).sum().backward()

    return {"hand": theirs_alone, "planc": ours}


# States -------------------------------------------------------------------------------------------

STATES = {
    "vocab_size": 1_000,
    "hidden_size": 256,
    "num_heads": 8,
    "head_dim": 64,
    "state_size": 64,
    "n_groups": 1,
    "chunk_size": 64,
    "num_hidden_layers": 4,
}
EXCHANGING = """plan states for mamba2

extend "mamba2"

override context on cp {{
    exchange = {exchange}
}}
"""


def handing_on(exchange, ids):
    """A step of Mamba 2 on four ranks that have a quarter of each row, by what they exchange."""
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(Mamba2Config(**STATES)).train()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "states.plan"
        path.write_text(EXCHANGING.format(exchange=exchange))
        return by_planc(model, str(path), ids, "cp=4")


def states():
    ids = torch.randint(1_000, (2, 1_024), generator=torch.Generator().manual_seed(1))
    return {"planc": handing_on("state", ids), "gathered": handing_on("gather", ids)}


AXES = {
    "states": states,
    "pipeline": pipeline,
    "context": context,
    "experts": experts,
    "dispatch": dispatch,
}
