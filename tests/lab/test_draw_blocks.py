"""The figures of the paged cache show the pool as it is: every slot, owner, list and reference."""

from __future__ import annotations

import re

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from minillm.engine import Engine
from minillm.lab.draw_blocks import (
    SLOT,
    BlockState,
    PoolState,
    draw_block_table,
    draw_pool,
    draw_prefix_tree,
    draw_rooms,
    draw_ttft,
    draw_waste,
    look,
    shown,
)
from minillm.lab.kv_memory import Slots, Text, paged_room, room_of
from minillm.lab.plots import KINDS
from minillm.lab.tiny import tiny_model
from minillm.sampling import SamplingParams

KIND_OF = {look_of.color: kind for kind, look_of in KINDS.items()}


def cells(axes: Axes, width: float = SLOT) -> dict[tuple[float, float], str]:
    """{(x, y): kind} of all filled boxes of one width; no two may lie on one another."""
    boxes = [box for box in axes.patches if box.get_fill() and round(box.get_width(), 3) == width]
    found = {(round(box.get_x(), 2), round(box.get_y(), 2)): KIND_OF[to_hex(box.get_facecolor())] for box in boxes}
    assert len(found) == len(boxes)
    return found


def frames(axes: Axes) -> int:
    return sum(not box.get_fill() and box.get_width() > SLOT for box in axes.patches)


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def engine(**limits) -> Engine:
    return Engine(tiny_model(), **{"n_blocks": 8, "block_size": 4, "max_num_batched_tokens": 64, **limits})


def test_look_tells_prompt_generated_computed_cached_and_free_apart():
    e = engine()
    people = {"A": e.add(list(range(1, 7)), greedy(2)), "B": e.add([9] * 5, greedy(5))}
    e.step()
    state = look(e, people)
    assert state.tables == {"A": [0, 1], "B": [2, 3]}
    assert state.blocks[0].slots == (("new", "1"), ("new", "2"), ("new", "3"), ("new", "4"))
    assert state.blocks[1].slots == (("new", "5"), ("new", "6"), ("free", ""), ("free", ""))
    assert state.event == "A reads 6; B reads 5"
    e.step()
    state = look(e, people)  # A has ended: its full block is known, its last one is free
    written = str(people["B"].tokens[5])
    assert state.event == "A goes on by 1, and ends; B goes on by 1"
    assert state.blocks[0].slots == tuple(("cached", str(i)) for i in range(1, 5))
    assert state.blocks[1].slots == (("free", ""),) * 4
    assert state.blocks[3].slots == (("prompt", "9"), ("new", written), ("free", ""), ("free", ""))
    assert (state.cached, state.free[0]) == ([0], 1)
    e.step()
    assert [kind for kind, _ in look(e, people).blocks[3].slots] == ["prompt", "generated", "new", "free"]


def test_look_sees_sharing_copies_and_the_tree():
    e = engine()
    people = dict(zip("ABC", e.add_samples([1, 2, 3, 4, 5, 6], 3, greedy(4)), strict=True))
    e.step()
    state = look(e, people)
    assert [block.owners for block in state.blocks[:3]] == [("A", "B", "C"), ("A", "B", "C"), ()]
    assert state.blocks[0].known and not state.blocks[1].known
    kinds = [[kind for kind, _ in block.slots] for block in state.blocks[:2]]
    assert kinds == [["new"] * 4, ["new", "new", "free", "free"]]  # computed for A, and seen in B's and C's tables too
    e.step()
    state = look(e, people)
    assert state.event.startswith("block 1 copied to 2; block 1 copied to 3; A goes on by 1")
    assert [block.owners for block in state.blocks[:4]] == [("A", "B", "C"), ("C",), ("A",), ("B",)]
    e.step()
    known = [block for block in look(e, people).blocks if block.known]
    assert [block.parent for block in known] == [None, 0]  # greedy samples are alike: one block of them is known


def test_look_names_those_who_wait():
    e = engine(max_num_seqs=1)
    people = {"A": e.add([1, 2], greedy(2)), "B": e.add([3], greedy(2))}
    e.step()
    assert look(e, people).waiting == ["B"]
    while not e.idle:
        e.step()
    assert look(e, people).waiting == []


def state() -> PoolState:
    full = tuple(("prompt", t) for t in "abcd")
    half = (("generated", "e"), ("new", "f"), ("free", ""), ("free", ""))
    old = tuple(("cached", t) for t in "wxyz")
    empty = (("free", ""),) * 4
    return PoolState(
        blocks=[
            BlockState(full, ("A", "B"), True, None),
            BlockState(half, ("A",), False, None),
            BlockState(old, (), True, 0),
            BlockState(full, ("B",), True, 0),
            BlockState(empty, (), False, None),
            BlockState(empty, (), False, None),
        ],
        tables={"A": [0, 1], "B": [0, 3]},
        waiting=["C"],
        free=[5, 4],
        cached=[2],
        event="A goes on by 1",
    )


@pytest.mark.parametrize("columns", [1, 2, 3, 6])
def test_the_pool_shows_every_slot_owner_and_list(columns):
    figure = draw_pool(state(), columns)
    (axes,) = figure.axes
    kinds = list(cells(axes).values())
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "prompt": 8, "generated": 1, "new": 1, "cached": 4, "free": 10
    }  # fmt: skip
    assert frames(axes) == 3
    said = texts(axes)
    assert said.count("AB") == said.count("A") - 1 == said.count("B") - 1 == 1
    assert "waiting: C" in said and "empty" not in said
    assert axes.get_title(loc="left") == "A goes on by 1\n3 of 6 blocks owned, 2 of their slots empty"
    assert "3 are owned and hold 10 tokens, 1 are cached, 2 free" in figure.alt
    assert "A: [0, 1]; B: [0, 3]. Waiting: C." in figure.alt


