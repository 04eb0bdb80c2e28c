"""Images of diffusers' transformers on threads as ranks, each with a part of the patches."""

import copy
from types import SimpleNamespace

import diffused
import pytest
import torch
from helpers import facts, sampled, simulated_case
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from planc.model.patches import patches_of_class
from planc.proxy.shrink import shrink
from planc.runtime.standalone import context_exchange, context_patches, context_ring
from planc.runtime.standalone.context_patches import Joint, context_of_patches
from planc.runtime.standalone.context_tokens import ContextError
from planc.simulate.simulate import simulate
from planc.simulate.thread_ranks import run_ranks

pytestmark = diffused.needed
ATTENTION = ("all_gather", "ulysses", "ring")
HUNYUAN, FLUX, WAN = "hunyuanvideo", "flux.1-dev", "wan2.1-t2v-1.3b"


def small(name, seed=0):
    """(the small model, its inputs); its loss is that of a target."""
    from planc.proxy.diffusers_model import DiffusersBuilder

    builder = DiffusersBuilder(shrink(facts(name).config, ranks=4).values)
    return builder.build(seed), builder.sample()


def split(name, model, mesh, attention="all_gather", ulysses=1):
    """Gives each rank of a mesh a part of the patches, as the lowered plan does."""
    known, real = patches_of_class(facts(name)), facts(name)
    names = {m for modules in known.attention(real) for m in modules.names()}
    context_of_patches(
        model,
        mesh,
        attention=attention,
        ulysses=ulysses,
        balance="none",
        blocks=known.ends(real),
        seeing=[module for n, module in model.named_modules() if n in names],
        patches=known.place,
    )


def error(mine, right, least=1e-12):
    return float((mine - right).abs().max() / right.abs().max().clamp_min(least))


def compared(name, ranks, attention, change=None, ulysses=1):
    """The largest errors of the output, the loss and each gradient, by name."""
    single, given = small(name)
    if change is not None:
        change(given)
    models = [copy.deepcopy(single) for _ in range(ranks)]
    right = single(**given)
    right.loss.backward()
    most = max(p.grad.abs().max() for p in single.parameters() if p.grad is not None)
    errors = {}

    def rank(number):
        mesh, model = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), models[number]
        split(name, model, mesh, attention, ulysses)
        output = model(**model.context_parallel.batch(given))
        output.loss.backward()
        every = {"output": error(output.logits, right.logits)}
        every["loss"] = error(output.loss, right.loss)
        for (n, mine), p in zip(model.named_parameters(), single.parameters(), strict=True):
            if p.grad is not None:
                distributed.all_reduce(mine.grad)
                every[n] = error(mine.grad / ranks, p.grad, 1e-3 * most)
        for n, value in every.items():
            errors[n] = max(value, errors.get(n, 0.0))

    assert (failed := run_ranks(ranks, rank, seconds=120)) is None, failed
    return errors


def worst(*args, **options):
    return max(compared(*args, **options).values())


WAYS = [(name, ranks, how) for name in diffused.TOTALS for ranks in (2, 4) for how in ATTENTION]


@pytest.mark.parametrize(("name", "ranks", "attention"), sampled(WAYS, 5))
def test_patches_of_all_ranks(name, ranks, attention):
    assert worst(name, ranks, attention) < 1e-5


@pytest.mark.parametrize("attention", ["all_gather", "ring"])
@pytest.mark.parametrize("name", diffused.TOTALS)
def test_patches_of_which_neighbours_have_some_heads(name, attention):
    assert worst(name, 4, attention, ulysses=2) < 1e-5


def times_of_patches(given):
    rows, times = len(given["hidden_states"]), given["timestep"]
    count = given["hidden_states"][0, 0].numel() // 4
    given["timestep"] = times[:, None] * torch.linspace(0, 1, count).expand(rows, -1)


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_time_for_each_patch(attention):
    """As in Wan 2.2, where the patches of a given image have another one."""
    assert worst(WAN, 2, attention, change=times_of_patches) < 1e-5


def mask_of_queries(given):
    """Half of the patches do not see the other half's text."""
    tokens = given["encoder_hidden_states"].shape[1] + given["hidden_states"].shape[1]
    mask = torch.ones(len(given["hidden_states"]), 1, tokens, tokens, dtype=torch.bool)
    mask[:, :, -5:, :3] = False
    given["joint_attention_kwargs"] = {"attention_mask": mask}


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_mask_with_a_row_for_each_query(attention):
    assert worst(FLUX, 2, attention, change=mask_of_queries) < 1e-5


