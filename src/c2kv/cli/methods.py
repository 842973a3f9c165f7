"""c2kv methods: what can stand behind --method."""

from __future__ import annotations

import argparse
import json
from typing import Any

from c2kv.methods.registry import FAMILIES


def add_commands(commands: Any) -> None:
    methods = commands.add_parser("methods", help="list the methods to put documents in front")
    methods.add_argument("--json", action="store_true")
    methods.set_defaults(run=run_methods)


def run_methods(args: argparse.Namespace) -> int:
    if args.json:
        rows = {name: {"form": f.form, "summary": f.summary} for name, f in FAMILIES.items()}
        print(json.dumps(rows, indent=2))
        return 0
    for family in FAMILIES.values():
        print(f"{family.form}\n    {family.summary}")
    return 0
