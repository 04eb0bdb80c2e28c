"""What is known of the code that a model runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCode:
    """The code of a model that its libraries did not ship, as `own_code` finds it.

    Args:
        code: a digest of the functions; empty where there are none. Equal for models of two sizes.
        values: a digest of the numbers that the modules with such functions hold.
        attention: the name of an attention function of the script's own, else empty.
    """

    code: str = ""
    values: str = ""
    attention: str = ""

    def __bool__(self) -> bool:
        return bool(self.code)

    def __str__(self) -> str:
        return f"{self.code} {self.values}" if self else ""
