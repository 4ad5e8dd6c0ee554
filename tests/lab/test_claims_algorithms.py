"""The rows of the ledger that running an algorithm decides: what they find in quick mode, and that verdicts follow.

Counts are worked out here in closed form. Where a mistake is planted in what a row runs, or its figures are others,
another verdict must come out.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import mutant

from minillm import speculative
from minillm.lab.claims import (
    b_attention,
    b_caches,
    b_guessing,
    b_kv_axes,
    b_loops,
    b_quantization,
)
from minillm.lab.claims.ledger import Claim, Finding, Verdict
from minillm.lab.claims.run import all_claims
from minillm.lab.claims.workbench import Workbench
from minillm.lab.tiny import TINY, tiny_model
from minillm.policies import Continuous, Dynamic

HOLDS, HOLDS_IF, DOES_NOT = Verdict.HOLDS, Verdict.HOLDS_IF, Verdict.DOES_NOT_HOLD
CLAIMS: dict[str, Claim] = {}
for part in (b_loops, b_attention, b_caches, b_guessing, b_quantization, b_kv_axes):
    CLAIMS |= part.ledger.claims
NAMES = [f"B{i}" for i in range(1, 17)]
EXPECTED = dict.fromkeys(NAMES, DOES_NOT)
EXPECTED |= {"B5": HOLDS, "B6": HOLDS} | dict.fromkeys(("B7", "B8", "B9", "B10", "B15"), HOLDS_IF)
SMALL = Workbench(quick=True)  # for rows that do not ask for the model


def judge(id: str, figures: dict) -> Finding:
    return CLAIMS[id].judge(json.loads(json.dumps(figures)))  # as they come back from a file


@cache
def measured(id: str) -> dict:
    return CLAIMS[id].measure(SMALL)


@pytest.fixture(scope="module", autouse=True)
def real_model(smollm2):
    SMALL.__dict__["loaded"] = smollm2


def test_all_sixteen_rows_are_in_the_ledger():
    assert sorted(CLAIMS) == sorted(NAMES)
    assert {id: all_claims()[id] for id in NAMES} == CLAIMS


@pytest.mark.parametrize("id", NAMES)
def test_what_is_found_in_quick_mode(id):
    found = judge(id, measured(id))
    assert found.verdict is EXPECTED[id]
    assert any(digit in found.condition for digit in "0123456789")


def changed(id: str, **others) -> dict:
    """The figures that were measured, with some others in their place."""
    figures = json.loads(json.dumps(measured(id)))
    assert others.keys() <= figures.keys()
    return figures | others


QUALITY = {"recall": 0.5, "recall_nats": 1.0, "arithmetic": 0.5, "arithmetic_nats": 1.0}


def quality(bits: int, above: float, arithmetic: float = 1.0) -> dict:
    about = {"name": f"{bits} bits", "bits": bits, "group": 64, "nats_above": above}
    return about | QUALITY | {"arithmetic_nats": arithmetic}


def two_layers(k: tuple[list[float], list[float]], v: tuple[list[float], list[float]]) -> dict[str, list[float]]:
    """The output's errors with K by channel and by token, and with V by channel and by token."""
    names = [f"{what} by {axis}" for what in ("K", "K before", "V") for axis in ("channel", "token")]
    layers = {name: [0.5, 0.5] for name in (*names, "K outlier", "V outlier")}
    for what, (channel, token) in (("K", k), ("V", v)):
        layers |= {f"output, {what} by channel": channel, f"output, {what} by token": token}
    return layers


def texts(same: int, margin: float) -> dict:
    return {"tokens": 9, "same": same, "margin": margin, "margin_there": margin, "difference": 0.1}


