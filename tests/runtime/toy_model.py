"""A model with one of everything that torch's styles do not split, and what ranks do with it."""

import torch
from numerics import by_script, error, plain
from torch import distributed, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

import planc
from planc.runtime.standalone.shards import in_own_order, rank_orders

WIDE, INNER, ROPE = 16, 24, 4
SIZES = (16, 8, 8)  # of the fused q, k and v


class Experts(nn.Module):
    """Each expert's parts alternate, and it adds a bias behind each projection."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(4, WIDE, 2 * INNER))
        self.up_bias = nn.Parameter(torch.empty(4, 2 * INNER))
        self.down = nn.Parameter(torch.empty(4, INNER, WIDE))
        self.down_bias = nn.Parameter(torch.empty(4, WIDE))

    def forward(self, states, weights):
        both = torch.einsum("bsh,ehi->bsei", states, self.up) + self.up_bias
        out = torch.einsum("bsei,eih->bseh", both[..., ::2] * both[..., 1::2], self.down)
        return ((out + self.down_bias) * weights[..., None]).sum(2)


class Heads(nn.Module):
    """An attention whose code cuts features by its number of heads, behind a norm over all."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.to_q = nn.Linear(WIDE, WIDE)
        self.to_k = nn.Linear(WIDE, WIDE, bias=False)  # behind a softmax its gradient is 0
        self.norm = nn.RMSNorm(WIDE, eps=1e-3)
        self.to_out = nn.ModuleList([nn.Linear(WIDE, WIDE)])

    def forward(self, x):
        q = self.norm(self.to_q(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.to_k(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        found = functional.scaled_dot_product_attention(q, k, q)
        return self.to_out[0](found.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Every cut is at a share of what is there, so a rank can cut its own part."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDE, sum(SIZES))
        self.out = nn.Linear(SIZES[0], WIDE)
        self.attn = Heads()
        self.two = nn.Linear(WIDE, 2 * INNER)
        self.back = nn.Linear(2 * INNER, WIDE)
        self.pairs = nn.Linear(WIDE, 2 * INNER, bias=False)
        self.scale = nn.Parameter(torch.empty(INNER))
        self.shift = nn.Parameter(torch.empty(1))
        self.gate = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
        self.down = nn.Linear(INNER, WIDE)
        self.turned = Conv1D(2 * INNER, WIDE)
        self.returned = Conv1D(WIDE, INNER)
        self.latent = nn.Linear(WIDE, WIDE)
        self.key = nn.Linear(WIDE - ROPE, WIDE)
        self.query = nn.Linear(WIDE, WIDE)
        self.proj = nn.Linear(WIDE, WIDE)
        self.router = nn.Linear(WIDE, 4)
        self.experts = Experts()

    def forward(self, x):
        fused = self.qkv(x)
        q, k, v = fused.split([fused.shape[-1] * n // sum(SIZES) for n in SIZES], -1)
        heads = q.unflatten(-1, (-1, 2)) * k[..., None] + v[..., None]  # two queries to a key
        x = calm(x + self.out(heads.flatten(-2)))
        x = calm(x + self.attn(x))
        one, two = self.two(x).chunk(2, -1)
        x = calm(x + self.back(torch.cat([one.tanh(), two * one], -1)))
        pairs = self.pairs(x)
        inner = pairs[..., ::2].sigmoid() * pairs[..., 1::2] * self.scale + self.shift
        x = calm(x + self.down(self.gate(inner[..., None])[..., 0]))
        one, two = self.turned(x).chunk(2, -1)
        x = calm(x + self.returned(one.sin() * two))
        passed, rope = self.latent(x).split([WIDE - ROPE, ROPE], -1)
        key = self.key(passed)
        rope = rope.repeat(1, 1, key.shape[-1] // ROPE)  # the same for all heads, as in MLA
        x = calm(x + self.proj(self.query(x) * (key + rope)))
        return calm(x + self.experts(x, self.router(x).softmax(-1)))


def calm(x):
    return functional.layer_norm(x, x.shape[-1:])


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDE, WIDE)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = """plan toy for Toy

let block = blocks.*

mesh {
    dp_shard = auto
    tp       = 1
}

tensor on tp {
    $block {
        qkv      : colwise(parts = [16, 8, 8])
        out      : rowwise
        attn              : attributes(heads = split)
        attn.to_{q,k}     : colwise
        attn.norm         : features
        attn.to_out[0]    : rowwise
        two      : colwise(parts = 2)
        back     : rowwise(parts = 2)
        pairs    : colwise(parts = 2, interleaved = true)
        gate     : replicate(gradient = sum)
        down     : rowwise
        turned   : colwise(parts = 2)
        returned : rowwise
        latent   : mla_kv(rope = 4)
        key      : colwise
        query    : colwise
        proj     : rowwise
        router   : replicate
        experts  : experts(
            up = shard(2, parts = 2, interleaved = true),
            up_bias = shard(1, parts = 2, interleaved = true),
            down = shard(1),
            down_bias = partial
        )
    }
    $block : parameters(scale = shard(0), shift = replicate)
}

checkpoint {
    $block : full
}

fsdp on dp_shard {
    $block : unit
    root   : unit
}
"""


def made():
    torch.manual_seed(0)
    toy = Toy()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in toy.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return toy


def loss_of(model, rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 4, 6, WIDE, generator=generator)
    return functional.mse_loss(model(x[rows]), y[rows])


def rows(rank, size):
    own = 4 // size
    return slice(rank * own, (rank + 1) * own)


def compare(plan, overrides, script=False):
    """Errors of the loss and of each gradient; whether the weights come out as they went in."""
    right, parallel = made(), made()
    lowered = planc.lower(parallel, plan, world_size=4, overrides=overrides)
    kept = True
    if script:
        rank, size = by_script(parallel, lowered)
    else:
        run = planc.apply(parallel, lowered, device_type="cpu")
        rank, size = run.data_rank, run.data_size
        full = run.full_state_dict(every_rank=True)
        kept = all(torch.equal(full[n], v) for n, v in right.state_dict().items())
    loss_of(right, slice(None)).backward()
    loss = loss_of(parallel, rows(rank, size))
    loss.backward()
    mean = loss.detach().clone()
    distributed.all_reduce(mean)
    reference = {n: p.grad for n, p in right.named_parameters()}
    own = rank_orders(parallel)
    errors = {"loss": error(mean / distributed.get_world_size(), loss_of(right, slice(None)))}
    for name, parameter in parallel.named_parameters():
        grad = in_own_order(parameter.grad.full_tensor(), own.get(plain(name)))
        errors[plain(name)] = error(grad, reference[plain(name)])
    return {"kept": kept, "errors": errors}


def steps(run, optimizer, first, last):
    losses = []
    for seed in range(first, last):
        loss = loss_of(run.model, rows(run.data_rank, run.data_size), seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / distributed.get_world_size())
    return losses


def resume(plan, old, new, folder):
    """Losses of four steps without a break, and of two and two with another plan between."""
    whole = planc.apply(made(), plan, overrides=old, device_type="cpu")
    right = steps(whole, torch.optim.AdamW(whole.model.parameters(), lr=1e-2), 0, 4)
    run = planc.apply(made(), plan, overrides=old, device_type="cpu")
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    losses = steps(run, optimizer, 0, 2)
    run.save(folder + "/run", optimizer=optimizer, step=2)
    run.export(folder + "/export")
    before = run.full_state_dict(every_rank=True)
    distributed.barrier()
    again = planc.apply(made(), plan, overrides=new, device_type="cpu")
    optimizer = torch.optim.AdamW(again.model.parameters(), lr=1e-2)
    step = again.load(folder + "/run", optimizer=optimizer)
    after = again.full_state_dict(every_rank=True)
    losses += steps(again, optimizer, step, 4)
    equal = all(torch.equal(before[n], after[n]) for n in before)
    for weights in ("slices", "rank0"):
        read = planc.apply(made().to("meta"), plan, overrides=new, device_type="cpu")
        read.load(folder + "/export", weights=weights)
        after = read.full_state_dict(every_rank=True)
        equal = equal and all(torch.equal(before[n], after[n]) for n in before)
    return {"right": right, "losses": losses, "equal": equal}
