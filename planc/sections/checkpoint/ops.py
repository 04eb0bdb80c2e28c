"""Rules with a budget, before the calls that are saved are chosen."""

from dataclasses import dataclass

from planc.ops.activation_checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Checkpoint):
    """Modules that save the results of some calls, within a number of bytes. `choose_rules` of the
    section replaces it by rules without a budget, which name the calls.

    Args:
        size: bytes that all modules on one rank may hold between their forward and backward passes;
            up to 1, the share of what they hold without checkpoints.
        rows, seq: of one forward pass of a rank: sequences, and tokens of each before it is split.
        host_gb_s: GB in a second that the link to the host's memory moves each way, where results
            may be kept there; 0 where they may not.
    """

    size: float
    rows: int
    seq: int
    host_gb_s: float = 0.0
