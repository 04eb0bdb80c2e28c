"""What test_towers.py runs on every rank: rows with other numbers of images."""

import contextlib
import functools

import torch
from numerics import MODELS, build, emitted, error, gradients_of, inject, quick_compile, whole
from state_jobs import doubled, float64, functions_kept
from torch import distributed

import planc
from planc.ops.context import ContextParallel
from planc.proxy.input_search import BatchShape
from planc.proxy.transformers_model import TransformersBuilder
from planc.runtime.standalone.images import placeholders
from planc.runtime.standalone.pipeline import stages_of
from planc.simulate.batches import TrialPass

ROWS = 4


def made(model, changes=()):
    """A small model; `changes` may have the depths of the tower and of the decoder."""
    values = dict(changes)
    parts = {}
    if "depth" in values:
        deepstack = list(range(values["depth"]))
        tower = {"depth": values.pop("depth"), "deepstack_visual_indexes": deepstack}
        parts["vision_config"] = {**MODELS[model]["vision_config"], **tower}
        parts["text_config"] = {**MODELS[model]["text_config"], **values}
    return build(model, **parts)


def batch_of(model, images, seed=5, padded=True, videos="", packed="", turned=False):
    """A batch whose rows have so many images each, padded on the right, for a model of
    `numerics.MODELS`; and the tokens that images take the place of. `videos` are `some` of the
    images or `all`, rows are `packed` by positions of as many dims, and every second image may be
    `turned`, of a model that gives it another number of tokens then.
    """
    config = build(model).config
    values = config.to_dict() | {"experts_implementation": "eager"}  # which computes in float64
    builder = TransformersBuilder(values)
    found = builder.sample(BatchShape(rows=len(images), length=32, seed=seed, images=images))
    own = torch.isin(found["input_ids"], torch.tensor([*placeholders(config).values()])).any(1)
    assert own.tolist() == [one > 0 for one in images], f"other rows have images: {builder.choice}"
    assert any(images) == ("pixel_values" in found)
    generator = torch.Generator().manual_seed(seed)
    found["labels"][torch.rand(found["labels"].shape, generator=generator) < 0.3] = -100
    if turned:
        found = with_turned(build(model), found)
    if videos:
        found = with_videos(config, found, every=videos == "all")
    if packed:
        found["position_ids"] = packed_positions(build(model), found, packed)
        assert not padded
    if padded:
        mask = torch.ones_like(found["input_ids"])
        mask[1::2, -3:] = 0
        found["labels"][mask == 0] = -100
        found["attention_mask"] = mask
    return TrialPass(inputs=found, tokens=placeholders(config))


def with_turned(model, batch):
    """The batch with images whose width and height are exchanged, the second, fourth and so on: the
    last of their rows, since they have more tokens.
    """
    ids, token = batch["input_ids"], placeholders(model.config)["pixel_values"]
    batch["image_sizes"] = batch["image_sizes"].clone()
    batch["image_sizes"][1::2] = batch["image_sizes"][1::2].flip(1)
    images = {name: batch[name] for name in ("pixel_values", "image_sizes")}
    with torch.no_grad():
        found = model.get_image_features(**images, return_dict=True).pooler_output
    places = ids == token
    begins = places.clone()
    begins[:, 1:] &= ~places[:, :-1]
    for (row, at), tokens in zip(begins.nonzero().tolist(), map(len, found), strict=True):
        ids[row, at : at + tokens] = token
    assert len({len(one) for one in found}) == 2
    assert (ids == token).sum() == sum(map(len, found))
    return batch


