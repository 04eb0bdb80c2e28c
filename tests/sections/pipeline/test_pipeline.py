"""Pipelines: numbers beside the single process, with threads as ranks, and what refutes them."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import codes, sampled, simulated, slow
from loop_plans import SIZES
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.files.resources import PLANS
from planc.ir.stand_in import Unrepresented
from planc.model.load import load
from planc.ops.pipeline import SCHEDULES
from planc.proof import layout_flow
from planc.proxy.block_order import block_order
from planc.runtime import training_step
from planc.runtime.standalone import pipeline_schedule as schedule
from planc.runtime.standalone import pipeline_step
from planc.runtime.standalone.pipeline import PIPELINE, Stages
from planc.runtime.standalone.pipeline_step import MicrobatchError, microbatches
from planc.runtime.standalone.pipeline_values import SentValues
from planc.simulate.thread_ranks import run_ranks
from planc.simulate.time_limit import limit_simulations

LLAMA, TWO = ("llama-3.1-8b", "llama"), ["pp=2"]


@pytest.mark.parametrize("name", sampled(SCHEDULES, 2))
def test_schedules(name):
    settings = [*TWO, f"schedule={name}", "dp_shard=2"]
    verdict, findings = simulated(*LLAMA, settings, world=4)
    assert (verdict.verdict, findings) == ("proved", [])
    assert verdict.outcome.worst < 2e-5
    by = {section.name: section.verdict for section in verdict.sections}
    assert by["pipeline on pp"] == by["fsdp on dp_shard"] == "proved"


@pytest.mark.parametrize(
    ("settings", "world"),
    [
        (["tp=2"], 8),
        slow(["tp=2", "sequence=false"], 8),
        slow(["tp=2", "loss_chunks=3"], 8),
        slow(["dp_replicate=2"], 8),
        (["pp=3"], 6),
    ],
    ids=str,
)
def test_meshes(settings, world):
    verdict, findings = simulated(*LLAMA, [*TWO, *settings], world=world)
    assert (verdict.verdict, findings) == ("proved", [])


def test_tied_ends():
    verdict, findings = simulated("llama-3.2-1b", "llama", [*TWO, "tp=2"], world=8)
    assert (verdict.verdict, findings) == ("proved", [])


ADAPTED = """plan adapted for llama

extend "llama.plan"

