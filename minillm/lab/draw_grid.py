"""Pictures of Triton kernels: the programs of a grid, the lanes of one program, the way from a key to its address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.lab.plots import BLUE, CYAN, GREEN, GREY, INK, KINDS, PURPLE, RED, Picture, cell, edge, picture, plain

LINES = ((BLUE, "o-"), (GREEN, "s--"), (PURPLE, "^-."), (CYAN, "D:"), (RED, "v-"))


def legend(figure: Figure, labels: Mapping[str, str]) -> None:
    """What the kinds mean in this figure, below it. labels: kind -> words"""
    looks = {words: KINDS[kind] for kind, words in labels.items()}
    patches = [Patch(facecolor=k.color, hatch=k.hatch, edgecolor=edge(k), label=words) for words, k in looks.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)


def bare(axes: Axes, width: float, height: float, left: float = 0, top: float = 0) -> None:
    """Only the boxes, y pointing down."""
    axes.set(xlim=(left, width), ylim=(height, top), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def draw_programs(rows: int, columns: int, block: int) -> Picture:
    """The grid of a kernel with one program a row. In each box: how far from the tensor's beginning the lane looks."""
    if block < columns:
        raise ValueError(f"{block} lanes cannot hold a row of {columns}")
    idle = block - columns
    alt = (
        f"{rows} lines, one a program, each with {block} boxes. The first {columns} hold the offsets of a row's "
        f"numbers, 0 to {rows * columns - 1} in all; the last {idle} are masked."
    )
    title = f"{rows} programs, one a row: {block} lanes each for {columns} columns, {idle} of them masked"
    figure, axes = picture(9, 1.2 + 0.42 * rows, title, alt)
    for program in range(rows):
        for lane in range(block):
            kind = "cached" if lane < columns else "free"
            cell(axes, lane, 1.1 * program, kind, str(program * columns + lane) if lane < columns else "x", height=0.9)
        axes.text(-0.2, 1.1 * program + 0.45, f"program {program}", ha="right", va="center", fontsize=9, color=INK)
    for lane in range(block):
        axes.text(lane + 0.5, -0.15, f"lane {lane}", ha="center", va="bottom", fontsize=8, color=GREY)
    bare(axes, block + 0.1, 1.1 * rows, left=-1.6, top=-0.6)
    legend(figure, {"cached": "loaded", "free": "masked (x)"})
    return figure


def draw_lanes(rows: int, columns: int, block: int, program: int, masked: bool = True) -> Picture:
    """The lanes of one program, and the memory that they touch, with the mask or without it."""
    if block < columns or not 0 <= program < rows:
        raise ValueError(f"program {program} of {rows} with {block} lanes for {columns} columns")
    start = program * columns
    right = range(start, start + columns)
    stray = range(0) if masked else range(start + columns, start + block)
    beyond = [offset for offset in stray if offset >= rows * columns]
    what = "with its mask" if masked else "without a mask"
    if masked:
        title = f"Program {program} {what}: offsets {start} to {start + columns - 1}, its own row and no more"
    else:
        title = (
            f"Program {program} {what}: {len(stray) - len(beyond)} numbers of other rows, {len(beyond)} past the end"
        )
    alt = (
        f"Above, {block} lanes of program {program} with columns 0 to {block - 1}, the first {columns} inside, and "
        f"the offset of each. Below, memory with {rows} rows of {columns} and {columns} numbers behind them. Touched: "
        f"offsets {start} to {(stray or right)[-1]}."
    )
    figure, axes = picture(9, 3.2 + 0.36 * rows, title, alt)
    names = ("columns = arange", f"columns < {columns}", f"{program} x {columns} + columns")
    for y, name in enumerate(names):
        axes.text(-0.2, y + 0.45, name, ha="right", va="center", fontsize=9, color=INK)
        for lane in range(block):
            inside = lane < columns
            said = (str(lane), "yes" if inside else "no", str(start + lane) if inside or not masked else "x")[y]
            cell(axes, lane, y, "new" if inside else "free" if masked else "rejected", said, height=0.9)
    for row in range(rows + 1):
        for column in range(columns):
            offset = row * columns + column
            kind = "new" if offset in right else "rejected" if offset in stray else "free" if row == rows else "cached"
            cell(axes, column, 3.8 + row, kind, str(offset) if row < rows else "?", height=0.9)
        name = f"row {row}" if row < rows else "not the tensor's"
        axes.text(-0.2, 4.25 + row, name, ha="right", va="center", fontsize=9, color=INK)
    bare(axes, block + 0.1, 4.9 + rows, left=-2.6, top=-0.2)
    last = {} if masked else {"rejected": "touched by mistake"}
    legend(figure, {"new": "touched by this program", "cached": "other rows", "free": "masked, or not ours"} | last)
    return figure


