"""The packages that `apply` needs for an operation."""

from typing import NamedTuple


class Requirement(NamedTuple):
    """A package that must be importable on every rank.

    Args:
        package: the module that is imported.
        code: the code of the finding if it cannot be imported.
        reason: the part of the plan that needs it, as the beginning of the finding.
        help: the help of the finding.
    """

    package: str
    code: str
    reason: str
    help: str

    @property
    def distribution(self) -> str:
        """The package with all its modules."""
        return self.package.partition(".")[0]

    def finding(self, error: Exception) -> str:
        """The text of the finding for the error of an import."""
        return f"{self.reason}, and {self.distribution} cannot be imported: {error}"