def with_videos(config, batch, every):
    """The batch with videos in the place of its wide images, of two frames each, or of all images.

    Qwen3-VL has text between the frames of a video.
    """
    ids, grids = batch["input_ids"], batch.pop("image_grid_thw")
    sizes = grids.prod(1)
    patches = dict(enumerate(batch.pop("pixel_values").split(sizes.tolist())))
    owner = torch.arange(len(grids)).repeat_interleave(sizes // 4)
    wide = grids[:, 2] > grids[:, 1]
    frames = torch.where(wide, 2, 1)
    chosen = torch.ones_like(wide) if every else wide
    grids = torch.where(wide[:, None], grids * grids.new_tensor([2, 1, 1]), grids)
    grids[wide, 2] //= 2
    row, place = (ids == config.image_token_id).nonzero(as_tuple=True)
    ids[row, place] = torch.where(chosen[owner], config.video_token_id, config.image_token_id)
    batch["mm_token_type_ids"][row, place] = torch.where(chosen[owner], 2, 1)
    if config.model_type != "qwen2_5_vl":
        for one in (chosen & (frames > 1)).nonzero().flatten().tolist():
            mine = (owner == one).nonzero().flatten()
            at, places = row[mine[0]], place[mine]
            ids[at, places[-1] + 1] = config.video_token_id
            ids[at, places[len(places) // 2]] = 5
            batch["mm_token_type_ids"][at, places[-1] + 1] = 2
            batch["mm_token_type_ids"][at, places[len(places) // 2]] = 0
    for some, values, grid in (
        (~chosen, "pixel_values", "image_grid_thw"),
        (chosen, "pixel_values_videos", "video_grid_thw"),
    ):
        if some.any():
            kept = some.nonzero().flatten().tolist()
            batch[values] = torch.cat([patches[i] for i in kept])
            batch[grid] = grids[some]
    if config.model_type == "qwen2_5_vl" and chosen.any():
        batch["second_per_grid_ts"] = torch.arange(1.0, 1 + int(chosen.sum())) / 4
    return batch


def packed_positions(model, batch, dims):
    """Positions of two documents a row, the first of which has the row's first image: `[rows,
    length]`, or of time, height and width beside those of text, `[4, rows, length]`.
    """
    ids = batch["input_ids"]
    tokens = [*placeholders(model.config).values()]
    text = ~torch.isin(ids, torch.tensor(tokens))
    # a token of text after another one, behind the first image
    follows = text & text.roll(1, 1)
    begins = [int(own[8:].nonzero()[0]) + 8 for own in follows]
    flat = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    for row, at in zip(flat, begins, strict=True):
        row[at:] -= at
    if dims == "rows":
        return flat
    grids = {n: batch.get(n) for n in ("image_grid_thw", "video_grid_thw")}
    kinds = batch["mm_token_type_ids"]
    places, _ = model.model.get_rope_index(ids, mm_token_type_ids=kinds, **grids)
    for row, at in enumerate(begins):
        places[:, row, at:] -= places[:, row, at].min()
    return torch.cat([flat[None], places])


def of_rank(batch, rank, size):
    """The rows that a data rank reads; positions in several dims have them on dim 1."""
    places = batch.inputs.get("position_ids")
    if places is None or places.dim() == 2:
        return batch.of_rank(rank, size)
    rest = {name: value for name, value in batch.inputs.items() if name != "position_ids"}
    own = TrialPass(inputs=rest, tokens=batch.tokens).of_rank(rank, size)
    return own | {"position_ids": places.chunk(size, 1)[rank]}


def of_passes(batch, rank, size, passes):
    """What a data rank reads in each pass of a step: the rows of `run.accumulation`."""
    return [of_rank(batch, rank * passes + at, size * passes) for at in range(passes)]


def valid(inputs):
    return (inputs["labels"][:, 1:] != -100).sum()


def adapted(model, adapters):
    """The model with peft's adapters, which begin as those of a plan with `init = random`.

    Args:
        adapters: for each rule, a pattern of names of layers, and the rank.
    """
    for seed, (pattern, rank) in enumerate(adapters):
        inject(model, pattern, seed, r=rank, lora_alpha=rank, init_lora_weights=False)
    return model


@functools.cache
def reference(images, rows, model, changes, double, adapters):
    """The loss and gradients of one process; rows without images are in one batch with others.

    Args:
        rows: the other arguments of `batch_of`, as items.
        adapters: as of `adapted`.
    """
    single = adapted(made(model, changes), adapters)
    single = doubled(single) if double else single
    inputs = batch_of(model, images, **dict(rows)).inputs
    count = valid(inputs)
    loss = single(**inputs, num_items_in_batch=count, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad for n, p in single.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def judge(model, plan, overrides=(), changes=(), double=False, adapters=(), **case):
    """Errors of the loss, in training and evaluation, and of the worst gradient.

    Args:
        double: whether all is computed in float64, in which models with states are judged.
        adapters: of the plan, as of `adapted`.
        case: the arguments of `_judge`.
    """
    world = distributed.get_world_size()
    first = made(model, changes)
    lowered = planc.lower(first, plan, world_size=world, overrides=overrides)
    wanted = model, changes, double, adapters
    with float64() if double else contextlib.nullcontext():  # in which other weights are drawn
        spread = doubled(made(model, changes)) if double else first
        return _judge(spread, lowered, wanted, **case)


def _judge(
    spread,
    lowered,
    wanted,
    images=(1, 2, 0, 0),
    passes=1,
    script=False,
    reentrant=None,
    broken="",
    **rows,
):
    """Errors of a model that is spread by a plan.

    Args:
        wanted: the model, its changes, whether in float64, and adapters, of `reference`.
        images: of each row; the rows are divided over the data ranks in order.
        passes: over equally many rows of a data rank, which a step accumulates.
        script: whether the emitted Python spreads the model and runs the step.
        reentrant: the kind of the model's own checkpoints; None for none.
        broken: what is wrong on purpose: `features`, which go to other places than their own, or
            are `unsent` to later stages.
        rows: as of `batch_of`.
    """
    if reentrant is not None:
        spread.gradient_checkpointing_enable({"use_reentrant": reentrant})
    batch = batch_of(wanted[0], images, **rows)
    loss, gradients = reference(images, tuple(rows.items()), *wanted)
    if script:
        with functions_kept(spread):
            found = _scripted(spread, lowered, batch, passes)
    else:
        with quick_compile():
            run = planc.apply(spread, lowered, device_type="cpu")
        if broken == "unsent" and (stages := stages_of(spread)).features is not None:
            stages.features.dense_of = _nothing
        if broken == "features":
            spread.model.language_model.register_forward_pre_hook(_first_ones, with_kwargs=True)
        own = of_passes(batch, run.data_rank, run.data_size, passes)
        evaluated = run.evaluate(own)
        spread.zero_grad()
        found = run.forward_backward(own), evaluated
    own = gradients_of(spread, gradients)
    least = 1e-3 * max(g.abs().max().item() for g in gradients.values())
    errors = {n: error(g, gradients[n], least) for n, g in own.items() if n in gradients}
    pairs = [(whole(g).float(), gradients[n].float()) for n, g in own.items() if n in gradients]
    far, long = (
        sum(float(t.square().sum()) for t in some)
        for some in ([mine - right for mine, right in pairs], [right for _, right in pairs])
    )
    extra = [n for n, g in own.items() if n not in gradients and whole(g).abs().max() > 0]
    worst = max(errors, key=errors.get)
    return {
        "loss": max(error(one, loss) for one in found),
        "gradient": errors[worst],
        "gradients": (far / long) ** 0.5,
        "worst": worst,
        "extra": extra,
        "count": len(errors),
    }


def _nothing(whole, _places, found):
    """Features that are 0, and whose gradients are."""
    return [torch.zeros_like(whole) + 0 * each.sum() for each in found]


def _first_ones(_module, args, kwargs):
    """As many features as before, but the first ones of the batch."""
    if (features := kwargs.get("deepstack_visual_embeds")) is not None:
        kwargs["deepstack_visual_embeds"] = [each.roll(1, 0) for each in features]
    return args, kwargs


def _scripted(made, lowered, batch, passes):
    """The losses of the emitted script's step, the mean over all ranks; none for early stages."""
    rank, size, names = emitted(made, lowered)
    parts = lowered.axis_size("cp") if lowered.has(ContextParallel) else 1
    every = of_passes(batch, rank, size, passes)
    for own in every:
        own["num_items_in_batch"] = valid(batch.inputs) / size / parts
    if parts > 1:
        every = [made.context_parallel.batch(own) for own in every]
    total = torch.zeros(())
    if lowered.pipeline:
        mesh = names["build_mesh"]("cpu")
        total = sum(names["forward_backward"](made, mesh, every), total)
    else:
        for own in every:
            loss = made(**own).loss
            loss.backward()
            total = total + whole(loss)
    total = whole(total).clone()
    distributed.all_reduce(total)
    stages = lowered.axis_size(lowered.pipeline.axis) if lowered.pipeline else 1
    return [total * stages / distributed.get_world_size()]


def drawn(overrides, dropped):
    """What a rank has after a pass with dropout in the tower and in the decoder: how many draws of
    the tower are by rank, its random state, its loss, and a gradient that the ranks of a tensor
    axis have alike.

    Args:
        dropped: whether the tower draws as everything else.
    """
    parts = {n: MODELS["gemma3-vision"][n] for n in ("vision_config", "text_config")}
    changes = {n: {**part, "attention_dropout": 0.2} for n, part in parts.items()}
    model = build("gemma3-vision", **changes)
    lowered = planc.lower(model, "gemma3_vision", world_size=4, overrides=overrides)
    towers = ("model.vision_tower", "model.multi_modal_projector")
    draws = [op for op in lowered.ops if op.WORD == "draws" and str(op.modules) in towers]
    lowered = lowered.map_ops(lambda ops: (op for op in ops if op not in draws or not dropped))
    torch.manual_seed(distributed.get_rank() // 2)
    run = planc.apply(model, lowered, device_type="cpu", compare=0)
    batch = batch_of("gemma3-vision", (2, 1, 1, 0))
    loss = run.forward_backward([batch.of_rank(run.data_rank, run.data_size)])
    norms = [p for n, p in model.named_parameters() if n.endswith("language_model.norm.weight")]
    (gradient,) = [whole(norm.grad).tolist() for norm in norms]
    return len(draws), torch.get_rng_state().tolist(), float(loss), gradient