def draw_traffic(ways: Mapping[str, Mapping[str, tuple[int, int]]]) -> Picture:
    """Rows read and written, a bar for each way to compute the same. ways: name -> {step: (read, written)}"""
    total = {name: sum(map(sum, steps.values())) for name, steps in ways.items()}
    alt = "Bars of rows read and written. " + "; ".join(
        f"{name}, {total[name]}: " + ", ".join(f"{step} {r} + {w}" for step, (r, w) in steps.items())
        for name, steps in ways.items()
    )
    title = "; ".join(f"{name}: {rows} rows move" for name, rows in total.items())
    figure, axes = picture(9, 1.2 + 0.7 * len(ways), title, alt)
    for y, (name, steps) in enumerate(ways.items()):
        x = 0
        for step, (read, written) in steps.items():
            axes.text(x + 0.03, 1.3 * y - 0.06, step, va="bottom", fontsize=8, color=INK)
            for i in range(read + written):
                cell(axes, x + i, 1.3 * y, "cached" if i < read else "new", width=0.97, height=0.8)
            x += read + written
        axes.text(-0.15, 1.3 * y + 0.4, name, ha="right", va="center", fontsize=9, color=INK)
    most = max(total.values())
    bare(axes, most + 0.1, 1.3 * len(ways) - 0.4, left=-0.14 * most, top=-0.5)
    legend(figure, {"cached": "a row is read", "new": "a row is written"})
    return figure