TIMES = {"8": {"awq": 1.0, "gptq": 2.0}, "16": {"awq": 1.0, "gptq": 3.0}}
SLIP = {"distance": 0.0, "tokens": 1.5}
EXACT = [0, 1e-16, 0, 0]
BY_HAND = [
    ("B1", {"added": EXACT, "crossed": EXACT}, 0, HOLDS),
    ("B1", {"added": [0, 1, 2, 3], "crossed": [0, 1, 2, 4]}, 3, DOES_NOT),
    ("B1", {"added": EXACT, "crossed": [0, 1, 2, 4]}, 0, DOES_NOT),
    ("B2", {"tiled": [1, 2, 4, 8]}, 1, HOLDS),
    ("B2", {"tiled": [1, 4, 16, 64]}, 2, DOES_NOT),
    ("B2", {"tiled": [1, 2, 4, 10]}, math.log2(2.5), HOLDS_IF),
    ("B3", {"mixed": {"collect": {"joined": 5, "wait": 3, "steps": 10}, "join": {"joined": 5, "wait": 3, "steps": 10}}},
     1, HOLDS),
    ("B3", {"mixed": {"collect": {"joined": 0, "wait": 3, "steps": 30}, "join": {"joined": 5, "wait": 3, "steps": 10}}},
     3, DOES_NOT),
    ("B4", {"one": {"a": SLIP, "b": SLIP | {"tokens": 1.0}}}, 0, HOLDS),
    ("B4", {"one": {"a": SLIP, "b": SLIP | {"distance": 0.1}}}, 1, DOES_NOT),
    ("B5", {"drawn": [0, 1e-16], "certain": [0, 0]}, 1e-16, HOLDS),
    ("B5", {"drawn": [0, 1e-16], "certain": [0, 0.02]}, 0.02, DOES_NOT),
    ("B6", {"gap": 1e-15}, 1e-15, HOLDS),
    ("B6", {"gap": 1e-5}, 1e-5, DOES_NOT),
    ("B7", {"cached_whole": [1, 2, 4], "naive_whole": [1, 4, 16]}, 1, HOLDS),
    ("B7", {"cached_step": [1, 4, 16]}, math.log2(7260 / 1830), DOES_NOT),
    ("B8", {"greedy": {"float32": texts(9, 1)}, "sampled": 3, "seeds": 3}, 100, HOLDS),
    ("B8", {"greedy": {"float32": texts(9, 1)}, "sampled": 0, "seeds": 3}, 100, HOLDS_IF),
    ("B8", {"greedy": {"float32": texts(9, 1), "bfloat16": texts(4, 0.1)}}, 100, HOLDS_IF),
    ("B8", {"greedy": {"float32": texts(3, 0.5)}, "sampled": 3, "seeds": 3}, 100 / 3, DOES_NOT),
    ("B9", {"reference": QUALITY, "rows": [quality(8, 0.001), quality(4, 0.005, 1.1)]}, 0.1, HOLDS),
    ("B9", {"reference": QUALITY, "rows": [quality(8, 0.001), quality(4, 0.005, 0.9)]}, 0.1, HOLDS_IF),
    ("B9", {"reference": QUALITY, "rows": [quality(8, 0.001), quality(4, 0.05, 1.1)]}, 0.1, HOLDS_IF),
    ("B9", {"reference": QUALITY, "rows": [quality(8, 0.02), quality(4, 0.05, 1.1)]}, 2.02, DOES_NOT),
    ("B9", {"reference": QUALITY, "rows": [quality(8, 0.02), quality(4, 0.05), quality(4, 0)]}, 2.02, DOES_NOT),
    ("B10", {"layers": two_layers(([1, 1], [2, 2]), ([2, 2], [1, 1]))}, 1, HOLDS),
    ("B10", {"layers": two_layers(([1, 1], [2, 2]), ([2, 1], [1, 1.5]))}, 1, HOLDS_IF),
    ("B10", {"layers": two_layers(([1, 1], [2, 2]), ([1, 1], [2, 2]))}, 1, DOES_NOT),
    ("B10", {"layers": two_layers(([2, 2], [1, 1]), ([2, 2], [1, 1]))}, 1, DOES_NOT),
    ("B11", {"no mask": 0, "attends first": 1e-16, "keys only": 0, "astray": 0, "written": 20}, 0, HOLDS),
    ("B11", {"no mask": 0, "attends first": 0.1, "keys only": 0, "astray": 0, "written": 20}, 1, DOES_NOT),
    ("B11", {"no mask": 0, "attends first": 0, "keys only": "RuntimeError", "astray": 4, "written": 9}, 3, DOES_NOT),
    ("B12", {"written": [1, 5, 8]}, 0, HOLDS),
    ("B12", {"written": [1, 7, 8]}, 2, DOES_NOT),
    ("B13", {"neighbour, no mask": 0.3}, 0.3, HOLDS),
    ("B13", {"neighbour, no mask": 0}, 0, DOES_NOT),
    ("B14", {"decode": {"a": 2, "b": 3}}, 3, HOLDS),
    ("B14", {"decode": {"a": 1.1, "b": 3}}, 3, HOLDS_IF),
    ("B14", {"decode": {"a": 1.1, "b": 1.1}}, 1.1, DOES_NOT),
    ("B15", {"code": 15, "outside": {"any": 0, "symmetric": 0, "unseen": 0}}, 15, HOLDS),
    ("B15", {"outside": {"any": 1, "symmetric": 0, "unseen": 0}}, 16, HOLDS_IF),
    ("B15", {"outside": {"any": 1, "symmetric": 0, "unseen": 0}, "clamped": 1.5}, 16, DOES_NOT),
    ("B16", {"backward": {"awq": 0, "gptq": 8}, "seconds": TIMES}, 3, HOLDS),
    ("B16", {"backward": {"awq": 0, "gptq": 8}, "seconds": TIMES | {"8": {"awq": 2, "gptq": 1}}}, 3, HOLDS_IF),
    ("B16", {"backward": {"awq": 0, "gptq": 8}, "seconds": {"8": {"awq": 2, "gptq": 1}}}, 0.5, DOES_NOT),
    ("B16", {"backward": {"awq": 0, "gptq": 0}, "seconds": TIMES}, 3, DOES_NOT),
    ("B16", {"backward": {"awq": 3, "gptq": 8}, "seconds": TIMES}, 3, DOES_NOT),
]  # fmt: skip


