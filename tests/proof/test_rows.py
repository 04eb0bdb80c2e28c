"""Data ranks have rows of their own: what one process computes otherwise is found.

Parameters that the rows of some ranks alone use (PL512), modules that mix rows (PL513), and losses
that do (PL510); and the verdict does not depend on the weights that a model happens to have.
"""

import inspect
import threading

import pytest
import torch
from helpers import sampled
from torch import nn
from torch.nn import functional

import planc
from planc.answers.target import compile_for
from planc.diagnostics.diagnostic import Sink
from planc.proof.layout_flow import flow
from planc.proxy.user_model import copies_of


class Experts(nn.Module):
    """A mixture whose experts are in a list, one expert for a token."""

    def __init__(self, count, skips):
        super().__init__()
        self.skips = skips
        self.router = nn.Linear(16, count, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = flat
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero()[:, 0]
            if len(at) or not self.skips:
                out = out.index_add(0, at, expert(flat[at]) * weights[at, None])
        return out.view_as(x)


class Net(nn.Module):
    def __init__(self, count=4, skips=True):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(Experts(count, skips) for _ in range(2))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Vectors(nn.Module):
    """A model of vectors; `inner` is in its middle."""

    def __init__(self, inner=None, loss=None):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.inner = inner or nn.Identity()
        self._loss = loss or (lambda output: output.square().mean())

    def forward(self, x):
        return self.down(torch.relu(self.inner(self.up(x))))

    def planc_inputs(self, rows, seed):
        return {"x": torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))}

    def planc_loss(self, output, inputs):
        return self._loss(output)


class Branch(Vectors):
    """One of two layers, by the data."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(8, 16)

    def forward(self, x):
        return self.down(self.up(x) if x.sum() > 0 else self.other(x))


UNITS = {
    "replicate": "replicate on dp {\n    root : unit\n}\n",
    "fsdp": "fsdp on dp {\n    root : unit\n}\n",
    "experts": "fsdp on dp {\n    blocks.*.experts.* : unit\n    root : unit\n}\n",
}


def plan(folder, model, units):
    path = folder / "p.plan"
    name = type(model).__name__
    path.write_text(f"plan p for {name}\n\nmesh {{\n    dp = 2\n}}\n\n{UNITS[units]}")
    return str(path)


def found(folder, model, units="fsdp"):
    findings = planc.check(model, plan(folder, model, units), world_size=2)
    return {d.code: d for d in findings if d.severity != "info"}, findings.lines[-1]


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("count", [4, 16])
def test_experts_that_only_some_ranks_use(tmp_path, units, count):
    for seed in range(3):
        torch.manual_seed(seed)
        codes, line = found(tmp_path, Net(count), units)
        assert [*codes] == ["PL512"] and "refuted" in line
        assert "blocks.*.experts.*" in codes["PL512"].message
        assert {label.span.source.name for label in codes["PL512"].labels}
    codes, line = found(tmp_path, Net(count, skips=False), units)
    assert not codes and "proved" in line


def test_a_branch_on_the_data(tmp_path):
    codes, _ = found(tmp_path, Branch(), "replicate")
    assert [*codes] == ["PL512"]


def test_a_module_that_mixes_rows(tmp_path):
    codes, line = found(tmp_path, Vectors(nn.BatchNorm1d(16)))
    assert [*codes] == ["PL513"] and "`inner`" in codes["PL513"].message and "proved" in line
    assert not found(tmp_path, Vectors(nn.LayerNorm(16)))[0]


class Centered(nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


def test_rows_that_a_module_without_weights_mixes(tmp_path):
    codes, _ = found(tmp_path, Vectors(Centered()))
    assert [*codes] == ["PL513"] and "`inner`" in codes["PL513"].message


class Scaled(nn.Module):
    """Divides by the largest value of the batch, which has no gradient."""

    def forward(self, x):
        return x / x.detach().abs().max()


class Noisy(Centered):
    """Mixes rows, and draws in its code, where no module says it."""

    def forward(self, x):
        return functional.dropout(super().forward(x), 0.1, self.training)


class Choosing(nn.Module):
    """Each expert chooses the rows of a batch that score highest."""

    def __init__(self):
        super().__init__()
        self.router, self.expert = nn.Linear(16, 1), nn.Linear(16, 16)

    def forward(self, x):
        scores, chosen = self.router(x)[:, 0].sigmoid().topk(len(x) // 2)
        return x.index_add(0, chosen, self.expert(x[chosen]) * scores[:, None])


@pytest.mark.parametrize("kind", [Scaled, Noisy, Choosing])
def test_other_statistics_of_a_batch(tmp_path, kind):
    torch.manual_seed(0)
    codes, line = found(tmp_path, Vectors(kind()))
    assert [*codes] == ["PL513"] and "`inner`" in codes["PL513"].message and "proved" in line


class Dropping(nn.Module):
    """Draws without mixing rows."""

    def forward(self, x):
        return functional.dropout(x + 0.1 * torch.randn_like(x) + torch.rand(()), 0.1)


def test_random_numbers_mix_no_rows(tmp_path):
    codes, line = found(tmp_path, Vectors(Dropping()))
    assert not codes and "proved" in line


class Mean(nn.Module):
    """Keeps a mean over the rows, for evaluations alone."""

    def __init__(self, shape=(16,)):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def update(self, x):
        self.mean.lerp_(x.mean(0), 0.1)

    def forward(self, x):
        if not self.training:
            return x - self.mean
        self.steps += 1
        with torch.no_grad():
            self.update(x)
        return x


class Replaced(Mean):
    def update(self, x):
        self.mean = x.amax(0)


class Counted(Mean):
    def update(self, _x):
        """Counts passes alone, whose number is that of all ranks."""


@pytest.mark.parametrize("kind", [Mean, Replaced])
def test_a_buffer_of_the_rows_of_a_rank(tmp_path, kind):
    codes, line = found(tmp_path, Vectors(kind()))
    assert [*codes] == ["PL385"] and "`inner.mean`" in codes["PL385"].message and "proved" in line
    assert not found(tmp_path, Vectors(Counted()))[0]


class Longest(Net):
    """Scales by the longest row of a batch, as some rotary embeddings do."""

    def forward(self, input_ids, labels, attention_mask=None):
        x = self.table(input_ids)
        if attention_mask is not None:
            x = x * attention_mask.sum(1).max() / x.shape[1]
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def test_a_model_that_takes_the_longest_row_of_a_batch(tmp_path):
    model = Longest()
    del model.blocks
    codes, line = found(tmp_path, model)
    assert [*codes] == ["PL513"] and "proved" in line


class Staged(Net):
    """Blocks that center their rows, or not."""

    def __init__(self, inner):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), inner()) for _ in range(2))


PIPELINE = """plan p for Staged

