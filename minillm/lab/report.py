"""Results for a reader: the ladder as a table and as a picture, the peers as a table."""

from __future__ import annotations

import json
import textwrap
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from minillm.lab.ladder import Row
from minillm.lab.workload import Requests

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAPTION_WIDTH = 125  # letters in a line below the picture


def ladder_table(rows: list[Row], style: str = "simple") -> str:
    """style: a `tabulate` format, such as "simple" or "github"."""
    head = [
        "stage",
        "what is new",
        "TTFT ms",
        "TPOT ms",
        "roofline",
        "tokens/s",
        "factor",
        "memory limit",
        "KV MB",
        "same tokens",
    ]
    body = [
        [
            row.stage,
            row.new,
            f"{row.ttft_ms:.0f}",
            f"{row.tpot_ms:.1f}",
            f"{row.predicted_tpot_ms:.1f}",
            f"{row.tokens_per_s:.1f} ({row.spread[0]:.1f} to {row.spread[1]:.1f})",
            "" if row.factor is None else f"{row.factor:.1f} x {row.against}",
            f"{row.memory_limit_fraction:.0%}",
            f"{row.kv_bytes / 1e6:.1f}",
            same_tokens(row),
        ]
        for row in rows
    ]
    return tabulate(body, headers=head, tablefmt=style, disable_numparse=True)


def requests_table(rows: list[Row], style: str = "simple") -> str:
    """The rungs of many requests. Latencies are medians over the requests."""
    head = ["stage", "what is new", "tokens/s", "factor", "TTFT s", "TPOT ms", "KV reserved MB", "KV used MB", "waste",
            "utilisation", "same tokens"]  # fmt: skip
    body = [
        [
            row.stage,
            row.new,
            f"{row.tokens_per_s:.1f} ({row.spread[0]:.1f} to {row.spread[1]:.1f})",
            "" if row.factor is None else f"{row.factor:.1f} x {row.against}",
            f"{row.ttft_ms / 1e3:.2f}",
            f"{row.tpot_ms:.0f}",
            f"{row.kv_reserved_bytes / 1e6:.0f}",
            f"{row.kv_bytes / 1e6:.0f}",
            f"{row.kv_waste:.0%}",
            f"{row.utilisation:.0%}",
            same_tokens(row),
        ]
        for row in rows
    ]
    return tabulate(body, headers=head, tablefmt=style, disable_numparse=True)


def requests_sentence(workload: Requests) -> str:
    """The sizes of a workload of many requests."""
    prompts, outputs = [len(a.prompt) for a in workload.trace], [a.max_tokens for a in workload.trace]
    return (
        f"{len(workload.trace)} requests at once: {min(prompts)} to {max(prompts)} tokens in, {min(outputs)} to "
        f"{max(outputs)} out; up to {workload.max_num_seqs} at a time, memory for "
        f"{workload.n_blocks * workload.block_size} tokens; {workload.repeats} runs."
    )


def same_tokens(row: Row) -> str:
    if row.same_tokens:
        return "yes"
    return f"no: from {row.first_difference['position']}, margin {row.first_difference['margin']:.2g}"


def peers_table(results: list[dict], style: str = "simple") -> str:
    body = [
        [r["name"], r["task"], f"{r['tokens_per_s']:.1f}", f"{r['spread'][0]:.1f} to {r['spread'][1]:.1f}"]
        for r in results
    ]
    return tabulate(body, headers=["who", "task", "tokens/s", "spread"], tablefmt=style, disable_numparse=True)


def require_folder(*files: str | None) -> None:
    """Refuse, before minutes of measuring, a file that could not be written afterwards."""
    for file in files:
        if file is not None and (Path(file).is_dir() or not Path(file).resolve().parent.is_dir()):
            raise ValueError(f"{file} cannot be written: it is a folder, or its folder does not exist")


def write_json(path: str | Path, content: object) -> None:
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plot_ladder(rows: list[Row], path: str | Path, caption: str) -> None:
    """Tokens per second of each rung, as a png; a panel for each workload."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    panels = [list(group) for _, group in groupby(rows, key=lambda row: row.workload)]
    figure = Figure(figsize=(8, 1.6 + 0.6 * len(rows) + 0.6 * (len(panels) - 1)), layout="constrained")
    heights = [len(panel) + 0.5 for panel in panels]
    for axes, panel in zip(
        figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0], panels, strict=True
    ):
        plot_panel(axes, panel)
    axes.set_xlabel("output tokens per second, prompts included (median, smallest and largest)")
    figure.suptitle("The ladder, stage by stage")
    figure.supxlabel("\n".join(textwrap.fill(line, CAPTION_WIDTH) for line in caption.splitlines()), fontsize=8)
    figure.savefig(path, format="png", dpi=150)


def plot_panel(axes: Axes, rows: list[Row]) -> None:
    rates = [row.tokens_per_s for row in rows]
    spread = [[row.tokens_per_s - row.spread[0] for row in rows], [row.spread[1] - row.tokens_per_s for row in rows]]
    bars = axes.barh([row.stage for row in rows], rates, xerr=spread, color="#4477aa", ecolor="#333333", capsize=3)
    axes.bar_label(bars, [f"  {rate:.1f}" for rate in rates], padding=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(f"workload: {rows[0].workload}", fontsize=9, loc="left")