@pytest.mark.parametrize(("id", "others", "figure", "verdict"), BY_HAND)
def test_other_figures_give_another_verdict(id, others, figure, verdict):
    found = judge(id, changed(id, **others))
    assert found.verdict is verdict
    assert found.figure == pytest.approx(figure, rel=1e-2, abs=1e-12)


def test_every_row_was_judged_by_figures_that_lead_elsewhere():
    for id in NAMES:
        assert len({verdict for name, _, _, verdict in BY_HAND if name == id}) > 1


def test_softmax_in_blocks_gives_each_block_a_whole_one():
    found = measured("B1")
    assert found["sums"] == pytest.approx([1, 2, 4, 8])
    assert found["averaged"][1:] == pytest.approx([0.1217, 0.2781, 0.3763], abs=1e-4)
    assert max(found["online"]) < 1e-14


def test_bytes_in_tiles_follow_the_formula():
    found = measured("B2")
    for n, tiled, full in zip(found["lengths"], found["tiled"], found["materialised"], strict=True):
        tiles = n // 128  # tile i reads the keys and values of i tiles, and two rows of 64 for each query
        assert tiled == 2 * 64 * (2 * n + 2 * 128 * tiles * (tiles + 1) // 2)
        assert full == 2 * (4 * n * 64 + 4 * n * n)
    assert found["extra_tiled"][0] == found["extra_tiled"][1]
    assert found["extra_materialised"][1] > 3.8 * found["extra_materialised"][0]


def test_pairs_of_a_query_and_a_key_follow_the_formula():
    found = measured("B7")
    for i, n in enumerate(found["lengths"]):
        square, cube = n * (n + 1) // 2, n * (n + 1) * (n + 2) // 6
        assert (found["cached_step"][i], found["cached_whole"][i], found["cached_rows"][i]) == (n, square, n)
        assert (found["naive_step"][i], found["naive_whole"][i], found["naive_rows"][i]) == (square, cube, square)


def test_a_decode_step_reads_the_cache_either_way():
    found = measured("B14")["decode"]
    assert found["Llama-3.1-8B"] == pytest.approx(1 + 4 * 32 * 4096 / (2 * 8 * 128 * 4096 + 2 * 32 * 128))
    assert found["Llama-2-7B"] == pytest.approx(1 + 4 * 32 * 4096 / (2 * 32 * 128 * 4096 + 2 * 32 * 128))


def test_steps_of_a_worked_example():
    outputs = [3, 1, 1, 2]  # all there at the start, two places
    assert b_loops.count_steps(outputs, 0, Dynamic(timeout=9), places=2) == {"joined": 0, "wait": 2.5, "steps": 5}
    assert b_loops.count_steps(outputs, 0, Continuous(), places=2) == {"joined": 2, "wait": 1.75, "steps": 4}


def test_collecting_ends_with_the_timeout():
    assert b_loops.count_steps([1, 1], 3, Dynamic(timeout=1), places=8)["wait"] == 2  # one step of waiting each


def test_a_sketch_without_slips_follows_the_model_and_one_that_accepts_all_does_not():
    assert measured("B4")["none"]["distance"] < 1e-12
    broken = mutant(b_guessing, "min(1.0, float(p[guess] / q[guess]))", "1.0")
    assert broken.all_ways_through(set())["distance"] > 0.05


def test_only_the_draft_context_is_a_harmless_slip_and_costs_tokens():
    one, none = measured("B4")["one"], measured("B4")["none"]
    assert {slip: found["distance"] < 1e-12 for slip, found in one.items()} == {
        b_guessing.ROWS: False, b_guessing.SCALAR: False, b_guessing.BONUS: False,
        b_guessing.DRAFT: True,
    }  # fmt: skip
    assert one[b_guessing.DRAFT]["tokens"] < none["tokens"]
    assert b_guessing.DRAFT in judge("B4", measured("B4")).condition.split("only cost")[1]


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("residual", lambda p, q: p), ("judge", lambda writer, logits, guess, q: (guess, True))],
)
def test_a_package_with_a_mistake_is_not_lossless(monkeypatch, name, mistake):
    monkeypatch.setattr(speculative, name, mistake)
    found = judge("B5", b_guessing.rounds_in_all_ways(SMALL))
    assert found.verdict is DOES_NOT and found.figure > 0.01


