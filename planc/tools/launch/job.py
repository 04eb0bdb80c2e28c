"""The facts of a job that starts a plan: its nodes and ranks, its environment, its commands."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from planc.diagnostics.diagnostic import Sink, one_of
from planc.ops import phrases
from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered, MeshAxis

RESTARTS = 3
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PLANC_WATCHDOG": "300",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Threads of a rank; seconds without a collective after which a rank writes what it waits for, less
than torch's time limit; an allocator that leaves few holes; a store of its own for each start, as
ranks that torchrun starts again would find the addresses of those that died; and the last
collectives of each rank, which torch writes to a file when one of them times out.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """A job that a job file starts.

    Args:
        lowered: the plan.
        digest: of the lowered plan.
        nodes, per_node: the number of nodes, and of ranks on each.
        fewer: the smaller numbers of nodes that it continues with, largest first, and the digest of
            the plan on each.
        proof: what earlier proofs say of the plan, by the number of ranks.
        gpu: the name of the GPU, empty if none was given.
        preflight, script: the words of both commands, which every rank runs, one after the other.
        written: the command that writes the file.
    """

    lowered: Lowered
    digest: str
    nodes: int
    per_node: int
    fewer: Mapping[int, str]
    proof: Mapping[int, str]
    gpu: str
    preflight: tuple[str, ...]
    script: tuple[str, ...]
    written: str

    @property
    def name(self) -> str:
        """The plan's, as Kubernetes allows it."""
        return self.lowered.plan.lower().replace("_", "-").replace(".", "-")

    @property
    def least(self) -> int:
        """The fewest nodes that it runs on."""
        return min(self.fewer, default=self.nodes)

    def counts(self, to: str) -> str:
        """The number of nodes, or the range, as an engine writes it with `to` in between."""
        return f"{self.least}{to}{self.nodes}" if self.fewer else str(self.nodes)

    @property
    def header(self) -> str:
        """Comments that say which plan runs where."""
        inside, across = map(phrases.mesh, by_node(self.lowered, self.per_node))
        ranks = f"{_ranks(self.lowered.world_size)} on {self.nodes} node{'s' * (self.nodes > 1)}"
        fewer = [
            f"# continues with {_ranks(nodes * self.per_node)} on {nodes} node{'s' * (nodes > 1)}"
            f" ({digest[:12]})"
            for nodes, digest in self.fewer.items()
        ]
        return "\n".join(
            (
                "# " + self.written.replace("\n", "\n# "),
                f"# plan {self.lowered.plan} ({self.digest[:12]}) for {self.lowered.model}: {ranks}"
                f" of {self.per_node}, rank = {self.per_node} * node + local rank",
                f"# in a node: {inside or 'no axis'}; across nodes: {across or 'nothing'}",
                *fewer,
                *(f"# on {_ranks(n)}: {text}" for n, text in self.proof.items()),
            )
        )

    @property
    def rank(self) -> str:
        """The command of a rank where torchrun has set its variables, as one word of bash: the
        file that PREFLIGHT names gets the exit code of a preflight that has not passed.
        """
        ends = 'echo $? > "$PREFLIGHT"; exit 0'
        return shlex.quote(
            f"{shlex.join(self.preflight)} || {{ {ends}; }}; exec {shlex.join(self.script)}"
        )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """The command after `--`; Python runs a script, or options of Python's own."""
    python = words[0].endswith(".py") or words[0].startswith("-")
    return ("python", *words) if python else tuple(words)


def python_file(words: Sequence[str]) -> str:
    """The script among the words that follow `--`, empty for a module or another program."""
    python, *more = command_of(words)
    if not PurePath(python).name.startswith("python"):
        return ""
    first = next((word for word in more if not word.startswith("-")), "")
    return first if first.endswith(".py") else ""


def by_node(lowered: Lowered, per_node: int) -> tuple[list[MeshAxis], list[MeshAxis]]:
    """The axes whose groups of ranks stay in one node, and those that cross nodes.

    Peers are numbered along the innermost axis first, and node by node.
    """
    inside: list[MeshAxis] = []
    across: list[MeshAxis] = []
    stride = 1
    for axis in reversed(lowered.axes):
        stride *= axis.size
        stays = stride <= per_node and per_node % stride == 0
        if axis.size > 1:
            (inside if stays else across).insert(0, axis)
    return inside, across


def nodes_of(lowered: Lowered, gpus: int, sink: Sink, *, most: int = 0) -> tuple[int, int]:
    """The number of nodes, and of ranks on each; reports PL640, and PL641 as a warning.

    Args:
        gpus: of a node.
        most: the largest number of ranks that the job may have; 0 for that of the plan.
    """
    per_node = min(gpus, most or lowered.world_size)
    nodes, rest = divmod(lowered.world_size, per_node)
    if rest:
        axes = phrases.mesh(lowered.axes)
        message = f"{lowered.world_size} ranks ({axes}) do not fill nodes of {per_node} GPUs"
        near = one_of(str(n * per_node) for n in (nodes, nodes + 1) if n)
        sink.error("PL640", message, help=f"a world size of {near} does")
    for text, axis in leaving(lowered, per_node):
        where = [axis.origin] if axis.place else []
        sink.warning("PL641", text, *where, help="make it smaller, or an inner axis of the mesh")
    return nodes, per_node


def leaving(lowered: Lowered, per_node: int) -> Iterator[tuple[str, MeshAxis]]:
    """The tensor axes that do not stay in a node, whose links every layer waits for."""
    for axis in by_node(lowered, per_node)[1]:
        if axis.role is AxisRole.TENSOR:
            inner = axis.size * lowered.stride(axis.name)
            text = f"{axis.name} = {axis.size} does not stay in a node of {per_node} ranks"
            yield text + (f": its groups span {inner} ranks" if inner > axis.size else ""), axis


def require_range(nodes: Sequence[int], per_node: int, sink: Sink) -> None:
    """Reports PL620 where an engine could start a number of nodes that has no world size.

    Args:
        nodes: of each world size, largest first.
    """
    missing = sorted({*range(nodes[-1], nodes[0])} - {*nodes}, reverse=True)
    if missing:
        gaps = [str(n) for n in missing[:4]] + ["more"] * (len(missing) > 4)
        sizes = ",".join(str(n * per_node) for n in missing[:4])
        sink.error(
            "PL620",
            f"from {nodes[-1]} to {nodes[0]} nodes, {one_of(gaps, last='and')} have no world size",
            help=f"add {sizes} to --world-size: an engine starts any number of nodes in between; "
            "the script of `--to ray` starts only those that you name",
        )
