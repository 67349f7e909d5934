# SPDX-License-Identifier: Apache-2.0
"""The tiny bundled checkpoint at work: offline, behind a local vLLM server, and what its draft is worth.

Run by `make demo`. Everything stays on this machine: no download, no telemetry, the server listens on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmark import measure
from chat_client import ask
from openai import OpenAI
from transcribe import load_engine, read_manifest, transcribe_and_report

TINY = Path(__file__).resolve().parent / "tiny_salm"
DTYPE = "float32"  # every CPU computes it natively
START_LIMIT = 600  # seconds for the server to answer

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "no_proxy": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; on a CPU vLLM would take much of the memory
    "PYTHONWARNINGS": "ignore",  # deprecations within vLLM and torch
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@contextlib.contextmanager
def server(checkpoint: Path) -> Iterator[str]:
    """Run `vllm serve CHECKPOINT` on a free loopback port and yield its base URL; stop it however the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", port, "--dtype", DTYPE, "--enforce-eager"]
    command += ["--speculative-config", '{"method":"mtp","num_speculative_tokens":4}']
    print(f"  vllm {shlex.join(command[3:])}", flush=True)
    with tempfile.TemporaryFile("w+") as log:
        # A session of its own, so that the engine's processes can be stopped with the server's.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_until_healthy(process, f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}/v1"
        except Exception:
            log.seek(0)
            print("The end of the server's log:", *log.read().splitlines()[-100:], sep="\n")
            raise
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_healthy(process: subprocess.Popen, url: str) -> None:
    begin = shown = time.monotonic()
    while process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            print(f"  ready after {time.monotonic() - begin:.0f} s", flush=True)
            return
        if time.monotonic() - begin > START_LIMIT:
            raise RuntimeError(f"the server did not answer within {START_LIMIT} s")
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"  starting ... {shown - begin:.0f} s", flush=True)
        time.sleep(0.5)
    raise RuntimeError(f"the server stopped with exit code {process.returncode} before it answered")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=TINY / "checkpoint")
    parser.add_argument("--manifest", type=Path, default=TINY / "test_set" / "manifest.json")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    # Like Ctrl-C: unwinds, so that the server is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    utterances = read_manifest(args.manifest)

    print(f"1. Offline: loading {args.checkpoint} into vLLM", flush=True)
    begin = time.monotonic()
    engine = load_engine(str(args.checkpoint), DTYPE)
    print(f"  ready after {time.monotonic() - begin:.0f} s", flush=True)
    transcribe_and_report(engine, utterances)
    del engine  # ends its process and gives its memory back

    print("\n2. Server: the same checkpoint, with its draft, behind OpenAI's chat API", flush=True)
    with server(args.checkpoint) as base_url:
        path = utterances[0].path
        print(f"  python chat_client.py --base-url {base_url} {path.name}")
        begin = time.monotonic()
        answer = ask(OpenAI(base_url=base_url, api_key="none"), path)
        print(f"  answer      {answer}  ({time.monotonic() - begin:.1f} s)")
        print("  stopping the server", flush=True)
    print("  stopped")

    print(
        "\n3. The draft: K tokens guessed a step, against no draft; two engines that take turns (minutes)", flush=True
    )
    measure(str(args.checkpoint), args.manifest, drafts=[1, 2, 3, 4, 5, 6], batches=[1, 4, 8], turns=3, dtype=DTYPE)


if __name__ == "__main__":
    main()