def test_the_rule_as_stated_on_a_worked_example():
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    assert b_guessing.rule_as_stated(p, q).tolist() == pytest.approx([0.5, 0.3, 0.2])
    broken = mutant(b_guessing, "torch.where(p >= q, 1.0, p / q)", "torch.where(p >= q, 1.0, q / p).clamp(max=1)")
    assert judge("B6", broken.rule_on_random_rows(SMALL)).verdict is DOES_NOT


def small_world() -> SimpleNamespace:
    return SimpleNamespace(quick=True, model=tiny_model(seed=0), story=SimpleNamespace(prompt=[3, 14, 15, 9, 2, 6]))


def test_greedy_texts_with_guesses_are_the_same_and_with_a_broken_judge_are_not(monkeypatch):
    assert judge("B8", b_loops.same_texts(small_world())).verdict is HOLDS_IF
    apart, tied = (judge("B8", {"greedy": {"float32": texts(9, m)}, "sampled": 0, "seeds": 3}) for m in (0.5, 0.0))
    assert "at least 0.5 apart" in apart.condition and "the two best are equal at some token" in tied.condition
    monkeypatch.setattr(speculative, "judge", lambda writer, logits, guess, q: (guess, True))
    assert judge("B8", b_loops.same_texts(small_world())).verdict is DOES_NOT