def test_a_mask_is_looked_at_once_a_pass(monkeypatch):
    """By all attention modules of a rank, in the forward and in the backward pass."""
    made, plain = [], context_patches.JointMask

    def counted(*args):
        made.append(args)
        return plain(*args)

    monkeypatch.setattr(context_patches, "JointMask", counted)
    monkeypatch.setattr(context_patches, "TILE", 3)
    assert worst(HUNYUAN, 2, "ring") < 1e-5
    assert len(made) == 2


def added_mask(given):
    mask_of_queries(given)
    mask = given["joint_attention_kwargs"]["attention_mask"]
    given["joint_attention_kwargs"] = {"attention_mask": (~mask).float() * -3}


def test_a_mask_that_is_added():
    for attention in ATTENTION[:2]:
        assert worst(FLUX, 2, attention, change=added_mask) < 1e-5
    with pytest.raises(AssertionError, match="a mask that is added to scores"):
        compared(FLUX, 2, "ring", change=added_mask)


# What cannot be split ----------------------------------------------------------------------------


def mask_of_patches_alone(given):
    mask_of_queries(given)
    mask = given["joint_attention_kwargs"]["attention_mask"][..., 1:]
    given["joint_attention_kwargs"] = {"attention_mask": mask}


def residuals(given):
    given["controlnet_block_samples"] = [torch.zeros(1)]


def attention_of_a_kernel(monkeypatch):
    from diffusers.models.transformers import transformer_flux

    monkeypatch.setattr(
        transformer_flux, "dispatch_attention_fn", lambda query, *_, **__: query.clone()
    )


def run_alone(name, ranks, change=lambda _: None, attention="all_gather"):
    """What a rank raises."""
    model, given = small(name)
    change(given)
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def rank(number):
        split(name, models[number], init_device_mesh("cpu", (ranks,)), attention)
        models[number](**given)

    return str(run_ranks(ranks, rank, seconds=60))


def test_a_mask_of_other_tokens():
    said = run_alone(FLUX, 2, mask_of_patches_alone)
    assert "FluxAttention has a mask of [4, 1, 24, 23], for 24 tokens of text and patches" in said


def test_what_is_added_to_whole_images():
    said = run_alone(FLUX, 2, residuals)
    assert "`controlnet_block_samples` is added to the patches of whole images" in said


def test_attention_that_nothing_replaces(monkeypatch):
    attention_of_a_kernel(monkeypatch)
    said = run_alone(FLUX, 2)
    assert "FluxAttnProcessor calls `scaled_dot_product_attention` 0 times, not once" in said


def test_adapters_of_images():
    """Their keys are no patches, and each of the two attentions needs others."""
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model, given = small(FLUX)
    adapter = FluxIPAdapterAttnProcessor(hidden_size=64, cross_attention_dim=64)
    model.transformer_blocks[0].attn.set_processor(adapter)
    rows = len(given["hidden_states"])
    given["joint_attention_kwargs"] = {"ip_hidden_states": [torch.zeros(rows, 4, 64)]}

    def rank(number):
        mine = copy.deepcopy(model)
        split(FLUX, mine, init_device_mesh("cpu", (2,)))
        mine(**given)

    said = str(run_ranks(2, rank, seconds=60))
    assert "FluxAttention attends to other tokens than text and patches" in said


def test_heads_that_do_not_divide():
    said = run_alone(FLUX, 8, attention="ulysses")
    assert "4 heads of FluxAttention are not divisible by 8 ranks of the context axis" in said


@pytest.mark.parametrize("name", diffused.TOTALS)
def test_patches_that_do_not_divide(name):
    text = "the number of patches, 16, is not divisible by 3 ranks of the context axis"
    assert text in run_alone(name, 3)
    model, given = small(name)

    def rank(number):
        mine = copy.deepcopy(model)
        split(name, mine, init_device_mesh("cpu", (3,)))
        with pytest.raises(ContextError, match=text):
            mine.context_parallel.batch(given)

    assert run_ranks(3, rank, seconds=60) is None


# Faults ------------------------------------------------------------------------------------------


def mask_forgotten(monkeypatch):
    monkeypatch.setattr(Joint, "of_queries", lambda self, mask: None)