adapters {{
    model.layers.*.self_attn.{{q,k,v,o}}_proj : {how}(rank = 4)
    lm_head                                 : lora(rank = 2)
}}
"""


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ("lora", ["tp=2"]),
        slow("lora", ["schedule=zero_bubble"]),
        slow("lora", ["schedule=zbv", "microbatches=4"]),
        slow("qlora", ["schedule=interleaved_1f1b"]),
    ],
)
def test_adapters(tmp_path, how, settings):
    (tmp_path / "adapted.plan").write_text(ADAPTED.format(how=how))
    plan = tmp_path / "adapted.plan"
    verdict, findings = simulated("llama-3.2-1b", plan, [*TWO, *settings], world=8)
    assert (verdict.verdict, findings) == ("proved", [])


# What refutes it ---------------------------------------------------------------------------------


def test_a_stage_that_loses_a_block(uncached, monkeypatch):
    found = Stages._find_modules

    def lost(self, model, blocks, inputs, outputs):
        places = found(self, model, blocks, inputs, outputs)
        cut = model.get_submodule(blocks)
        module, stage, make = places[cut, "1"]
        places[cut, "1"] = module, self.count if stage == 0 else stage, make
        return places

    monkeypatch.setattr(Stages, "_find_modules", lost)
    assert simulated(*LLAMA, TWO, world=2)[0].verdict == "refuted"


def test_gradients_that_are_scaled_by_microbatches_too(uncached, monkeypatch):
    plain = schedule.schedules.Schedule1F1B.__init__

    def scaled(self, *args, **terms):
        plain(self, *args, **{**terms, "scale_grads": True})

    monkeypatch.setattr(schedule.schedules.Schedule1F1B, "__init__", scaled)
    verdict, findings = simulated(*LLAMA, TWO, world=2)
    assert (verdict.verdict, findings[0].code) == ("refuted", "PL502")


def test_a_mean_of_means(uncached, monkeypatch):
    monkeypatch.setattr(training_step, "_items", lambda *_: torch.tensor(100.0))
    assert simulated(*LLAMA, TWO, world=2)[0].verdict == "refuted"


def test_an_untied_pair(uncached, monkeypatch):
    monkeypatch.setattr(pipeline_step, "ties_summed", lambda stages, model: nullcontext())
    verdict, findings = simulated("llama-3.2-1b", "llama", TWO, world=2)
    assert (verdict.verdict, findings[0].code) == ("refuted", "PL502")


def test_a_stage_that_raises_ends_the_others(uncached, monkeypatch):
    run = Stages.run

    def raising(self, model, stage, received, kwargs):
        if stage == 1:
            raise ValueError("stage 1 is broken")
        return run(self, model, stage, received, kwargs)

    monkeypatch.setattr(Stages, "run", raising)
    assert simulated(*LLAMA, TWO, world=2)[0].verdict == "refuted"


def test_a_message_that_nobody_sends(uncached, monkeypatch):
    monkeypatch.setattr(schedule.RunningStage, "get_fwd_send_ops", lambda self, chunk: [])
    with limit_simulations(60.0):
        verdict, findings = simulated(*LLAMA, TWO, world=2)
    assert (verdict.verdict, codes(findings)) == ("refuted", ["PL503"])


def test_what_is_not_simulated_is_not_passed_in_silence(uncached, monkeypatch):
    reason = "nothing stands for it"
    monkeypatch.setattr(layout_flow, "small_case", lambda *_: Unrepresented(reason=reason))
    verdict, _ = simulated(*LLAMA, TWO, world=2)
    assert (verdict.verdict, verdict.reason) == ("unknown", reason)


@pytest.mark.parametrize("fault", ["", "zeros"])
def test_a_shared_parameter_that_no_stage_has_a_gradient_of(monkeypatch, fault):
    """Zeros would have it decayed, and one process leaves it alone."""
    if fault:
        monkeypatch.setattr(
            pipeline_step, "gradients_of", lambda stages, copies: [torch.ones(())] * len(copies)
        )
    seen = {}

    def rank(number):
        used, one_uses, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        mesh = init_device_mesh("cpu", (2,))
        copies = [(parameter, [0, 1]) for parameter in (used, one_uses, unused)]
        stages = SimpleNamespace(mesh=mesh, copies=lambda model: copies)
        used.grad = torch.full((2,), 10.0)  # of an earlier pass, summed already
        with pipeline_step.ties_summed(stages, torch.nn.Module()):
            used.grad = torch.full((2,), number + 1.0)
            if number:
                one_uses.grad = torch.full((2,), 5.0)
        seen[number] = [p.grad if p.grad is None else p.grad[0].item() for p, _ in copies]

    assert run_ranks(2, rank, 30) is None
    assert seen[0] == seen[1] == [13.0, 5.0, 0.0 if fault else None]


# Messages between threads ------------------------------------------------------------------------


def test_receives_take_messages_in_the_order_in_which_they_are_posted():
    seen = {}

    def rank(number):
        if number == 0:
            for value in (1.0, 2.0, 3.0):
                distributed.send(torch.full((2,), value), 1)
            return
        boxes = [torch.zeros(2) for _ in range(3)]
        works = [distributed.irecv(box, 0) for box in boxes]
        for work in reversed(works):
            work.wait()
        seen[number] = [float(box[0]) for box in boxes]

    assert run_ranks(2, rank, 30) is None
    assert seen == {1: [1.0, 2.0, 3.0]}


def test_ranks_that_wait_for_each_other_are_found():
    failure = run_ranks(2, lambda number: distributed.recv(torch.zeros(1), 1 - number), 30)
    assert failure is not None and "wait for each other" in failure.message


# Batches -----------------------------------------------------------------------------------------


def test_microbatches():
    ids, positions = torch.arange(24).view(6, 4), torch.arange(72).view(3, 6, 4)
    parts = microbatches({"input_ids": ids, "position_ids": positions, "use_cache": False}, 3, {})
    assert [part["input_ids"].tolist() for part in parts] == [
        ids[i : i + 2].tolist() for i in (0, 2, 4)
    ]
    assert [tuple(part["position_ids"].shape) for part in parts] == [(3, 2, 4)] * 3
    assert {part["use_cache"] for part in parts} == {False}


IMAGE = 9
"""The token that images take the place of."""


def with_images(*placeholders, grid=((1, 2, 2), (1, 2, 4), (1, 2, 2))):
    """A batch of rows with so many placeholders each, for images of as many patches over two."""
    ids = torch.ones(len(placeholders), 8, dtype=torch.long)
    for row, count in enumerate(placeholders):
        ids[row, 1 : 1 + count] = IMAGE
    grids = torch.tensor(grid)
    pixels = torch.arange(int(grids.prod(1).sum())).view(-1, 1)
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grids}


def test_microbatches_have_the_images_of_their_rows():
    parts = microbatches(with_images(6, 0, 0, 2), 2, {"pixel_values": IMAGE})
    assert [part["pixel_values"].flatten().tolist() for part in parts] == [
        [*range(12)],
        [*range(12, 16)],
    ]
    assert [part["image_grid_thw"].tolist() for part in parts] == [
        [[1, 2, 2], [1, 2, 4]],
        [[1, 2, 2]],
    ]
    parts = microbatches(with_images(6, 2, 0, 0), 2, {"pixel_values": IMAGE})
    assert [part["pixel_values"] is None for part in parts] == [False, True]
    assert [part["image_grid_thw"] is None for part in parts] == [False, True]


def test_a_run_of_placeholders_is_an_image():
    """Crops of an image have other numbers of tokens than patches say."""
    batch = {**with_images(5, 1, 0, 2), "image_sizes": torch.tensor([[1, 2], [2, 2], [2, 1]])}
    batch = {n: v for n, v in batch.items() if n != "image_grid_thw"}
    batch["pixel_values"] = torch.zeros(3, 4, 1)
    parts = microbatches(batch, 4, {"pixel_values": IMAGE})
    sizes = [part["image_sizes"] for part in parts]
    assert sizes.pop(2) is None
    assert [size.tolist() for size in sizes] == [[[1, 2]], [[2, 2]], [[2, 1]]]


def test_images_that_no_row_has():
    for placeholders in ((5, 1, 0, 2), (0, 0, 0, 0), (6, 0, 0, 6)):
        with pytest.raises(MicrobatchError, match="the images of `pixel_values` are not those of"):
            microbatches(with_images(*placeholders), 2, {"pixel_values": IMAGE})
    one_grid = {**with_images(6, 0, 0, 2), "pixel_values": torch.zeros(15, 1)}
    with pytest.raises(MicrobatchError, match=r"`pixel_values` has \[15, 1\] for 3 images"):
        microbatches(one_grid, 2, {"pixel_values": IMAGE})


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"input_ids": torch.zeros(5, 4)}, "5 rows cannot be cut into 2 microbatches"),
        (
            {"input_ids": torch.zeros(4, 4), "cu_seqlens": torch.zeros(7)},
            "`cu_seqlens` of shape [7]",
        ),
    ],
)
def test_batches_that_cannot_be_cut(batch, told):
    with pytest.raises(MicrobatchError, match=re.escape(told)):
        microbatches(batch, 2, {})


def test_a_step_whose_batch_cannot_be_cut():
    """It stops on every rank, with the code."""
    raised = {}

    def rank(number):
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **SIZES)
        model = AutoModelForCausalLM.from_config(config)
        run = planc.apply(model, "llama", overrides=["pp=2"], device_type="cpu", compare=0)
        ids = torch.ones(5, 8).long()
        try:
            run.forward_backward([{"input_ids": ids, "labels": ids}])
        except PlanError as error:
            raised[number] = [(d.code, d.labels[0].span.text) for d in error.diagnostics]

    assert run_ranks(2, rank, seconds=60) is None
    line = 'run.forward_backward([{"input_ids": ids, "labels": ids}])'
    assert raised == {0: [("PL488", line)], 1: [("PL488", line)]}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("few", [0, 1], ids=["none", "one"])
def test_ranks_with_different_numbers_of_batches_stop_together(stages, few):
    raised = {}

    def rank(number):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
        overrides = [f"pp={stages}", "microbatches=2"]
        run = planc.apply(model, "llama", overrides=overrides, device_type="cpu", compare=0)
        ids = torch.ones(2, 8).long()
        batches = [{"input_ids": ids, "labels": ids}] * (2 if number else few)
        for step in (run.forward_backward, run.evaluate):
            try:
                step(batches)
            except PlanError as error:
                raised.setdefault(number, []).append(str(error).partition(" (")[0])

    assert run_ranks(2, rank, seconds=60) is None
    for number, told in raised.items():
        own = 2 if number else few
        text = f"the ranks pass {few} to 2 batches in one step; rank {number} passes {own}"
        assert len(told) == 2 and all("PL469" in t and t.endswith(text) for t in told)
    assert len(raised) == 2


def test_full_weights_have_the_order_of_the_model():
    """Files of weights, and which name of tied weights is written, do not hang on the hash seed."""
    found, config = {}, AutoConfig.for_model("llama", **SIZES)

    def rank(number):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        names = [*model.state_dict()]
        run = planc.apply(model, "llama", overrides=["pp=2"], device_type="cpu", compare=0)
        full = [*run.full_state_dict(every_rank=True)]
        model.model.layers[0].scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        found[number] = names, full, [*run.full_state_dict(every_rank=True)]

    assert run_ranks(2, rank, seconds=60) is None and len(found) == 2
    for names, full, more in found.values():
        assert full == names and more == [*names, "model.layers.0.scale"]


class Failing(SentValues):
    """Cannot keep an argument of one of the blocks of a later stage."""

    def __init__(self, number):
        super().__init__((), (), (0, 2, 4))
        self.number = number

    def keep(self, stage, number, args, kwargs):
        if number == self.number:
            raise ValueError("not kept")


def cpu_error():
    """Torch's own error for a CPU without memory."""
    with pytest.raises(RuntimeError, match="CPUAllocator") as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