def attention_grid(counts: Sequence[int], tile: int, heads: int) -> tuple[int, int]:
    """Packed requests of `counts` query rows. -> (programs of the grid, those that have rows)"""
    tiles = [-(-count // tile) for count in counts]
    return max(tiles) * heads * len(counts), sum(tiles) * heads


def draw_attention_grid(counts: Sequence[int], tile: int, heads: int) -> Picture:
    """flash_attention's grid: tiles of query rows x heads x requests."""
    programs, working = attention_grid(counts, tile, heads)
    most = -(-max(counts) // tile)
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    alt = (
        f"A box for each of {programs} programs: {len(counts)} requests, {heads} heads, {most} tiles of {tile} query "
        f"rows. The requests have {list(counts)} rows. {working} programs work, {programs - working} return at once."
    )
    title = f"{working} of {programs} programs have rows; {programs - working} return at once"
    figure = Picture(min(12, 1.5 + len(counts) * max(1.6, 0.55 * most)), 1.9 + 0.34 * heads, alt)
    figure.suptitle(title, fontsize=11, color=INK, x=0.02, ha="left")
    for r, axes in enumerate(figure.subplots(1, len(counts), squeeze=False)[0]):
        plain(axes)
        for head in range(heads):
            for i in range(most):
                rows = min(tile, counts[r] - i * tile)
                cell(axes, i, head, "new" if rows > 0 else "free", str(rows) if rows > 0 else "", 0.94, 0.94)
        axes.set_title(f"request {r}: rows {ends[r]} to {ends[r + 1] - 1}", loc="left", fontsize=9)
        bare(axes, most, heads)
        axes.set(xticks=[i + 0.5 for i in range(most)], yticks=[h + 0.5 for h in range(heads)])
        axes.set_xticklabels([f"{i}" for i in range(most)])
        axes.set_yticklabels([f"head {h}" for h in range(heads)] if r == 0 else [""] * heads)
        axes.tick_params(length=0)
        axes.set_xlabel("tile", fontsize=9)
    legend(figure, {"new": "works (query rows in the tile)", "free": "returns at once"})
    return figure


def draw_indirection(
    table: Sequence[int], block_size: int, length: int, first: int, tile: int, n_blocks: int, row_size: int
) -> Picture:
    """One tile of keys, columns `first` to `first + tile`: column -> block -> row -> offset in the pool.

    A row of the pool is `row_size` numbers, a block `block_size` rows.
    """
    columns = range(first, first + tile)
    known = [column < length for column in columns]
    blocks = [table[c // block_size] if ok else 0 for c, ok in zip(columns, known, strict=True)]
    offsets = [(b * block_size + c % block_size) * row_size for b, c in zip(blocks, columns, strict=True)]
    lines = {
        "columns": [str(c) for c in columns],
        f"known: < {length}": ["yes" if ok else "no" for ok in known],
        f"columns // {block_size}": [str(c // block_size) for c in columns],
        "block, by the table": [str(b) if ok else "x" for b, ok in zip(blocks, known, strict=True)],
        f"columns % {block_size}": [str(c % block_size) for c in columns],
        "offset of the row": [str(o) if ok else "x" for o, ok in zip(offsets, known, strict=True)],
    }
    used = sorted({b for b, ok in zip(blocks, known, strict=True) if ok})
    masked = known.count(False)
    blocks_used = f"block{'s' * (len(used) > 1)} {' and '.join(map(str, used))}"
    title = f"Keys {first} to {first + tile - 1}: {sum(known)} rows of {blocks_used}; {masked} masked"
    alt = (
        f"Above, {tile} columns from {first} with the steps from column to block and offset; below, a pool of "
        f"{n_blocks} blocks of {block_size} rows. The block table is {list(table)}, the text has {length} tokens. "
        f"Offsets: {[o for o, ok in zip(offsets, known, strict=True) if ok]}."
    )
    figure, axes = picture(11, 4.6, title, alt)
    pitch = block_size + 0.7
    width = max(tile * 1.5, n_blocks * pitch)
    step = max(1.5, 0.7 * width / tile)  # wide enough for the numbers
    for y, (name, said) in enumerate(lines.items()):
        axes.text(-0.3, y + 0.45, name, ha="right", va="center", fontsize=9, color=INK)
        for i, word in enumerate(said):
            cell(axes, step * i, y, "new" if known[i] else "free", word, 0.97 * step, 0.9)
    touched = {b * block_size + c % block_size for b, c, ok in zip(blocks, columns, known, strict=True) if ok}
    before = {table[c // block_size] * block_size + c % block_size for c in range(min(first, length))}
    top = len(lines) + 0.9
    axes.text(-0.3, top + 0.45, "the pool", ha="right", va="center", fontsize=9, color=INK)
    for block in range(n_blocks):
        for row in range(block_size):
            slot = block * block_size + row
            kind = "new" if slot in touched else "cached" if slot in before else "free"
            cell(axes, block * pitch + row, top, kind, height=0.9)
        box = Rectangle((block * pitch, top), block_size, 0.9, fill=False, edgecolor=INK if block in table else GREY)
        axes.add_patch(box)
        entry = f", entry {list(table).index(block)}" if block in table else ""
        axes.text(block * pitch, top + 1.0, f"block {block}{entry}", va="top", fontsize=8, color=INK)
    bare(axes, width + 0.2, top + 1.7, left=-0.19 * width, top=-0.2)
    legend(figure, {"new": "this tile", "cached": "tiles before it", "free": "not touched, or masked"})
    return figure


def draw_splits(lengths: Sequence[int], programs: Mapping[str, Sequence[int]], wanted: int) -> Picture:
    """Programs of a decode launch against the length of the texts, a line for each batch."""
    if any(len(line) != len(lengths) for line in programs.values()) or len(programs) > len(LINES):
        raise ValueError(f"at most {len(LINES)} lines, each with {len(lengths)} points")
    ends = "; ".join(f"{name}: {line[0]} to {line[-1]}" for name, line in programs.items())
    alt = f"Programs for lengths from {lengths[0]} to {lengths[-1]}. {ends}. A level line at {wanted}."
    first, line = next(iter(programs.items()))
    title = f"Splitting the past: {first} makes {line[0]} programs when short, {line[-1]} when long"
    figure, axes = picture(8, 3.6, title, alt)
    for (name, line), (color, form) in zip(programs.items(), LINES, strict=False):
        axes.plot(lengths, line, form, color=color, label=name, markersize=4)
    axes.axhline(wanted, color=GREY, linewidth=1)
    axes.text(lengths[0], wanted * 1.06, f"wanted: {wanted}", va="bottom", fontsize=8, color=GREY)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="tokens of each text", ylabel="programs")
    axes.set_xticks(lengths[::2], [f"{length:,}" for length in lengths[::2]])
    powers = [2**i for i in range(1 + max(map(max, programs.values())).bit_length())]
    axes.set_yticks(powers[::2], [f"{power:,}" for power in powers[::2]])
    axes.legend(frameon=False, fontsize=9)
    return figure
