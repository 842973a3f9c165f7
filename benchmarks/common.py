"""What every benchmark shares: interleaved timing, a table, --json and --check."""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from c2kv.evaluation.memory import peak_bytes


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def interleaved(candidates, repeats):
    """Median seconds of each callable, run in turns so that a slow moment hits all of them."""
    times = {name: [] for name in candidates}
    for round_ in range(repeats + 1):
        for name, call in candidates.items():
            gc.collect()
            start = time.perf_counter()
            call()
            if round_:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def extra_memory(call):
    """MiB by which this process grows above its resting size while `call` runs, at its peak."""
    with peak_bytes(torch.device("cpu")) as peak:
        call()
    return peak() / 2**20


def in_fresh_process(script, *arguments):
    """What `script` prints last, as JSON, run with these arguments in a process of its own: one
    measurement's memory does not hide another's."""
    command = [sys.executable, script, *map(str, arguments)]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def report(title, rows, bars, args):
    """Print rows (dicts of one shape) and bars (name, value, limit, at_least); exit on --check."""
    columns = list(rows[0])
    cells = [[_shown(row[c]) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    print(title)
    for line in [columns, *cells]:
        print("  " + "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)))
    missed = False
    for name, value, limit, at_least in bars:
        good = value >= limit if at_least else value <= limit
        missed |= not good
        sign = "≥" if at_least else "≤"
        print(f"  {'ok  ' if good else 'MISS'} {name}: {value:.2f} (bar {sign} {limit})")
    if args.json:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        checked = [
            {"name": n, "value": v, "limit": limit, "at_least": least}
            for n, v, limit, least in bars
        ]
        result = {"benchmark": title, "machine": machine, "rows": rows, "bars": checked}
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(1 if missed and args.check else 0)


def _shown(value):
    return f"{value:.3g}" if isinstance(value, float) else str(value)
