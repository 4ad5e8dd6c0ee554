"""The description of the machine that every result carries."""

from __future__ import annotations

import json

import psutil
import pytest
import torch

from minillm.lab import machine
from minillm.lab.machine import BUSY, busy, busy_warning, cpu_name, describe, one_line, version


@pytest.fixture
def idle(monkeypatch):
    """Whatever others do on this machine, and without waiting to see it."""
    monkeypatch.setattr(machine.psutil, "cpu_percent", lambda interval: 4.321)


def test_a_description_says_what_a_number_depends_on(idle):
    found = describe()
    assert list(found) == ["cpu", "cores", "threads", "memory_gb", "gpu", "os", "python", "torch", "busy"]
    assert found["cpu"] and found["cores"] >= 1
    assert found["threads"] == torch.get_num_threads()
    assert found["memory_gb"] == pytest.approx(psutil.virtual_memory().total / 1e9, abs=0.1)
    assert found["torch"] == torch.__version__
    assert found["busy"] == 0.04
    assert json.loads(json.dumps(found)) == found


def test_the_number_of_threads_is_the_present_one(idle):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert describe()["threads"] == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("gpu", "shown"), [(None, "25.3 GB; Linux"), ("H100", "25.3 GB, H100; Linux")])
def test_one_line_names_everything(gpu, shown):
    line = one_line(
        {"cpu": "Chip", "cores": 4, "threads": 2, "memory_gb": 25.3, "gpu": gpu, "os": "Linux x", "python": "3.11",
         "torch": "2.13", "busy": 0.0}
    )  # fmt: skip
    assert line == f"Chip, 4 cores, 2 threads, {shown} x, Python 3.11, torch 2.13"


def test_one_thread_is_not_threads():
    line = one_line({"cpu": "Chip", "cores": 1, "threads": 1, "memory_gb": 1, "gpu": None, "os": "", "python": "",
                     "torch": ""})  # fmt: skip
    assert line.startswith("Chip, 1 core, 1 thread, 1 GB;")


def test_busy_is_a_share_of_all_cores(monkeypatch):
    monkeypatch.setattr(machine.psutil, "cpu_percent", lambda interval: 100 * interval)
    assert busy(0.5) == 0.5


def test_a_busy_machine_is_warned_of_and_an_idle_one_is_not():
    assert busy_warning(0.0) is None and busy_warning(BUSY) is None
    warning = busy_warning(0.5)
    assert "50%" in warning and "measure again" in warning and "\n" not in warning


def test_the_processor_has_a_name_where_the_kernel_gives_none(monkeypatch, tmp_path):
    """As on macOS and Windows (no such file) and on some Arm machines (a file without names)."""
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "Path", lambda name: info)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "arm64")
    assert cpu_name() == "arm64"
    info.write_text("processor\t: 0\n")
    assert cpu_name() == "arm64"
    info.write_text("processor\t: 0\nmodel name\t: A chip: fast\n")
    assert cpu_name() == "A chip: fast"


def test_the_version_of_a_package_that_is_not_there_is_none():
    assert version("torch") == torch.__version__
    assert version("surely-not-installed") is None
