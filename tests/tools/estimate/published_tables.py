"""Published tables of training steps, row by row beside `planc estimate` of a plan with the same
mesh and batch.

A row of another stack is estimated with kernels of its own. All else is as in planc's stack, which
has no overlap of a dispatch and no CUDA graphs. `LEFT_OUT` names rows that are not estimated.
"""

import csv
import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from other_models import fitted_elsewhere
from published_rows import LEFT_OUT, Row, automodel, bridge, foundry, nemo, papers, titan

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.tools.estimate.answer import Request, answer_for
from planc.tools.estimate.formats import NumberFormat
from planc.tools.estimate.from_plan import Batch
from planc.tools.estimate.memory import GIB, memory, usable
from planc.tools.estimate.profiles import FOLDER, Hardware, Stack
from planc.tools.estimate.step import Estimate
from planc.tools.estimate.step_time import step_time
from planc.tools.estimate.workload import Sharding, Workload

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "plans" / "models"
ROWS = ROOT / "docs" / "generated" / "published-rows.csv"
COLUMNS = (
    *("source", "release", "model", "GPUs", "mesh", "rows"),
    *("published", "estimated", "error", "others", "GiB"),
)
"""The columns of the table of all rows; tokens a second and GPU, GiB of the fullest rank."""


def published(rows):
    """The newest release of each configuration."""
    newest = {}
    for row in sorted(
        rows, key=lambda row: [int(n) for n in row.release.split(".") if n.isdigit()]
    ):
        newest[row.configuration] = row
    return list(newest.values())


def every_row():
    """All rows, of which `Row.judged` says whether the goals are for them."""
    return published([*bridge(), *automodel(), *nemo(), *foundry(), *titan(), *papers()])


def configuration(row):
    """The configuration of a row's model."""
    config = json.loads((MODELS / f"{row.model}.json").read_text()) | dict(row.changes)
    if "layer_types" in config:  # as many as layers, which alternate
        layers = config["num_hidden_layers"]
        config["layer_types"] = [config["layer_types"][i % 2] for i in range(layers)]
    return config


SELECTIVE = """
checkpoint {
    $blocks : ops(save = [attention, matmul(every = 2)])
}
"""


def plan_text(row, config):
    """A plan of the same mesh."""
    text = f'plan row for {row.plan}\n\nextend "{row.plan}"\n'
    if row.half:
        text += "\nload {\n    dtype = bf16\n}\n"
    if row.ranks("cp") > 1:
        text += "\ncontext on cp {\n    override attention = ring\n}\n"
    if row.recompute == "selective":
        text += SELECTIVE
    if row.ranks("pp") > 1:
        stages, layers = row.virtual * row.ranks("pp"), config["num_hidden_layers"]
        blocks = split(layers, stages)
        schedule = row.schedule or ("interleaved_1f1b" if row.virtual > 1 else "1f1b")
        rules = f"schedule = {schedule}\n    override stages = weighted($blocks, blocks = {blocks})"
        text += f"\npipeline on pp {{\n    override {rules}\n}}\n"
    return text


def split(layers, stages):
    """The layers of each stage: where stages do not divide them, Megatron counts the embedding and
    the loss as a layer each.
    """
    more = 2 if layers % stages and (layers + 2) % stages == 0 else 0
    every = layers + more
    blocks = [every * (i + 1) // stages - every * i // stages for i in range(stages)]
    blocks[0], blocks[-1] = blocks[0] - more // 2, blocks[-1] - more // 2
    return blocks


def kernels_of(row, folder):
    """The kernels of a row: those with products in 8 bits keep their inputs in 8 bits, as the
    activations of Korthikanti et al. 2022 with one byte an element.
    """
    if not row.low or row.kernels != "fused":
        return row.kernels
    text = (FOLDER / "fused.toml").read_text()
    for name in ("norm_output", "activation_output"):
        assert f"\n{name} = 1\n" in text
        text = text.replace(f"\n{name} = 1\n", f"\n{name} = 0.5\n")
    (path := folder / "fused.toml").write_text(text)
    return str(path)


def planned(row):
    """The answer of `planc estimate` for a plan of the same mesh and batch, before what only the
    row's stack does.
    """
    sink, config = Sink(), configuration(row)
    passes = row.rows // (row.data * row.micro)
    staged = row.ranks("pp") > 1
    settings = [*row.settings, f"recompute={str(row.recompute == 'full').lower()}"]
    settings += [f"microbatches={passes // row.runs}"] if staged else []
    settings += ["reduce_dtype=bf16"] if row.half or row.narrow else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "row.plan").write_text(plan_text(row, config))
        files = str(folder), str(folder / "row.plan")
        compiled = compile_plan(*files, sink, world_size=row.gpus, settings=settings)
        assert compiled.applied, sink.diagnostics
        batch = Batch(
            global_batch=row.rows, sequence=row.length, micro_batches=row.runs if staged else passes
        )
        request = Request(
            batch=batch,
            hardware=row.hardware,
            hardware_changes=row.changed_hardware,
            stack=row.recipe.stack,
            layer_kernels=kernels_of(row, folder),
        )
        answer = answer_for(compiled, request, sink)
    assert answer, sink.diagnostics
    return answer