CPU_ERROR = cpu_error()


@pytest.mark.parametrize(
    ("error", "values", "raised"),
    [
        (ValueError("after the blocks"), None, ""),
        (ValueError("after the blocks"), Failing(None), ""),
        (None, Failing(2), "not kept"),
        (None, Failing(3), "not kept"),
        (torch.OutOfMemoryError("no memory"), None, "no memory"),
        (distributed.DistBackendError("a rank died"), None, "a rank died"),
        (CPU_ERROR, None, str(CPU_ERROR)),
    ],
    ids=["after all", "after all, values", "value 2", "value 3", "memory", "rank died", "CPU"],
)
def test_errors_behind_the_blocks_of_a_stage(error, values, raised):
    """An error is without effect only if all that is sent was kept and modules were missing."""
    config = AutoConfig.for_model("llama", **{**SIZES, "num_hidden_layers": 4})
    tokens, found = torch.arange(8).view(2, 4), {}

    def failing(plain, **kwargs):
        output = plain(**kwargs)
        if error is not None:
            raise error
        return output

    def rank(number):
        model = AutoModelForCausalLM.from_config(config)
        states = model(input_ids=tokens, output_hidden_states=True).hidden_states
        settings = [*TWO, "param_dtype=fp32", "reduce_dtype=fp32"]
        planc.apply(model, "llama", overrides=settings, device_type="cpu", compare=0)
        if number == 0:
            stages = getattr(model, PIPELINE)
            stages.values, stages.plain = values, partial(failing, stages.plain)
            try:
                sent = stages.run(model, 0, None, {"input_ids": tokens})
                torch.testing.assert_close(sent, states[stages.bounds[1]])
                found[number] = ""
            except (RuntimeError, ValueError) as caught:
                found[number] = str(caught)

    assert run_ranks(2, rank, seconds=60) is None
    assert found == {0: raised}