def mask_of_the_first_ranks_tokens(monkeypatch):
    """The keys of whole images, with the mask that begins at the first one."""

    def shifted(self, mask):
        return mask if mask is None else mask.roll(self.text, -1)

    monkeypatch.setattr(Joint, "of_queries", shifted)


def positions_from_zero(monkeypatch):
    def of_rotary(self, values):
        dim, own = context_patches.rows_dim(values), self.own
        joined = values.shape[dim] == self.whole
        return values.narrow(dim, 0, own + self.text if joined else own)

    monkeypatch.setattr(Joint, "of_rotary", of_rotary)


def changed_gradient(factor):
    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.view_as(value)

        @staticmethod
        def backward(ctx, grad):
            return grad * factor

    return Changed.apply


def text_gradients_doubled(monkeypatch):
    """Those of text's keys and values are added up over the ranks, which all have a copy."""
    plain, twice = Joint.split, changed_gradient(2)

    def split_(self, value, dim=2):
        text, patches = plain(self, value, dim)
        return twice(text) if text.requires_grad else text, patches

    monkeypatch.setattr(Joint, "split", split_)


def outputs_not_scaled(monkeypatch):
    """A rank gets the gradient of its own patches of one loss, as diffusers' hook gives it."""
    plain = context_patches.ContextOfPatches._gather

    def gather(self, module, args, output):
        return plain(self, module, args, changed_gradient(1 / self.size)(output))

    monkeypatch.setattr(context_patches.ContextOfPatches, "_gather", gather)


def own_keys(monkeypatch):
    def gathered(self, part):
        return torch.cat([part] * self.others, 2)

    monkeypatch.setattr(context_exchange.KeyExchange, "gather_tokens", gathered)


def text_of_every_rank(monkeypatch):
    """A ring counts the copies of text that come by."""

    def pieces(self, owner, **_):
        every = slice(0, self.joint.text + self.joint.own)
        yield context_ring.RingPiece(owner, every, every)

    monkeypatch.setattr(context_patches.JointMask, "pieces", pieces)


def text_heads_of_the_first(monkeypatch):
    plain = context_patches.GatherSequence
    repeated = SimpleNamespace(
        apply=lambda part, group: (
            torch.cat([part] * group.size(), 2) if part.shape[2] == 2 else plain.apply(part, group)
        )
    )
    monkeypatch.setattr(context_patches, "GatherSequence", repeated)


FAULTS = [
    (mask_forgotten, HUNYUAN, "all_gather"),
    (mask_of_the_first_ranks_tokens, HUNYUAN, "all_gather"),
    *((positions_from_zero, name, "all_gather") for name in (WAN, FLUX, HUNYUAN)),
    (text_gradients_doubled, FLUX, "all_gather"),
    (text_gradients_doubled, "sd3-medium", "all_gather"),
    *((outputs_not_scaled, name, "all_gather") for name in (WAN, FLUX, HUNYUAN, "sd3-medium")),
    (own_keys, "sd3-medium", "all_gather"),
    (text_of_every_rank, FLUX, "ring"),
    (text_heads_of_the_first, FLUX, "ulysses"),
]
EXCHANGED = """plan t for CLASS

mesh {
    dp_shard = auto
    cp       = 2
}

context on cp {
    attention = HOW
}

fsdp on dp_shard * cp {
    root : unit
}
"""


@pytest.fixture
def plan(tmp_path):
    def written(name, attention):
        path = tmp_path / f"{name}-{attention}.plan"
        text = EXCHANGED.replace("CLASS", facts(name).name).replace("HOW", attention)
        path.write_text(text)
        return path

    return written


def outcome(name, path):
    case = simulated_case(name, path, ())
    return simulate(case.model.builder(), case.compiled.lowered)


@pytest.mark.parametrize(("fault", "name", "attention"), FAULTS)
def test_faults_are_refuted(fault, name, attention, plan, monkeypatch):
    path = plan(name, attention)
    fault(monkeypatch)
    assert outcome(name, path).verdict == "refuted"


@pytest.mark.parametrize(("name", "attention"), dict.fromkeys(f[1:] for f in FAULTS))
def test_without_faults_they_are_proved(name, attention, plan):
    found = outcome(name, plan(name, attention))
    assert found.verdict == "proved" and found.worst < 1e-5
