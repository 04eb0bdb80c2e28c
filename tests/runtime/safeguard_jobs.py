"""What test_safeguards runs on every rank."""

import logging
import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import numerics
import torch
from torch import distributed

import planc
from planc.model.module_table import facts_of
from planc.runtime.known_verdict import KnownVerdict
from planc.simulate import verdict_store

FP32 = ["param_dtype=fp32", "reduce_dtype=fp32"]


@contextmanager
def logged():
    """The lines that planc logs, with their level."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("planc")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def rank():
    return distributed.get_rank()


def said(call):
    """What a call raised, and nothing if it did not."""
    try:
        call()
    except planc.PlanError as error:
        return str(error)
    return ""


def seeded(seed, **changes):
    """A model whose weights follow from a seed."""
    model = numerics.build("llama", **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def batch(seed, rows=2, length=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(128, (rows, length), generator=generator)


def step(model, tokens, **others):
    model(input_ids=tokens, labels=tokens, **others).loss.backward()


# Weights -----------------------------------------------------------------------------------------


def with_plan(folder, text):
    path = Path(folder) / f"own-{rank()}.plan"
    path.write_text(text)
    return str(path)


def other_seeds(overrides, compare=2):
    """Each rank builds another model; the log of `apply`, and what the first pass raises."""
    model = seeded(rank())
    with logged() as lines:
        run = planc.apply(model, "llama", overrides=overrides, device_type="cpu", compare=compare)
    first = said(lambda: step(model, batch(run.data_rank)))
    return lines, first, said(lambda: step(model, batch(run.data_rank)))


def one_other_value(overrides):
    """Rank 2 has one parameter with one other value."""
    model = seeded(0)
    if rank() == 2:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    planc.apply(model, "llama", overrides=overrides, device_type="cpu")
    return said(lambda: step(model, batch(0)))


def loaded(folder, overrides, how):
    """Ranks with other weights that load some before the first pass."""
    if rank() == 0:
        seeded(7).save_pretrained(folder)
    distributed.barrier()
    model = seeded(rank())
    run = planc.apply(model, "llama", overrides=overrides, device_type="cpu")
    if how == "run":
        run.load(folder)
    else:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, seeded(7).state_dict(), options=options)
    raised = said(lambda: step(model, batch(run.data_rank)))
    full = run.full_state_dict(every_rank=True)
    return raised, all(torch.equal(full[n], v) for n, v in seeded(7).state_dict().items())


def from_rank0(folder, text, meta=False):
    """Under a plan with `weights = rank0` all get what rank 0 has built."""
    model = seeded(rank())
    if meta and rank() > 0:
        model = model.to("meta")
    plan = with_plan(folder, text)
    with logged() as lines:
        run = planc.apply(model, plan, device_type="cpu")
    if meta:
        return lines, said(lambda: step(model, batch(run.data_rank))), None
    full = run.full_state_dict(every_rank=True)
    right = all(torch.equal(full[n], v) for n, v in seeded(0).state_dict().items())
    return lines, said(lambda: step(model, batch(run.data_rank))), right


# Optimizers --------------------------------------------------------------------------------------


def optimizers(overrides):
    """What `run.optimizer` raises for one created before `apply`, and for one created after."""
    model = seeded(0)
    early = torch.optim.AdamW(model.parameters())
    run = planc.apply(model, "llama", overrides=overrides, device_type="cpu")
    late = torch.optim.AdamW(model.parameters())
    return said(lambda: run.optimizer(early)), said(lambda: run.optimizer(late))


# Inputs ------------------------------------------------------------------------------------------


def rows(overrides, plan="llama", how="right", passes=1, compare=2, changes=None):
    """What the passes raise where the sampler gives rows as `how` says, and the collectives."""
    model = numerics.build("llama", **(changes or {}))
    arguments = {"overrides": overrides, "device_type": "cpu", "compare": compare}
    run = planc.apply(model, plan, **arguments)
    raised = []
    for number in range(passes):
        tokens = batch(10 * number + (run.data_rank if how == "right" else 0))
        others = {}
        match how:
            case "sampler":  # as torch's DistributedSampler without arguments
                data = torch.utils.data.TensorDataset(torch.arange(64))
                sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
                tokens = batch(list(sampler)[number])
            case "swapped" if rank() == 1:
                tokens = tokens.flip(0)
            case "length" if rank() == 1:
                tokens = batch(10 * number, length=12)
            case "mask":
                mask = torch.ones_like(tokens)
                mask[0, : rank()] = 0
                others = {"attention_mask": mask}
            case "late" if number == 1:
                tokens = batch(rank())
            case "later" if number == 2:
                tokens = batch(rank())
        raised.append(said(lambda tokens=tokens, others=others: step(model, tokens, **others)))
        if raised[-1]:
            break
    return raised, len(model._forward_pre_hooks)


def later_rows(overrides, how, plan="llama", wrong=3, ranks=(1, 3), folder=None):
    """What four passes raise, of which `ranks` read other rows in pass number `wrong`.

    Args:
        how: `loop` of `run.forward_backward`, or `own` loop of the script; `saved`, which saves
            after each pass; `evaluated`, without gradients.
    """
    model = numerics.build("llama", num_hidden_layers=4, num_key_value_heads=4)
    run = planc.apply(model, plan, overrides=overrides, device_type="cpu", compare=1)
    raised = []
    for number in range(1, 5):
        tokens = batch(10 * number + run.data_rank, rows=4)
        if rank() in ranks and number == wrong:
            tokens = tokens.flip(0)

        def one(tokens=tokens, number=number):
            given = {"input_ids": tokens, "labels": tokens}
            if how == "loop":
                run.forward_backward([given])
            elif how == "evaluated":
                run.evaluate([given])
            else:
                model(**run.batch(given)).loss.backward()
            if how == "saved":
                run.save(Path(folder) / "run", step=number)

        raised.append(said(one))
        if raised[-1]:
            break
    saved = sorted(p.name for p in Path(folder).iterdir()) if folder else []
    return raised, saved, run.first.rows and run.first.rows.seen


def changed(overrides, how, folder=None):
    """What the first training pass raises where a script changes weights after `apply`, what one
    after a pass without gradients does, and how far the weights are from rank 0's change.
    """
    model = numerics.build("llama")
    run = planc.apply(model, "llama", overrides=overrides, device_type="cpu")
    weight, norm = model.model.layers[0].mlp.up_proj.weight, model.model.norm.weight
    with torch.no_grad():
        match how:
            case "one rank" if rank() == 2:
                (weight.to_local() if hasattr(weight, "to_local") else weight).mul_(2)
            case "values":
                (norm.to_local() if hasattr(norm, "to_local") else norm).add_(1 + rank())
            case "buffer" if rank() == 2:
                model.model.rotary_emb.inv_freq.mul_(2)
            case "all":
                weight.mul_(2)
            case "loaded then one rank":
                if rank() == 0:
                    seeded(7).save_pretrained(folder)
                distributed.barrier()
                run.load(folder)
                if rank() == 2:
                    (weight.to_local() if hasattr(weight, "to_local") else weight).mul_(2)
    with torch.no_grad():
        model(input_ids=batch(run.data_rank))
    return [said(lambda: step(model, batch(run.data_rank))) for _ in range(2)]


def same_rows(overrides, others, compare=2):
    """The lines that are logged in three passes, of which `others` have rows by data rank."""
    model = numerics.build("llama")
    run = planc.apply(model, "llama", overrides=overrides, device_type="cpu", compare=compare)
    with logged() as lines:
        for number in range(3):
            step(model, batch(10 * number + (run.data_rank if number in others else 0)))
    return lines, len(model._forward_pre_hooks)


def evaluated_alone(overrides):
    """Data rank 0 evaluates what the others do not, and then all train on the same rows.

    Returns:
        The lines that are logged, the compared training passes before and after these, and the
        model's hooks after them.
    """
    model = numerics.build("llama")
    run = planc.apply(model, "llama", overrides=overrides, device_type="cpu", compare=2)
    with logged() as lines:
        for _ in range(3 if run.data_rank == 0 else 0):
            with torch.no_grad():
                model(input_ids=batch(0))
        before = run.first.trained
        for number in range(3):
            step(model, batch(number))
    return lines, before, run.first.trained, len(model._forward_pre_hooks)


def uneven(overrides, how, plan="llama"):
    """The lines that are logged in two passes whose labels are `how`, and the number of
    collectives of a pass beyond those of a model that compares nothing.
    """
    made = []
    for compare in (0, 2):
        model = numerics.build("llama")
        run = planc.apply(model, plan, overrides=overrides, device_type="cpu", compare=compare)
        with (
            logged() as lines,
            mock.patch.object(
                distributed, "all_gather_single", wraps=distributed.all_gather_single
            ) as gathers,
        ):
            for number in range(2):
                _pass(run, number, how)
        made.append(gathers.call_count)
    return lines, made[1] - made[0]


def _ignoring(loss, *some, num_items_in_batch=None, **more):
    return loss(*some, **more)


def _pass(run, number, how):
    tokens = batch(10 * number + run.data_rank)
    labels, others = tokens.clone(), {}
    most = {"even": 4, "none": 16}.get(how, 3 + run.data_rank)
    labels[:, : most if how != "none" or run.data_rank == 1 else 1] = -100
    given = {"input_ids": tokens, "labels": labels}
    match how:
        case "loop" | "loop that weighs":
            if how == "loop that weighs" and number == 0:
                run.model.loss_function = partial(_ignoring, run.model.loss_function)
            run.forward_backward([given])
            return
        case "given next" | "even next":  # as a packing collator writes them
            moved = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
            given["shift_labels"] = moved.contiguous()
            given["labels"] = tokens
            if how == "even next":
                given |= {"shift_labels": tokens, "labels": labels}
        case "own counts":  # and weighs its losses by them
            run.num_items_in_batch(labels)
        case "divided":
            others = {"num_items_in_batch": run.num_items_in_batch(labels)}
        case "local count":
            others = {"num_items_in_batch": (labels[:, 1:] != -100).sum()}
        case "given":
            others = {"num_items_in_batch": torch.tensor(20.0)}
        case "without labels" if run.data_rank == 1:
            given.pop("labels")
        case "evaluated first" if number == 0:
            run.evaluate([given])
            return
    run.model.train(how != "frozen")
    with torch.set_grad_enabled(how != "no gradients"):
        run.model(**run.batch(given), **others)


def accumulated(overrides):
    """Two passes under no_sync and one outside, with checkpointing: nothing is raised, and the
    gradients are those of a model that compares nothing.
    """
    grads = []
    for compare in (2, 0):
        model = numerics.build("llama")
        run = planc.apply(model, "llama", overrides=overrides, device_type="cpu", compare=compare)
        with run.no_sync():
            step(model, batch(run.data_rank))
            step(model, batch(run.data_rank + 20))
        step(model, batch(run.data_rank + 40))
        grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    one, other = grads
    return all(torch.equal(one[n], other[n]) for n in one)


def compiled(folder, text):
    """What three passes raise, the second with wrong rows, where the plan compiles the blocks.
    Dynamo alone runs: a backend would take minutes.
    """
    torch._dynamo.reset()
    overrides = [*FP32, "tp=2", "recompute=false"]
    with mock.patch("torch.compile", partial(torch.compile, backend="eager")):
        model = numerics.build("llama")
        run = planc.apply(model, with_plan(folder, text), overrides=overrides, device_type="cpu")
        right = said(lambda: step(model, batch(run.data_rank)))
        wrong = said(lambda: step(model, batch(rank())))
        later = said(lambda: step(model, batch(run.data_rank)))
    graphs = sum(torch._dynamo.utils.counters["stats"].values())
    return right, wrong, later, graphs


# Verdicts ----------------------------------------------------------------------------------------


def known(levels, require=None, overrides=()):
    """`apply` where the cache of each rank knows another verdict; None for a rank without one."""
    model = numerics.build("llama")
    lowered = planc.lower(model, "llama", world_size=4, overrides=overrides)
    facts = facts_of(model, config=model.config)
    before = os.environ["PLANC_CACHE_DIR"]
    os.environ["PLANC_CACHE_DIR"] = f"{before}/{'-'.join(map(str, levels))}/{rank()}"
    try:
        if levels[rank()]:
            text = f"{levels[rank()]}, says rank {rank()}"
            known = KnownVerdict(level=levels[rank()], text=text)
            verdict_store.remember(lowered, facts, known)
        with logged() as lines:
            raised = said(
                lambda: planc.apply(
                    model, "llama", overrides=overrides, device_type="cpu", require=require
                )
            )
    finally:
        os.environ["PLANC_CACHE_DIR"] = before
    touched = any(type(p) is not torch.nn.Parameter for p in model.parameters())
    return raised, lines, touched