mesh {
    pp = 2
}

pipeline on pp {
    microbatches = 2
    stages       = even(blocks.*)
}
"""


def test_a_module_that_mixes_the_rows_of_microbatches(tmp_path):
    path = tmp_path / "p.plan"
    path.write_text(PIPELINE)
    findings = {}
    for inner in (nn.Identity, Centered):
        torch.manual_seed(0)
        checked = planc.check(Staged(inner), str(path), world_size=2)
        findings[inner] = {d.code: d for d in checked if d.severity != "info"}
    assert findings[nn.Identity] == {}
    assert [*findings[Centered]] == ["PL501", "PL513"]
    finding = findings[Centered]["PL513"]
    assert "microbatch" in finding.message and "`blocks.*.*`" in finding.message
    assert finding.labels[0].span.line == 4


def pairs(output):
    return functional.softplus(output[:, None] - output[None]).mean() + output.square().mean()


def contrastive(output):
    one, two = functional.normalize(output).chunk(2, -1)
    return functional.cross_entropy(one @ two.t() * 3, torch.arange(len(output)))


@pytest.mark.parametrize("loss", [pairs, contrastive])
def test_a_loss_over_pairs_of_rows(tmp_path, loss):
    codes, line = found(tmp_path, Vectors(loss=loss))
    assert [*codes] == ["PL510"] and "pairs" in codes["PL510"].help and "proved" in line


# One code, one verdict ----------------------------------------------------------------------------


def verdict(path, seed):
    torch.manual_seed(seed)
    compiled, sink = compile_for(Net(16, skips=False), path, 2, (), False)
    assert not sink.errors
    return flow(compiled, Sink()).document()


@pytest.mark.parametrize("times", sampled([3, 20], 2))
def test_a_verdict_is_of_the_code_and_not_of_the_weights(tmp_path, times):
    """Checked again and again, while another thread interrupts it."""
    path = plan(tmp_path, Net(16), "fsdp")
    ended = threading.Event()

    def busy():
        while not ended.wait(0.001):
            sum(range(10_000))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        every = [verdict(path, seed) for seed in range(times)]
    finally:
        ended.set()
        thread.join()
    assert every[0]["verdict"] == "proved"
    assert all(one == every[0] for one in every)


def test_copies_have_weights_of_their_own():
    torch.manual_seed(0)
    model = Vectors(nn.LayerNorm(16))
    model.scale, model.width = nn.Parameter(torch.ones(4)), nn.Parameter(torch.randn(64, 64) / 8)
    before = {name: p.clone() for name, p in model.named_parameters()}
    torch.manual_seed(1)
    first = copies_of(model)()
    torch.manual_seed(1)
    second = copies_of(model)()
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
        assert torch.equal(model.get_parameter(name), before[name])
        same = torch.equal(parameter, before[name])
        assert same == (name in ("scale", "inner.weight", "inner.bias")), name
    assert 0.5 < first.width.std() / model.width.std() < 2


def test_verify_says_it_too(tmp_path, monkeypatch):
    source = inspect.getsource(Experts), inspect.getsource(Net)
    head = "import torch\nfrom torch import nn\n\n\n"
    (tmp_path / "skipping.py").write_text(head + "\n\n".join(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = plan(tmp_path, Net(), "fsdp")
    proof = planc.verify("skipping:Net", path, processes=2, allow_code=True)
    assert proof.verdict == "refuted" and "PL512" in str(proof)
