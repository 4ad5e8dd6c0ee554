"""Pictures of the paged cache: rooms and their waste, the pool with its tables and lists, the prefix tree, a block
table at work, the first token by what was cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minillm.engine import Engine
from minillm.engine_request import EngineRequest
from minillm.lab.kv_memory import Room, Slots, Text
from minillm.lab.plots import BLUE, GREY, INK, KINDS, PURPLE, Picture, cell, edge, picture, show_legend

SLOT = 2.3  # width of a slot, in the unit of a block's height, so that a short token's text fits


@dataclass(frozen=True)
class BlockState:
    """One block of the pool. slots: (kind, text) of each. owners: who points at it. parent: the block before it in the
    prefix that it is known by; None at the beginning of a text. known: whether it can be found by its content."""

    slots: tuple[tuple[str, str], ...]
    owners: tuple[str, ...]
    known: bool
    parent: int | None


@dataclass(frozen=True)
class PoolState:
    """The pool after a step. free: the next to be taken first. cached: the next to be evicted first."""

    blocks: Sequence[BlockState]
    tables: Mapping[str, Sequence[int]]
    waiting: Sequence[str]
    free: Sequence[int]
    cached: Sequence[int]
    event: str


def look(engine: Engine, people: Mapping[str, EngineRequest], piece: Callable[[int], str] = str) -> PoolState:
    """The engine's pool as it is after its last step. people: the requests by name. piece: a token as text."""
    pool, step = engine.blocks, engine.last_step
    size = pool.block_size
    computed = {span.request: range(span.start, span.end) for span in step.spans}
    tables = {name: list(r.block_table) for name, r in people.items() if r.block_table}
    slots: dict[int, list[tuple[str, str]]] = {b: [("free", "")] * size for b in range(pool.n_blocks)}
    for block in pool.cached:
        slots[block] = [("cached", piece(token)) for token in pool.prefix_of[block].tokens]
    for name, table in tables.items():
        request = people[name]
        for position in range(request.num_computed):
            block, row = table[position // size], position % size
            kind = "prompt" if position < len(request.writer.prompt) else "generated"
            if position in computed.get(request, ()) or slots[block][row][0] == "new":
                kind = "new"
            slots[block][row] = kind, piece(request.tokens[position])
    blocks = []
    for block in range(pool.n_blocks):
        owners = tuple(name for name, table in tables.items() if block in table)
        prefix = pool.prefix_of.get(block)
        parent = pool.block_of.get(prefix.parent) if prefix and prefix.parent else None
        blocks.append(BlockState(tuple(slots[block]), owners, prefix is not None, parent))
    waiting = [name for name, r in people.items() if r.finish_reason is None and not r.block_table]
    return PoolState(blocks, tables, waiting, pool.free[::-1], list(pool.cached), describe(engine, people))


def describe(engine: Engine, people: Mapping[str, EngineRequest]) -> str:
    """What the last step did, in words."""
    names = {request: name for name, request in people.items()}
    said = [f"block {a} copied to {b}" for a, b in engine.last_step.copies]
    for span in engine.last_step.spans:
        request = span.request
        what = "reads" if span.start < len(request.writer.prompt) else "goes on by"
        end = ", and ends" if request.finish_reason else ""
        said.append(f"{names[request]} {what} {span.count}{end}")
    return "; ".join(said) or "nothing to do"


def draw_pool(state: PoolState, columns: int = 2) -> Picture:
    """The grid of blocks, and beside it the block tables, the free list and the cached list."""
    n, size = len(state.blocks), len(state.blocks[0].slots)
    rows = -(-n // columns)
    held = sum(kind != "free" for b in state.blocks if b.owners for kind, _ in b.slots)
    owned = sum(bool(b.owners) for b in state.blocks)
    tables = "; ".join(f"{name}: {list(table)}" for name, table in state.tables.items()) or "none"
    alt = (
        f"A pool of {n} blocks of {size} slots. {owned} are owned and hold {held} tokens, {len(state.cached)} are "
        f"cached, {len(state.free)} free. Block tables: {tables}. Waiting: {', '.join(state.waiting) or 'nobody'}."
    )
    title = f"{state.event}\n{owned} of {n} blocks owned, {owned * size - held} of their slots empty"
    lines = len(state.tables) + 3
    figure, axes = picture(11, 1.1 + 0.5 * max(rows, lines), title, alt)
    pitch = size * SLOT + 2.8
    for block, each in enumerate(state.blocks):
        x, y = (block // rows) * pitch, block % rows
        draw_block(axes, x, y, block, each)
    x = columns * pitch + 2.5
    lists = [(name, table) for name, table in state.tables.items()]
    lists += [("free", state.free), ("cached", state.cached)]
    for y, (name, numbers) in enumerate(lists):
        axes.text(x - 0.4, y + 0.4, name, ha="right", va="center", fontsize=9, color=INK)
        for i, number in enumerate(numbers):
            number_box(axes, x + i * 1.35, y, number, cached=y == len(lists) - 1)
        if not numbers:
            axes.text(x, y + 0.4, "empty", va="center", fontsize=9, color=GREY)
    axes.text(
        x - 0.4,
        len(lists) + 0.4,
        f"waiting: {', '.join(state.waiting) or 'nobody'}",
        va="center",
        fontsize=9,
        color=INK,
    )
    axes.set(xlim=(-1.4, x + 1.35 * n + 0.5), ylim=(max(rows, lines) + 0.1, -0.3), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    show_legend(figure, ("prompt", "generated", "new", "cached", "free"))
    return figure


def draw_block(axes: Axes, x: float, y: float, number: int, block: BlockState) -> None:
    """One block: its number, its slots, a frame if it is owned, and its owners."""
    axes.text(x - 0.3, y + 0.4, str(number), ha="right", va="center", fontsize=8, color=GREY)
    for i, (kind, text) in enumerate(block.slots):
        cell(axes, x + i * SLOT, y, kind, shown(text), SLOT, 0.8)
    if block.owners:
        width = len(block.slots) * SLOT
        axes.add_patch(Rectangle((x, y), width, 0.8, fill=False, edgecolor=INK, linewidth=1.6))
        axes.text(x + width + 0.2, y + 0.4, "".join(block.owners), va="center", fontsize=9, color=INK, weight="bold")


def number_box(axes: Axes, x: float, y: float, number: int, cached: bool) -> None:
    """A block's number as an entry of a list."""
    if cached:
        cell(axes, x, y, "cached", str(number), 1.2, 0.8)
        return
    axes.add_patch(Rectangle((x, y), 1.2, 0.8, fill=False, edgecolor=INK, linewidth=1))
    axes.text(x + 0.6, y + 0.4, str(number), ha="center", va="center", fontsize=8, color=INK)


def shown(text: str) -> str:
    """A token's text as it can stand in a figure."""
    text = text.replace("\n", "\\n").replace("$", r"\$").strip() or ("_" if text else "")
    return text if len(text) <= 6 else text[:5] + "."


def draw_prefix_tree(state: PoolState) -> Picture:
    """The blocks that can be found by their content, each behind the block that stands before it."""
    children: dict[int | None, list[int]] = {}
    for number, block in enumerate(state.blocks):
        if block.known:
            children.setdefault(block.parent, []).append(number)
    places: dict[int, tuple[int, float]] = {}
    leaves = 0

    def place(number: int, depth: int) -> float:
        nonlocal leaves
        below = [place(child, depth + 1) for child in children.get(number, [])]
        if not below:
            below = [1.4 * leaves]
            leaves += 1
        places[number] = depth, (below[0] + below[-1]) / 2
        return places[number][1]

    for root in children.get(None, []):
        place(root, 0)
    if not places:
        raise ValueError("no block is known by its content: there is no tree to draw")
    shared = [number for number in places if len(state.blocks[number].owners) > 1]
    counts = ", ".join(f"block {number}: {len(state.blocks[number].owners)}" for number in sorted(places))
    alt = f"A tree of {len(places)} blocks with {leaves} branches. References: {counts}."
    title = (
        f"{len(places)} full blocks can be found by their content; {len(shared)} of them serve several texts at once"
    )
    depths = 1 + max(depth for depth, _ in places.values())
    size = len(state.blocks[0].slots)
    pitch = size * SLOT + 4.2
    figure, axes = picture(11, 1.4 + 0.8 * leaves, title, alt)
    for number, (depth, y) in places.items():
        x = depth * pitch
        block = state.blocks[number]
        parent = block.parent
        if parent is not None:
            _, py = places[parent]
            axes.plot([x - 4.2 + 0.1, x], [py + 0.4, y + 0.4], color=GREY, linewidth=1.2, zorder=0)
        for i, (kind, text) in enumerate(block.slots):
            cell(axes, x + i * SLOT, y, kind, shown(text), SLOT, 0.8)
        references = len(block.owners)
        who = f"block {number}: {references} reference{'s' * (references != 1)}" + (
            f" ({', '.join(block.owners)})" if block.owners else ""
        )
        axes.text(x, y - 0.06, who, va="bottom", fontsize=8, color=INK)
    axes.set(xlim=(-0.5, depths * pitch - 3.5), ylim=(1.4 * leaves - 0.4, -0.6), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    show_legend(figure, ("prompt", "generated", "new", "cached"))
    return figure


def draw_block_table(table: Sequence[int], length: int, block_size: int, n_blocks: int, position: int) -> Picture:
    """Where position `position` of a text of `length` tokens lies: through its block table, in a pool of `n_blocks`."""
    if not 0 <= position < length or length > len(table) * block_size:
        raise ValueError(f"position {position} of {length} tokens is not in {len(table)} blocks of {block_size}")
    index, row = divmod(position, block_size)
    block = table[index]
    title = f"position {position} = {index} x {block_size} + {row}: row {row} of block {block}"
    alt = (
        f"Above, a text of {length} tokens in blocks of {block_size}; below, a pool of {n_blocks} blocks. The block "
        f"table {list(table)} joins them. Position {position} is row {row} of block {block}."
    )
    figure, axes = picture(11, 3.2, title, alt)
    pitch = block_size + 0.8
    left = max(0.0, (n_blocks - len(table)) * pitch / 2)
    slot_of = {table[p // block_size] * block_size + p % block_size: p for p in range(length)}
    for i, target in enumerate(table):
        for r in range(block_size):
            p = i * block_size + r
            kind = "free" if p >= length else "new" if p == position else "cached"
            cell(axes, left + i * pitch + r, 0, kind, str(p) if p < length else "")
        middle = block_size / 2
        axes.annotate(
            "",
            xy=(target * pitch + middle, 2.95),
            xytext=(left + i * pitch + middle, 1.05),
            arrowprops={"arrowstyle": "->", "color": PURPLE if i == index else GREY, "lw": 2 if i == index else 1},
        )
        axes.text(left + i * pitch + middle, -0.15, f"entry {i}: {target}", ha="center", va="bottom", fontsize=8)
    for number in range(n_blocks):
        for r in range(block_size):
            p = slot_of.get(number * block_size + r)
            kind = "free" if p is None else "new" if p == position else "cached"
            cell(axes, number * pitch + r, 3, kind, "" if p is None else str(p))
        axes.text(number * pitch + block_size / 2, 4.15, f"block {number}", ha="center", va="top", fontsize=8)
    axes.set(xlim=(-0.3, n_blocks * pitch), ylim=(4.7, -0.7), xticks=[], yticks=[0.5, 3.5])
    axes.set_yticklabels(["the text", "the pool"], color=INK)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    show_legend(figure, ("cached", "new", "free"))
    return figure


def draw_rooms(texts: Sequence[Text], rooms: Mapping[str, Room]) -> Picture:
    """Each text as a bar: its prompt, its output, and the room set aside for it that stays empty."""
    empty = {name: sum(room(text) - text.kept for text in texts) for name, room in rooms.items()}
    total = {name: sum(room(text) for text in texts) for name, room in rooms.items()}
    alt = f"Bars for {len(texts)} texts, once for each way to set room aside. Empty: " + ", ".join(
        f"{name} {empty[name] / total[name]:.1%}" for name in rooms
    )
    figure = Picture(10, 1.4 + 0.14 * len(texts), alt)
    panels = figure.subplots(1, len(rooms), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (name, room) in zip(panels, rooms.items(), strict=True):
        for y, text in enumerate(texts):
            bar(axes, 0, y, text.prompt, "prompt")
            bar(axes, text.prompt, y, text.kept - text.prompt, "generated")
            bar(axes, text.kept, y, room(text) - text.kept, "free")
        axes.set_title(f"{name}: {empty[name] / total[name]:.1%} empty", loc="left", fontsize=10)
        axes.set(xlabel="slots", ylim=(len(texts), 0), yticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.autoscale(axis="x")
    panels[0].set_ylabel("one text a line")
    figure.suptitle("Empty room: " + ", ".join(f"{empty[n] / total[n]:.0%} {n}" for n in rooms), fontsize=11)
    show_legend(figure, ("prompt", "generated", "free"))
    return figure


def bar(axes: Axes, x: float, y: float, width: float, kind: str) -> None:
    """A bar in the look of its kind; an empty one keeps an outline that can be seen."""
    look_of = KINDS[kind]
    line = GREY if kind == "free" else edge(look_of)
    axes.barh(y + 0.5, width, 0.8, left=x, color=look_of.color, hatch=look_of.hatch, edgecolor=line, linewidth=0.5)


def draw_waste(ways: Mapping[str, Slots]) -> Picture:
    """The used and the empty share of what each way sets aside."""
    least, most = (pick(ways, key=lambda name: ways[name].waste) for pick in (min, max))
    alt = "Bars, the empty share: " + ", ".join(f"{name} {slots.waste:.1%}" for name, slots in ways.items())
    title = f"Empty: {ways[most].waste:.0%} ({most}), {ways[least].waste:.1%} ({least})"
    figure, axes = picture(9, 1.4 + 0.42 * len(ways), title, alt)
    for y, slots in enumerate(ways.values()):
        bar(axes, 0, y, 100 * (1 - slots.waste), "cached")
        bar(axes, 100 * (1 - slots.waste), y, 100 * slots.waste, "free")
        axes.text(101, y + 0.5, f"{slots.waste:.1%} empty", va="center", fontsize=9, color=INK)
    axes.set_yticks([y + 0.5 for y in range(len(ways))], list(ways))
    axes.set(xlabel="% of the slots set aside", xlim=(0, 116), ylim=(len(ways), 0), xticks=range(0, 101, 20))
    show_legend(figure, ("cached", "free"))
    return figure


def draw_ttft(prompt: int, cached: Sequence[int], seconds: Sequence[float], least: Sequence[float]) -> Picture:
    """Time to the first token against the part of the prompt that was found in the cache. least: by the roofline."""
    if len(cached) < 2 or not len(cached) == len(seconds) == len(least):
        raise ValueError(f"{len(cached)} shares, {len(seconds)} times and {len(least)} predictions")
    points = ", ".join(f"{c} cached {s * 1e3:.0f} ms" for c, s in zip(cached, seconds, strict=True))
    alt = f"Time to first token of a prompt of {prompt} tokens, falling with the cached tokens: {points}."
    factor = max(seconds) / min(seconds)
    title = f"What is cached is not computed: the first token comes up to {factor:.1f} times sooner"
    figure, axes = picture(8, 3.4, title, alt)
    axes.plot(cached, [s * 1e3 for s in seconds], "o-", color=BLUE, label="measured")
    axes.plot(cached, [s * 1e3 for s in least], "s--", color=GREY, label="at least, by the roofline")
    axes.set(xlabel=f"tokens found in the cache, of {prompt}", ylabel="ms to the first token", ylim=(0, None))
    axes.legend(frameon=False)
    return figure
