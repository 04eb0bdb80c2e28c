"""The versions of libraries that planc is tested with, a row of tests for each set of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from planc.diagnostics.diagnostic import one_of

LIBRARIES = ("torch", "transformers")
"""The libraries whose minor versions a row stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedVersions:
    """A set of versions, which `constraints/NAME.txt` pins.

    Args:
        torch, transformers: their versions.
        others: versions of other libraries that differ from those of constraints.txt.
        tests: `all`, or `core` for the files in tests/compat/core.txt.
        ran: whether docs/generated/rows.md has a run of it; else its versions count as untested.
    """

    torch: str
    transformers: str
    others: Mapping[str, str] = field(default_factory=dict)
    tests: str = "core"
    ran: bool = True

    @property
    def name(self) -> str:
        return f"torch-{minor(self.torch)}-transformers-{minor(self.transformers)}"

    @property
    def pins(self) -> dict[str, str]:
        return {"torch": self.torch, "transformers": self.transformers, **self.others}


ROWS = (
    TestedVersions(torch="2.13.0", transformers="5.23.0", tests="all"),
    TestedVersions(torch="2.13.0", transformers="5.24.0"),
    TestedVersions(torch="2.13.0", transformers="5.20.0"),
    TestedVersions(torch="2.13.0", transformers="5.17.0", others={"huggingface_hub": "1.33.0"}),
    TestedVersions(torch="2.14.1", transformers="5.24.0", tests="all", ran=False),
)


def minor(version: str) -> str:
    """`2.13` of `2.13.0+cpu`."""
    return ".".join(version.split(".")[:2])


def tested_versions(library: str) -> list[str]:
    """The minor versions of a library that planc is tested with, in the order of `ROWS`."""
    return list(dict.fromkeys(minor(row.pins[library]) for row in ROWS if row.ran))


def untested_message(installed: Mapping[str, str]) -> str:
    """The message of PL744; empty if planc is tested with all installed versions.

    Args:
        installed: versions by library, see `untested_versions`.
    """
    others = untested_versions(installed)
    return f"planc is not tested with {one_of(others)}" if others else ""


def untested_versions(installed: Mapping[str, str]) -> list[str]:
    """The installed libraries whose minor version is not tested, as `torch 2.15.0`.

    Args:
        installed: versions by library; a library that is not installed is missing, or has `none`.
    """
    return [
        f"{name} {version}"
        for name in LIBRARIES
        if (version := installed.get(name, "none")) != "none"
        and minor(version) not in tested_versions(name)
    ]
