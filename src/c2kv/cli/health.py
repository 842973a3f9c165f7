"""c2kv doctor: does a model work with c2kv; c2kv info: what is installed and stored."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from importlib import metadata
from typing import Any

from c2kv.cli.common import human_bytes, table
from c2kv.errors import UnsupportedModelError
from c2kv.paths import cache_dir


def add_commands(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor", help="check that c2kv computes right with a model; exit 1 if not"
    )
    doctor.add_argument("model", metavar="MODEL", help="hub id, folder, .gguf file, smollm2-135m")
    doctor.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    doctor.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 …")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=run_doctor)

    info = commands.add_parser("info", help="versions, devices, cached models, default store")
    info.add_argument("--json", action="store_true")
    info.set_defaults(run=run_info)


def run_doctor(args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from c2kv.doctor import Check, examine
    from c2kv.models import load_backbone

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        checks = examine(load_backbone(args.model, dtype=args.dtype, device=args.device))
    except UnsupportedModelError as refusal:
        checks = [Check("supported architecture", False, str(refusal))]
    failed = [check for check in checks if not check.passed]
    if args.json:
        print(json.dumps({"model": args.model, "checks": [asdict(c) for c in checks]}, indent=2))
    else:
        rows = [
            [c.name, "ok" if c.passed else "FAILED", "" if c in failed else c.detail]
            for c in checks
        ]
        print(table(rows, ["check", "result", "detail"]))
        for check in failed:
            print(f"{args.model}: refused, {check.name} failed: {check.detail}")
        if not failed:
            print(f"{args.model}: c2kv can be used with it")
    return 1 if failed else 0


def run_info(args: argparse.Namespace) -> int:
    import torch

    from c2kv.extractor.box import NAMES

    home = cache_dir()
    files = [f for f in (home / "segments").glob("??/*.safetensors") if f.is_file()]
    models = home / "models"
    facts = {
        **{name: metadata.version(name) for name in ("c2kv", "torch", "transformers")},
        "devices": [f"cpu ({torch.get_num_threads()} threads)"]
        + [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "home": str(home),
        "extractors": list(NAMES),
        "models": sorted(p.name for p in models.iterdir() if p.is_dir()) if models.is_dir() else [],
        "stored_segments": len(files),
        "stored_bytes": sum(f.stat().st_size for f in files),
    }
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        if name == "stored_bytes":
            value = human_bytes(value)  # type: ignore[arg-type]
        shown = ", ".join(value) or "none" if isinstance(value, list) else value
        print(f"{name.replace('_', ' '):16} {shown}")
    return 0
