# SPDX-License-Identifier: Apache-2.0
"""``python -m nemo.collections.speechlm2.vllm.salm inspect CHECKPOINT``: will it serve, and if not, why."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 if the checkpoint will serve, 1 if not; argparse itself exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m nemo.collections.speechlm2.vllm.salm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser(
        "inspect", help="read config.json and the headers of the weights; report all problems"
    )
    inspect.add_argument("checkpoint", help="a folder, or the name on the hub of one that was downloaded")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.add_argument(
        "--values", action="store_true", help="read the audio tower's tensors too, for NaN and infinity"
    )
    options = parser.parse_args(arguments)

    folder = Path(options.checkpoint)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(options.checkpoint, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            parser.error(
                f"{options.checkpoint} is no folder, and not downloaded; try: hf download {options.checkpoint}"
            )

    with contextlib.redirect_stdout(sys.stderr):  # vLLM's log
        from nemo.collections.speechlm2.vllm.salm.inspection import inspect_checkpoint

        report = inspect_checkpoint(folder, options.values).to_dict()
    print(json.dumps(report, indent=2) if options.json else _text(report))
    return 0 if report["serves"] else 1


def _text(report: dict[str, Any]) -> str:
    lines = [str(report["checkpoint"])]
    for part in ("backbone", "tower", "vocabulary", "lora", "mtp", "dtypes", "tensors"):
        if content := report.get(part):
            lines.append(f"  {part:<11}" + ", ".join(_item(*item) for item in content.items() if item[1] is not None))
    if size := report.get("loaded_bytes"):
        lines.append(f"  {'loaded':<11}{_size(size)}, without caches")
    lines += [f"  note       {note}" for note in report["notes"]]
    for problem in report["problems"]:
        draft = " (only with a draft)" if problem["draft_only"] else ""
        lines.append(f"PROBLEM{draft}: {problem['what']}\n    {problem['cure']}".rstrip())
    count = len(report["problems"])
    lines.append(f"{count} problem{'s' * (count > 1)}" if count else "will serve")
    return "\n".join(lines)


def _item(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['tensors']} {name} ({_size(value['bytes'])})"
    shown = f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
    return shown if name == "class" else f"{name.replace('_', ' ')} {shown}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} GB"


if __name__ == "__main__":
    sys.exit(main())
