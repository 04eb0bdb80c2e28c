"""Floor 7: the numeric proof of a plan: compile, shrink, run on processes, certify."""

from planc.proof.show import document, table
from planc.proof.verify import Proof, verify

__all__ = ["Proof", "document", "table", "verify"]