def test_logits_in_passes_choose_the_tokens_of_the_text():
    model, prompt = tiny_model(seed=0), [3, 14, 15]
    params = speculative.SamplingParams(temperature=0, max_tokens=7)
    text = b_loops.generate(model, None, prompt, params).tokens
    for rows in (1, 4):
        assert b_loops.logits_in_passes(model, prompt + text, 3, rows).argmax(-1).tolist() == text


def test_the_cost_of_quantization_is_that_of_the_stored_table():
    rows = {row["name"]: row for row in measured("B9")["rows"]}
    found = judge("B9", measured("B9"))
    assert found.figure == pytest.approx(100 * math.expm1(min(rows[n]["nats_above"] for n in rows if "8 bits" in n)))
    assert "awq, 4 bits, groups of 64" in found.condition and "12.7 %" in found.condition
    assert "5 of 7" in found.condition


def test_a_grid_along_an_axis_shares_scales_along_it():
    channels = torch.linspace(-3, 7, 64).repeat(32, 1)[:, None]  # [tokens, one head, channels], equal for all tokens
    assert b_kv_axes.apart(b_kv_axes.on_grid(channels, "channel"), channels) < 1e-3
    assert b_kv_axes.apart(b_kv_axes.on_grid(channels, "token"), channels) > 0.1
    tokens = torch.linspace(-3, 7, 32)[:, None, None].expand(32, 1, 64)
    assert b_kv_axes.apart(b_kv_axes.on_grid(tokens, "token"), tokens) < 1e-3
    assert b_kv_axes.apart(b_kv_axes.on_grid(tokens, "channel"), tokens) > 0.1


def test_the_rotation_is_undone():
    """In the first layer the keys of one token are the same everywhere, before their rotation and only then."""
    model = tiny_model(config=replace(TINY, head_dim=16), dtype=torch.float32)
    layers = b_kv_axes.layers_on_grid(model, [5] * 32)
    assert layers["K before by channel"][0] < 1e-3 < 0.01 < layers["K by channel"][0]


def test_an_outlier_is_seen():
    x = torch.ones(8, 1, 16)
    x[:, 0, 3] = 5
    assert b_kv_axes.outlier(x) == 5


def test_the_sketches_do_harm_only_by_their_slips(monkeypatch):
    found = measured("B11")
    assert found["right"] < 1e-12 and found["keys only"] == "RuntimeError"
    assert found["written"] == 1 + (12 - 9)  # the prompt's nine tokens leave three slots of three blocks
    assert b_caches.second_owner(b_caches.BlockPool) == b_caches.second_owner(b_caches.BlockPool)
    assert judge("B11", found).figure == 5


def test_masks_hide_padding_and_nothing_else():
    found = measured("B13")
    assert found["neighbour, no mask"] == found["neighbour, mask"] == found["padding, mask"] == 0
    assert found["padding, no mask"] > 0.1 and found["flat, lengths unknown"] > 0.1
    assert found["flat, lengths known"] < 1e-12


def test_codes_of_the_textbook_by_hand():
    assert [b_quantization.code_of(w, -1, 1, 4)[0] for w in (-1, 0, 1)] == [0, 8, 16]
    assert [b_quantization.code_of(w, -1, 2, 4)[0] for w in (-1, 0, 2)] == [0, 5, 15]
    assert measured("B15")["read"] == pytest.approx(-8 * 2 / 15)


def test_a_backward_pass_would_be_counted(monkeypatch):
    assert measured("B16")["backward"] == {"awq": 0, "gptq": 0}
    real = b_quantization.gptq

    def learned(*args):
        torch.autograd.backward(None)
        return real(*args)

    monkeypatch.setattr(b_quantization, "gptq", learned)
    assert b_quantization.clock(SMALL)["backward"] == {"awq": 0, "gptq": 4}  # two sizes, each warmed up once
