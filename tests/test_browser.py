"""A reader's way: open a notebook in JupyterLab, run it, move a slider, and the figure is drawn anew.

JupyterLab runs on this machine alone with settings of its own; Chromium has no window and an empty profile. It needs
selenium, which the extra `test` brings, and a browser: `apt-get install chromium chromium-driver` on Debian.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

selenium = pytest.importorskip("selenium", reason="selenium is not installed: pip install -e '.[test]'")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="Chromium and its chromedriver are not installed")

TOKEN = "only-for-this-test"
SECONDS = 120  # how long to wait for anything; a busy machine is slow, and no wait is a measurement
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root, as in a container, cannot have one
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)
CELLS = (
    "from minillm.lab import widgets\n"
    "from minillm.lab.plots import draw_bars\n"
    "draw = lambda n: draw_bars(['bar'], [n], 'unit', f'the bar is {n}', f'one bar of {n}')",
    "widgets.explore(draw, n=(2, 6))",
    "widgets.player(draw, steps=4)",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def lab(tmp_path):
    """JupyterLab in a folder with one notebook. -> the notebook's address"""
    folder, private = tmp_path / "course", tmp_path / "private"
    folder.mkdir()
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(new_notebook(cells=list(map(new_code_cell, CELLS)), metadata=kernel), folder / "small.ipynb")
    quiet = private / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}), encoding="utf-8")
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(private / "config"),
        "JUPYTER_DATA_DIR": str(private / "data"),
        "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(private / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(private / "workspaces"),
        "IPYTHONDIR": str(private / "ipython"),
    }
    address = f"http://127.0.0.1:{free_port()}"
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={address.split(':')[-1]}", "--ServerApp.port_retries=0"),
        *(f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}"),
    ]
    with (tmp_path / "lab.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for_server(server, address, tmp_path / "lab.log")
            yield f"{address}/lab/tree/small.ipynb?token={TOKEN}"
        finally:
            server.terminate()  # it ends its kernels too
            server.wait(SECONDS)


def wait_for_server(server: subprocess.Popen, address: str, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            direct.open(f"{address}/api/status?token={TOKEN}", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text(encoding='utf-8')}")


@pytest.fixture
def browser(tmp_path):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def wait(browser, condition, what: str):
    """What `condition` gives as soon as it is true."""
    return WebDriverWait(browser, SECONDS).until(lambda _: condition(), f"waited in vain for {what}")


def run_all_cells(browser) -> None:
    """As the menu does, once the kernel is there."""
    status = "return window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status"
    wait(browser, lambda: browser.execute_script(status) == "idle", "the kernel")
    browser.execute_script("window.jupyterapp.commands.execute('notebook:run-all-cells')")


def images(browser) -> list[str]:
    """The figure of each widget, as the address of its image."""
    found = browser.find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output .widget-output img")
    return [image.get_attribute("src") for image in found]


def test_moving_a_slider_draws_the_figure_anew(lab, browser):
    browser.get(lab)
    run_all_cells(browser)
    explored, played = wait(browser, lambda: len(images(browser)) == 2 and images(browser), "two figures")
    assert explored != played

    explore, player = browser.find_elements(By.CSS_SELECTOR, ".noUi-handle")
    explore.send_keys(Keys.ARROW_RIGHT)
    wait(browser, lambda: images(browser)[:1] != [explored] and len(images(browser)) == 2, "the slider's new figure")
    assert images(browser)[1] == played, "only its own figure is drawn anew"

    player.send_keys(Keys.ARROW_RIGHT)
    wait(browser, lambda: images(browser)[1:] != [played] and len(images(browser)) == 2, "the player's new figure")
    stepped = images(browser)[1]
    browser.find_element(By.CSS_SELECTOR, ".widget-play button").click()
    wait(browser, lambda: images(browser)[1:] not in ([], [played], [stepped]), "the figure that playing leads to")

    explore.send_keys(Keys.ARROW_LEFT)
    wait(browser, lambda: images(browser)[:1] == [explored], "the first figure again")
