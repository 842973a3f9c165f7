"""Packages that only some features need."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from c2kv.errors import MissingPackageError


def load(module: str, install: str) -> Any:
    """A module. Raises MissingPackageError, naming what to install, when it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module.partition(".")[0], install) from error


def need(package: str, install: str) -> None:
    """Raise as `load` does, without importing: to be asked before long work."""
    if find_spec(package) is None:
        raise _missing(package, install)


def _missing(package: str, install: str) -> MissingPackageError:
    return MissingPackageError(f"this needs the package '{package}'; run: pip install '{install}'")
