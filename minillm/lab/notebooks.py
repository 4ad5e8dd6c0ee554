"""Execute the course's notebooks and store them cleanly: `minillm notebooks 02`.

Stored outputs are what a reader sees on a code host. Widgets cannot live there, so their views and states are left
out and their place says so; execution counts run from 1; metadata of the run, such as times of day, are not stored.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_TEXT = "(a widget: run this notebook to use it; the figure beside it shows the same)"
TIMEOUT = 600  # seconds a cell


def find(folder: Path, number: str) -> Path:
    """The notebook of a folder whose name begins with this number."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} here; go to the folder of the repository first")
    matches = sorted(folder.glob(f"{number.zfill(2)}_*.ipynb"))
    if len(matches) != 1:
        known = ", ".join(path.stem.split("_")[0] for path in sorted(folder.glob("*_*.ipynb"))) or "none"
        raise ValueError(f"there is no notebook {number!r} in {folder}; known: {known}")
    return matches[0]


def execute(
    path: Path, fast: bool = False, allow_errors: bool = False, timeout: int = TIMEOUT
) -> nbformat.NotebookNode:
    """Run all cells in a fresh kernel in the notebook's own folder. -> the executed notebook, not yet stored.

    timeout: seconds a cell; with `allow_errors` a cell that takes longer is interrupted, and the next ones run.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        interrupt_on_timeout=allow_errors,
        kernel_name="python3",
        allow_errors=allow_errors,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute(env={**os.environ, "MINILLM_FAST": "1" if fast else "0"})
    except CellExecutionError as error:
        raise ValueError(f"{path.name}: a cell failed with {error.ename}: {error.evalue}") from None
    except CellTimeoutError:
        raise ValueError(f"{path.name}: a cell did not end within {timeout} s") from None
    except DeadKernelError:
        raise ValueError(f"{path.name}: its kernel died, perhaps for want of memory") from None
    return notebook


def store(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write an executed notebook without what only a running kernel can use."""
    for cell in notebook.cells:
        cell.metadata = {"tags": cell.metadata.tags} if cell.metadata.get("tags") else {}
        if cell.cell_type == "code":
            cell.outputs = [clean(output) for output in cell.outputs]
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def clean(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    if WIDGET_VIEW in output.get("data", {}):
        output.data = {"text/plain": WIDGET_TEXT}
    return output
