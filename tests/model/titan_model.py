"""A llama as torchtitan writes it: its blocks are in an nn.ModuleDict, and it returns logits."""

import torch
from torch import nn
from torch.nn import functional


def turned(x, angles):
    """Rotary embeddings, as torchtitan applies them to queries and keys."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, : x.shape[1], None]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.head_dim = width // heads
        self.n_rep = heads // kv_heads
        self.wq = nn.Linear(width, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(self, x, freqs_cis):
        rows, length, _ = x.shape
        # -1 and not a number of heads: under tensor parallelism a rank has a part of them
        q, k, v = (w(x).view(rows, length, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, freqs_cis), turned(k, freqs_cis)
        k, v = (part.repeat_interleave(self.n_rep, 2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(found.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward = FeedForward(width, 2 * width)
        self.attention_norm = nn.RMSNorm(width)
        self.ffn_norm = nn.RMSNorm(width)

    def forward(self, x, freqs_cis):
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, layers=3, width=64, heads=4, kv_heads=2, vocabulary=128, length=64):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        size = width // heads
        steps = 10000.0 ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), steps)
        freqs = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("freqs_cis", freqs, persistent=False)
        self.layers = nn.ModuleDict()
        for number in range(layers):
            self.layers[str(number)] = TransformerBlock(width, heads, kv_heads)
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h