# Models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "blocks", "after"),
    [
        ("gpt2", "transformer.h", {"transformer.ln_f", "lm_head"}),
        ("opt-1.3b", "model.decoder.layers", {"model.decoder.final_layer_norm", "lm_head"}),
    ],
)
def test_what_runs_around_the_blocks(model, blocks, after):
    order = block_order(load(model, Sink()), blocks)
    assert not (order.problem or order.given or order.states or order.apart)
    assert order.after == after


def test_a_pipeline_is_a_lowered_plan(tmp_path):
    """Its JSON is read back, with a list of operations for each rank of the pipeline's axis."""
    from planc.ops.document import digest, dumps, loads

    done = compile_plan("llama-3.1-8b", "llama", Sink(), world_size=8, settings=["pp=4"])
    text = dumps(done.lowered)
    again = loads(text, "it", sink := Sink())
    assert again is not None, list(sink)
    assert digest(again) == digest(done.lowered)
    assert len(json.loads(text)["stages"]) == 4


STAGES = """plan own for llama

mesh {
    pp       = 2
    dp_shard = auto
}

pipeline on pp {
    microbatches = 4
    stages       = even(model.layers.*)
}

fsdp on dp_shard {
    root : unit
}
"""


def compiled_own(facts, folder):
    """The pipeline of the plan for a model, and the codes of errors."""
    sink = Sink()
    (folder / "own.plan").write_text(STAGES)
    done = compile_plan(facts, str(folder / "own.plan"), sink, world_size=4)
    found = [d.code for d in sink if d.severity == "error"]
    return done.lowered and done.lowered.pipeline, found


