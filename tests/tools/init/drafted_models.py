"""Small models of one's own whose attention, or what they draw, is written as many libraries do."""

import torch
from torch import nn
from torch.nn import functional as F


class FusedKeysValues(nn.Module):
    """Queries in one weight, keys and values in another; heads follow from the features."""

    def __init__(self, width, heads, groups, dropout=0.0):
        super().__init__()
        self.size, self.dropout = width // heads, dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * groups * self.size)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        rows, length, _ = x.shape
        parts = (self.query(x), *self.key_value(x).chunk(2, dim=-1))
        q, k, v = (p.view(rows, length, -1, self.size).transpose(1, 2) for p in parts)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, None, rate, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Counted(nn.Module):
    """All three in one weight, of unequal sizes; heads are counted by the module."""

    def __init__(self, width, heads, groups):
        super().__init__()
        self.n_head, self.groups, self.head_size = heads, groups, width // heads
        self.c_attn = nn.Linear(width, width + 2 * groups * self.head_size)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x):
        rows, length, _ = x.shape
        counts = (self.n_head, self.groups, self.groups)
        parts = self.c_attn(x).split([n * self.head_size for n in counts], dim=-1)
        pairs = zip(parts, counts, strict=True)
        q, k, v = (p.view(rows, length, n, self.head_size).transpose(1, 2) for p, n in pairs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).reshape(rows, length, -1))


class OneHead(nn.Module):
    """One head of keys and values for all queries."""

    def __init__(self, width, heads, groups):
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * self.size)
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        rows, length, _ = x.shape
        q = self.query(x).view(rows, length, -1, self.size).transpose(1, 2)
        k, v = self.key_value(x).unsqueeze(1).split(self.size, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.mix(y.transpose(1, 2).flatten(2))


class Whole(nn.Module):
    """As nanoGPT: the features of a head are those of the input, whatever a rank has."""

    def __init__(self, width, heads, groups):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x):
        rows, length, width = x.size()
        shape = (rows, length, self.n_head, width // self.n_head)
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (p.view(shape).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))


class Named(nn.Module):
    """Names of its own for the size of a head and for the features of its input."""

    def __init__(self, width, heads, groups):
        super().__init__()
        self.n_q, self.n_kv, self.hd, self.d = heads, groups, width // heads, width
        self.q = nn.Linear(self.d, heads * self.hd)
        self.k, self.v = (nn.Linear(self.d, groups * self.hd) for _ in "kv")
        self.o = nn.Linear(heads * self.hd, self.d)

    def forward(self, x):
        rows, length, _ = x.shape
        x, counts = x.view(-1, length, self.d), (self.n_q, self.n_kv, self.n_kv)
        pairs = zip((self.q(x), self.k(x), self.v(x)), counts, strict=True)
        q, k, v = (p.view(rows, length, n, self.hd).transpose(1, 2) for p, n in pairs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(rows, length, self.n_q * self.hd))


class ImageAttention(nn.Module):
    """As timm's: the parts of the one weight are a dim, and heads and features are counted."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = num_heads, dim // num_heads, dim
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        rows, length, _ = x.shape
        parts = self.qkv(x).reshape(rows, length, 3, self.num_heads, self.head_dim)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(rows, length, self.attn_dim))


class Mlp(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.fc1, self.fc2, self.drop = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            drop,
        )

    def forward(self, x):
        return F.dropout(self.fc2(F.gelu(self.fc1(x))), self.drop, self.training)


class DropPath(nn.Module):
    """Leaves out a residual branch for some rows, as timm and transformers do."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not (self.rate and self.training):
            return x
        kept = x.new_empty((len(x), *[1] * (x.ndim - 1))).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


class Block(nn.Module):
    def __init__(self, attention, width, drop, path):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp, self.path = attention, Mlp(width, drop), DropPath(path)

    def forward(self, x):
        x = x + self.path(self.attn(self.norm1(x)))
        return x + self.path(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    def __init__(self, attention, drop=0.0, path=0.0, width=64, heads=4, groups=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(64, width)
        sizes = width, heads, groups
        self.blocks = nn.ModuleList(Block(attention(*sizes), width, drop, path) for _ in "ab")
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vit(nn.Module):
    def __init__(self, path=0.0, width=64):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        blocks = (Block(ImageAttention(width, 4), width, 0.0, path) for _ in "ab")
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1)
        return self.head(self.norm(self.blocks(x))[:, 0])

    def planc_inputs(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(rows, 3, 32, 32, generator=generator)}


def fused_keys_values():
    return Gpt(FusedKeysValues)


def counted():
    return Gpt(Counted)


def counted_larger():
    return Gpt(Counted, width=96, heads=12, groups=2)


def one_head():
    return Gpt(OneHead)


def named():
    """Heads of size 8, and 8 of them."""
    return Gpt(Named, heads=8, groups=4)


def whole():
    return Gpt(Whole)


def image():
    return Vit()


def functional_dropout():
    return Gpt(FusedKeysValues, drop=0.1)


def drop_path():
    return Gpt(FusedKeysValues, path=0.1)


def image_drop_path():
    return Vit(path=0.1)


def attention_dropout():
    return Gpt(lambda *sizes: FusedKeysValues(*sizes, dropout=0.1))
