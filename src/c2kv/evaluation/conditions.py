"""What answers are scored under: methods, and controls that show what a score is worth.

Controls: `wrongdoc` (a method over another case's documents: one that answers alike from these
has read nothing), `shuffled` (a method, documents in reverse order), `budget` (each document's
raw text cut to as many tokens as the method keeps entries), `noctx` (no documents at all); and
the method `random`. They are of c2kv unless another method is named, as in `wrongdoc:reuse`.
"""

from __future__ import annotations

from dataclasses import dataclass

from c2kv.errors import ConfigError
from c2kv.methods.registry import check

CONTROLS = ("wrongdoc", "shuffled", "budget", "noctx")
DEFAULT = ("recompute", "reuse", "c2kv", *CONTROLS, "random")


def split(name: str) -> tuple[str | None, str]:
    """The control (None for a method itself) and the method that a condition's name stands for,
    unchecked: a report may name methods that were registered where its run was made."""
    control, _, method = name.partition(":")
    return (control, method or "c2kv") if control in CONTROLS else (None, name)


@dataclass(frozen=True)
class Condition:
    """name as users write it; control: None for the method itself."""

    name: str
    control: str | None
    method: str

    @classmethod
    def of(cls, name: str) -> Condition:
        """Raises ConfigError when control or method is unknown."""
        control, method = split(name)
        if control is None and ":" in name:
            given = name.partition(":")[0]
            raise ConfigError(f"control '{given}' is unknown; use one of {', '.join(CONTROLS)}")
        return cls(name, control, check(method))