def test_lists_stand_in_their_order():
    (axes,) = draw_pool(state()).axes
    row = next(t.get_position()[1] for t in axes.texts if t.get_text() == "free")
    numbers = [t for t in axes.texts if t.get_position()[1] == row and t.get_text().isdigit()]
    at_right = sorted(numbers, key=lambda t: t.get_position()[0])[-2:]
    assert [t.get_text() for t in at_right] == ["5", "4"]


def test_an_empty_pool_says_so():
    blocks = [BlockState((("free", ""),) * 2, (), False, None)] * 2
    figure = draw_pool(PoolState(blocks, {}, [], [0, 1], [], "nothing to do"))
    assert texts(figure.axes[0]).count("empty") == 1  # the cached list
    assert "Block tables: none. Waiting: nobody." in figure.alt


def test_the_tree_joins_each_block_to_the_one_before_it():
    figure = draw_prefix_tree(state())
    (axes,) = figure.axes
    assert len(cells(axes)) == 3 * 4
    assert len(axes.lines) == 2  # from block 0 to 2 and to 3
    starts = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines}
    assert len(starts) == 1
    said = texts(axes)
    assert "block 0: 2 references (A, B)" in said
    assert "block 2: 0 references" in said and "block 3: 1 reference (B)" in said
    assert figure.alt == "A tree of 3 blocks with 2 branches. References: block 0: 2, block 2: 0, block 3: 1."
    assert "1 of them serve several texts" in axes.get_title(loc="left")


def test_a_tree_needs_a_block():
    blocks = [BlockState((("free", ""),), (), False, None)]
    with pytest.raises(ValueError, match="no tree to draw"):
        draw_prefix_tree(PoolState(blocks, {}, [], [0], [], ""))


@pytest.mark.parametrize("position", [0, 3, 4, 9])
def test_a_block_table_leads_to_the_row(position):
    table = [5, 2, 0]
    figure = draw_block_table(table, 10, 4, 7, position)
    (axes,) = figure.axes
    grid = cells(axes, width=1)
    assert len(grid) == 3 * 4 + 7 * 4
    block, row = table[position // 4], position % 4
    pool_row = {x: kind for (x, y), kind in grid.items() if y == 3}
    assert [x for x, kind in pool_row.items() if kind == "new"] == [round(block * 4.8 + row, 2)]
    assert sum(kind == "cached" for kind in pool_row.values()) == 9
    assert f"row {row} of block {block}" in axes.get_title(loc="left") and f"row {row} of block {block}" in figure.alt
    assert [t for t in texts(axes) if t.startswith("entry")] == ["entry 0: 5", "entry 1: 2", "entry 2: 0"]


@pytest.mark.parametrize(("length", "position"), [(10, 10), (10, -1), (13, 0)])
def test_a_position_outside_the_table_is_refused(length, position):
    with pytest.raises(ValueError, match=f"position {position} of {length} tokens"):
        draw_block_table([5, 2, 0], length, 4, 7, position)


def test_rooms_are_as_wide_as_what_is_set_aside():
    both = [Text(3, 4), Text(10, 1)]
    figure = draw_rooms(both, {"one piece": room_of(20), "blocks": paged_room(4)})
    for axes, rooms in zip(figure.axes, ([20, 20], [8, 12]), strict=True):
        widths = [box.get_width() for box in axes.patches]
        assert widths == [3, 3, rooms[0] - 6, 10, 0, rooms[1] - 10]
    assert re.search(r"one piece 60\.0%, blocks 20\.0%", figure.alt)
    assert figure.axes[1].get_title(loc="left") == "blocks: 20.0% empty"


def test_waste_is_what_is_not_used():
    figure = draw_waste({"one piece": Slots(200, 50), "blocks": Slots(100, 99)})
    (axes,) = figure.axes
    assert [box.get_width() for box in axes.patches] == pytest.approx([25, 75, 99, 1])
    assert [t.get_text() for t in axes.texts] == ["75.0% empty", "1.0% empty"]
    assert axes.get_title(loc="left") == "Empty: 75% (one piece), 1.0% (blocks)"
    assert "one piece 75.0%, blocks 1.0%" in figure.alt


def test_ttft_shows_measured_and_least_times():
    figure = draw_ttft(100, [0, 50, 90], [2.0, 1.0, 0.25], [1.5, 0.5, 0.1])
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[2000, 1000, 250], [1500, 500, 100]]
    assert "up to 8.0 times sooner" in axes.get_title(loc="left")
    assert "90 cached 250 ms" in figure.alt
    with pytest.raises(ValueError, match="3 shares, 2 times and 3 predictions"):
        draw_ttft(100, [0, 50, 90], [1, 1], [1, 1, 1])


@pytest.mark.parametrize(
    ("text", "as_shown"), [("a", "a"), ("\n", r"\n"), (" $x", r"\$x"), ("  ", "_"), ("harbour", "harbo."), ("", "")]
)
def test_texts_fit_into_a_slot(text, as_shown):
    assert shown(text) == as_shown
