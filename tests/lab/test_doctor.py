"""Each finding, good and bad: what is wrong is named, and so is what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from minillm.fetch import ENVIRONMENT_VARIABLE, FILE_NAME
from minillm.lab import doctor
from minillm.lab.doctor import Finding


@pytest.fixture
def without(monkeypatch):
    """Pretend that some packages are not installed."""

    def uninstall(*names: str) -> None:
        monkeypatch.setattr(doctor, "version", lambda name: None if name in names else "1.2.3")

    uninstall()
    return uninstall


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU, or none."""

    def plug(there: bool) -> None:
        monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: there)
        monkeypatch.setattr(doctor.torch.cuda, "get_device_name", lambda: "A Fine GPU")

    plug(False)
    return plug


@pytest.mark.parametrize(
    ("prefix", "text"), [("/venv", "in a virtual environment"), ("/usr", "not in a virtual environment")]
)
def test_python(monkeypatch, prefix, text):
    version = "3.12.1 (main, Jan 1 2026) [GCC]"
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(prefix=prefix, base_prefix="/usr", version=version))
    assert doctor.python() == Finding("ok", f"Python 3.12.1, {text}")


@pytest.mark.parametrize(("free", "state"), [(3.0e9, "ok"), (2.99e9, "FAIL"), (0.5e9, "FAIL")])
def test_too_little_memory_fails(monkeypatch, free, state):
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    finding = doctor.memory()
    assert finding.state == state
    assert f"{free / 1e9:.1f} GB" in finding.what
    assert bool(finding.mend) == (state == "FAIL")


@pytest.mark.parametrize(("busy", "state"), [(0.01, "ok"), (0.9, "SKIP")])
def test_a_busy_machine_is_said_to_be_busy(busy, state):
    finding = doctor.idle(busy)
    assert finding.state == state
    assert ("90%" in finding.what) == (state == "SKIP")


def test_a_wrong_name_in_the_environment_fails(monkeypatch, tmp_path):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "not-here.gguf"))
    finding = doctor.model_file()
    assert finding.state == "FAIL"
    assert "not-here.gguf" in finding.what
    assert finding.mend == f"correct or unset {ENVIRONMENT_VARIABLE}"


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_copy_named_by_the_environment_is_found(monkeypatch, tmp_path, as_folder):
    file = tmp_path / FILE_NAME
    file.write_bytes(b"GGUF")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path if as_folder else file))
    finding = doctor.model_file()
    assert finding.state == "ok"
    assert str(file) in finding.what and ENVIRONMENT_VARIABLE in finding.what


def test_the_model_file_is_looked_for_in_the_cache_and_never_downloaded(monkeypatch, tmp_path):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(doctor, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr("minillm.fetch.download", lambda *args: pytest.fail("the doctor must not download"))
    finding = doctor.model_file()
    assert finding.state == "SKIP" and "minillm fetch" in finding.mend
    (tmp_path / "minillm").mkdir()
    (tmp_path / "minillm" / FILE_NAME).touch()
    finding = doctor.model_file()
    assert finding.state == "ok" and str(tmp_path / "minillm" / FILE_NAME) in finding.what


def test_triton_is_skipped_where_it_does_not_run(monkeypatch, without):
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(platform="darwin"))
    finding = doctor.triton()
    assert finding.state == "SKIP" and "Linux only" in finding.what and not finding.mend


def test_triton_is_skipped_where_it_is_not_installed(monkeypatch, without, gpu):
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(platform="linux"))
    without("triton")
    finding = doctor.triton()
    assert finding == Finding("SKIP", "Triton is not installed; everything but the kernels works", "pip install triton")


@pytest.mark.parametrize(("there", "text"), [(True, "compiles kernels for this GPU"), (False, "interpreter")])
def test_triton_says_whether_it_compiles_or_interprets(monkeypatch, without, gpu, there, text):
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(platform="linux"))
    gpu(there)
    finding = doctor.triton()
    assert finding.state == "ok" and "Triton 1.2.3" in finding.what and text in finding.what


@pytest.mark.parametrize(("there", "state", "text"), [(True, "ok", "A Fine GPU"), (False, "SKIP", "no GPU")])
def test_a_gpu_is_not_required(gpu, there, state, text):
    gpu(there)
    finding = doctor.gpu()
    assert finding.state == state and text in finding.what


@pytest.mark.parametrize("package", ["pytest", "nbval", "hypothesis", "transformers"])
def test_tests_need_their_packages_and_are_not_required(without, package):
    assert doctor.tests().state == "ok"
    without(package)
    finding = doctor.tests()
    assert finding.state == "SKIP" and finding.what == f"the tests need {package}"
    assert finding.mend == 'pip install -e ".[test]"'


@pytest.mark.parametrize("package", ["jupyterlab", "ipywidgets", "matplotlib"])
def test_notebooks_are_required(without, package):
    assert doctor.jupyter().state == "ok"
    without(package)
    finding = doctor.jupyter()
    assert finding.state == "FAIL" and finding.what == f"the notebooks need {package}"
    assert finding.mend == "pip install -e ."


def test_all_that_is_missing_is_named_at_once(without):
    without("jupyterlab", "matplotlib")
    assert doctor.jupyter().what == "the notebooks need jupyterlab, matplotlib"


MACHINE = {"cpu": "Chip", "cores": 4, "threads": 4, "memory_gb": 16.0, "gpu": None, "os": "Linux", "python": "3.12",
           "torch": "2.13", "busy": 0.0}  # fmt: skip


@pytest.mark.parametrize(
    ("states", "healthy"), [(["ok", "ok"], True), (["ok", "SKIP"], True), (["FAIL", "ok"], False), ([], True)]
)
def test_the_report_fails_only_where_a_finding_fails(monkeypatch, states, healthy):
    monkeypatch.setattr(doctor, "describe", lambda: MACHINE)
    monkeypatch.setattr(doctor, "examine", lambda busy: [Finding(state, "something") for state in states])
    assert doctor.report()[1] == healthy


def test_the_report_names_the_machine_the_versions_and_every_finding(monkeypatch, without):
    without("triton")
    monkeypatch.setattr(doctor, "describe", lambda: MACHINE)
    monkeypatch.setattr(
        doctor, "examine", lambda busy: [Finding("ok", "fine"), Finding("FAIL", "broken", "mend it so")]
    )
    lines = doctor.report()[0].splitlines()
    assert lines[0].startswith("Chip, 4 cores")
    versions = dict(line.split(maxsplit=1) for line in lines[2 : 2 + len(doctor.PACKAGES)])
    assert list(versions) == list(doctor.PACKAGES)
    assert versions["torch"] == "1.2.3" and versions["triton"] == "not installed"
    assert lines[-3:] == ["[ok  ] fine", "[FAIL] broken", "       mend it so"]


def test_this_machine_is_examined_in_full(monkeypatch):
    monkeypatch.setattr(doctor, "describe", lambda: MACHINE)
    findings = doctor.examine(0.0)
    assert len(findings) == 8
    assert {finding.state for finding in findings} <= {"ok", "SKIP", "FAIL"}
    assert all(finding.what for finding in findings)
    assert all(finding.mend for finding in findings if finding.state == "FAIL")