def test_a_parameter_that_blocks_of_two_stages_share(tmp_path):
    facts = load("llama-3.1-8b", Sink())
    for blocks, names in (((3, 20), 1), ((3, 4), 0)):
        shared = tuple(f"model.layers.{at}.mlp.up_proj.weight" for at in blocks)
        op, found = compiled_own(replace(facts, ties=(shared,)), tmp_path)
        assert found == []
        assert op.ties == shared[:names]


def test_a_table_with_three_holders(tmp_path):
    """As of heads that predict several tokens: an embedding, and two blocks of other stages."""
    facts = load("llama-3.1-8b", Sink())
    names = "model.embed_tokens.weight", "lm_head.weight"
    (tmp_path / "own.plan").write_text(STAGES.replace("pp       = 2", "pp       = 4"))
    more = "model.layers.9.mlp.up_proj.weight"  # any parameter of a stage between
    done = compile_plan(
        replace(facts, ties=((*names, more),)), str(tmp_path / "own.plan"), Sink(), world_size=4
    )
    (some,) = done.lowered.pipeline.shares
    assert (some.stages, some.parameters) == ((0, 1, 3), names[:1])
    held = [[str(m) for m in stage.ops[0].shared_modules] for stage in done.lowered.stages]
    assert [bool(kept) for kept in held] == [True, True, False, True]


def test_a_model_whose_order_nothing_shows_is_not_cut(tmp_path, monkeypatch):
    from planc.elaborate.sections import pipeline as section
    from planc.proxy.block_order import BlockOrder

    unknown = BlockOrder(problem="the proxy model does not run")
    monkeypatch.setattr(section, "block_order", lambda *_: unknown)
    assert compiled_own(load("llama-3.1-8b", Sink()), tmp_path)[1] == ["PL566"]


def test_norms_of_later_steps_are_as_near_as_the_weights():
    """AdamW enlarges rounding: a first norm that is off by as much is wrong."""
    from planc.simulate.prove import _norm

    assert _norm([1e-7, 5e-4]) == 1e-7
    assert _norm([5e-4, 1e-7]) == 5e-4
    assert _norm([1e-7, 2e-3]) == 2e-3


def test_logits_of_routers_in_the_loss_are_refused(tmp_path):
    """The last stage has those of its own blocks alone."""
    path = tmp_path / "config.json"
    values = json.loads((PLANS / "models" / "mixtral-8x7b.json").read_text())
    path.write_text(json.dumps({**values, "output_router_logits": True}))
    sink = Sink()
    given = {"world_size": 4, "settings": [*TWO, "microbatches=2"]}
    compile_plan(load(str(path), sink), "mixtral", sink, **given)
    assert "PL565" in {d.code for d in sink}


def test_a_stage_that_trains_nothing(tmp_path):
    """An optimizer of its rank would have no parameters."""
    path, sink = tmp_path / "own.plan", Sink()
    train = "train {\n    model   : frozen\n    lm_head : trainable\n}\n"
    path.write_text(f'plan own for llama\nextend "llama.plan"\n{train}')
    settings = ("pp=2", "microbatches=2")
    compile_plan("llama-3.1-8b", str(path), sink, world_size=4, settings=settings)
    (found,) = [d for d in sink if d.code == "PL567"]
    assert found.message.startswith("stage 0 has nothing to train")