@dataclass(frozen=True)
class Timed:
    """A row with what its time is estimated of."""

    row: Row
    work: Workload
    hardware: Hardware
    stack: Stack
    memory: tuple

    def estimate(self, kernels=None):
        """The estimate, with other kernels of layers or those of the row."""
        stack = self.stack.with_kernels(kernels) if kernels else self.stack
        return Estimate(
            time=step_time(self.work, self.hardware, stack),
            ranks=self.memory,
            usable=usable(self.hardware, stack),
        )


def timed(row):
    """A row by its recipe."""
    answer, recipe = planned(row), row.recipe
    work = with_low_products(answer.work, recipe.casts) if row.low else answer.work
    work = with_latents(work, row) if recipe.latents else work
    held = tuple(memory(work, answer.stack))
    work = with_dispatch(work, row)
    if recipe.once:
        work = replace(work, sharding=Sharding.OPTIMIZER)
        held = tuple(map(without_copies, held))
    if recipe.once and row.virtual > 1:  # interleaved stages hide what they send
        work = replace(work, messages=tuple((0.0, 0.0) for _ in work.messages))
    stack = answer.stack
    if not recipe.overlaps:
        stack = replace(stack, tensor_overlap=0)
    return Timed(row, work, answer.hardware, stack, held)


def estimated(row):
    """The estimate of a row."""
    return timed(row).estimate()


COPIES = "gradients", "gradients before accumulation", "gradients being reduced"
"""What FSDP2 holds besides whole gradients; Megatron's optimizer reads these in place."""


def without_copies(rank):
    """The memory of a rank without copies of gradients."""
    moments = (
        replace(moment, items=tuple(item for item in moment.items if item.name not in COPIES))
        for moment in rank.moments
    )
    return replace(rank, moments=tuple(moments))


def with_low_products(work, casts):
    """The work with products of layers in 8 bits, as Megatron has them: not the head, and of
    experts too, which a plan cannot say.
    """
    low = NumberFormat(recipe="tensorwise", casts=casts)

    def change(layer, _):
        products = (replace(m, format=low) if min(m.n, m.k) > 256 else m for m in layer.matmuls)
        return layer if layer.loss else replace(layer, matmuls=tuple(products))

    return work.map_layers(change)


def with_latents(work, row):
    """The work with layers that keep no queries, keys and values of latent attention."""
    config = configuration(row)
    head = 2 * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) + config["v_head_dim"]
    heads = config["num_attention_heads"] / row.ranks("tp")
    size = 2 * head * heads * row.micro * row.length

    def change(layer, _):
        return replace(layer, kept=layer.kept - size) if layer.attention else layer

    return work.map_layers(change)


def with_dispatch(work, row):
    """The work with the all-to-alls of a row's recipe.

    A gate that gives token t the experts t * k to t * k + k - 1 sends most copies to one node: to
    `1 + (k - 1) ep / (8 experts)` nodes in the mean, and to 8 times as many ranks.
    """
    recipe, nodes = row.recipe, 8

    def change(one):
        if not one.choices:
            return one
        size, choices = one.size * recipe.exchanged, 0 if recipe.copies else one.choices
        if recipe.neighbors:
            number = next(n for n in map(dict(configuration(row)).get, EXPERTS) if n)
            ranks = one.group.size
            copies = 1 + (choices - 1) * ranks / number / (nodes if ranks > nodes else 1)
            size, choices = size / choices * copies, 1
        return replace(one, size=size, choices=choices, nodes=one.nodes * (choices > 1))

    def dispatch(layer, _):
        sent = {
            name: tuple(map(change, getattr(layer, name) or ()))
            for name in ("forward", "backward", "repeated")
        }
        return replace(layer, **sent | ({"repeated": None} if layer.repeated is None else {}))

    return work.map_layers(dispatch)


EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
"""The fields of configurations that say the number of experts."""


def quantile(values, share):
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def p90(values):
    return quantile(values, 0.9)


def constant_errors(rows):
    """Errors of one number of FLOP/s for each machine and kind, the median of other models."""

    def rate(row, made):
        return row.tokens * made.time.mfu / made.time.tokens_per_second

    by = defaultdict(list)
    for row, made in rows:
        by[row.machine, row.kind].append((row, made))
    for row, made in rows:
        others = [
            rate(*pair)
            for pair in by[row.machine, row.kind]
            if pair[0].model_name != row.model_name
        ]
        if others:
            yield row, abs(median(others) / rate(row, made) - 1)


def error(row, made):
    """The relative error of the tokens a second."""
    return made.time.tokens_per_second / row.tokens - 1


HEAD = """
## Published tables

Tokens a second, `planc estimate` of a plan with the same mesh, kernels and recipe. Halves of the
tables of Megatron-Bridge (newest release of each configuration) and llm-foundry, and the tables of
NeMo AutoModel, NeMo 24.07 and torchtitan. No constant was fitted to rows of NeMo 24.07, torchtitan
and DeepSeek-V3's paper.

- `other models`: constants of kernels fitted to rows of other models only.
- `one rate`: the median model FLOP/s of other models of the kind.
- `fit`: in all of the memory but a context.
- torchtitan's H100 have slower memory and 500 W; DeepSeek's H800 slower links in a node.

Left out:
"""


def judge():
    rows = [timed(row) for row in every_row()]
    pairs = [(row.row, row.estimate()) for row in rows]
    elsewhere = fitted_elsewhere(rows)
    print(HEAD)
    print("".join(f"- {name}: {why}\n" for name, why in LEFT_OUT.items()))
    print_groups(pairs, elsewhere)
    print(f"\nEach row: [{ROWS.name}]({ROWS.name}).")
    write_rows(pairs, elsewhere)


def write_rows(pairs, elsewhere):
    """Writes the estimate of each row as a line of the table `ROWS`."""
    with ROWS.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        for row, made in pairs:
            mesh = " ".join((*row.settings, f"vp={row.virtual}" * (row.virtual > 1))).strip()
            other = f"{error(row, elsewhere[row]):+.0%}" if row in elsewhere else ""
            lines.writerow(
                (
                    row.source,
                    row.release,
                    f"{row.name}, {row.kind}",
                    row.gpus,
                    mesh or "fsdp",
                    f"{row.rows} x {row.length}",
                    f"{row.tokens:.0f}",
                    f"{made.time.tokens_per_second:.0f}",
                    f"{error(row, made):+.0%}",
                    other,
                    f"{made.fullest.peak / GIB:.1f}",
                )
            )


def print_groups(pairs, elsewhere):
    """The errors of the rows of each machine and kind."""
    columns = ("", " of other models", " of one rate")
    names = " | ".join(f"median{c} | 90 % | worst" for c in columns)
    print(f"| rows | n | {names} | fit |\n" + "| --- " * 12 + "|")
    constant = dict(constant_errors(pairs))
    groups = defaultdict(list)
    for row, made in pairs:
        groups[not row.judged, row.machine, row.kind].append((row, made))
    for (_, machine, kind), part in sorted(groups.items()):
        cells = []
        for some in (
            [abs(error(*pair)) for pair in part],
            [abs(error(row, elsewhere[row])) for row, _ in part if row in elsewhere],
            [constant[row] for row, _ in part if row in constant],
        ):
            cells += [f"{g(some):.1%}" if some else "" for g in (median, p90, max)]
        fit = sum(made.fullest.peak / GIB <= row.capacity for row, made in part)
        print(f"| {machine}, {kind} | {len(part)} | {' | '.join(cells)} | {fit} of {len(part)} |")


if __name__ == "__main__":
    judge()
