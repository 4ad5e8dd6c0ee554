"""The ledger's rows on speed: each runs in quick mode, and other figures give another verdict.

No test looks at a measured time. Figures by hand go through the judges; what arithmetic contributes is compared with
numbers that were computed in another way.
"""

from __future__ import annotations

import json
from math import isclose

import numpy as np
import pytest
import torch

from minillm.lab.catalogue import MODELS
from minillm.lab.claims import c_quantization
from minillm.lab.claims.c_guessing import gpu_round, overlap, rate
from minillm.lab.claims.c_paging import gpu_gains
from minillm.lab.claims.c_phases import A100, H100, first_compute_bound, gpu_passes, output_beyond
from minillm.lab.claims.c_serving import log_normal
from minillm.lab.claims.c_step_parts import cut_up, gain_at_most
from minillm.lab.claims.ledger import Finding, Verdict
from minillm.lab.claims.passes import shares
from minillm.lab.claims.run import all_claims
from minillm.lab.claims.workbench import Workbench
from minillm.lab.kv_memory import Run, Slots, Text
from minillm.linear import Linear

HOLDS, HOLDS_IF, NOT = Verdict.HOLDS, Verdict.HOLDS_IF, Verdict.DOES_NOT_HOLD
UNTESTABLE = Verdict.NOT_TESTABLE
IDS = [f"C{i}" for i in range(1, 23)]


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return Workbench(quick=True)


def judge(id: str, figures: dict) -> Finding:
    return all_claims()[id].judge(figures)


def test_all_rows_on_speed_are_in_the_ledger():
    assert [id for id in all_claims() if id.startswith("C")] == IDS
    assert [id for id in IDS if all_claims()[id].measure is None] == ["C15"]


@pytest.mark.parametrize("id", [id for id in IDS if id != "C15"])
def test_every_row_gives_a_finding_with_a_figure_and_judges_stored_figures_alike(id, bench):
    claim = all_claims()[id]
    figures = claim.measure(bench)
    finding = claim.judge(figures)
    assert finding.figure is not None and "nan" not in finding.condition
    assert claim.judge(json.loads(json.dumps(figures, allow_nan=False))) == finding


def phases(prefill=((4, 0.04), (64, 0.13), (2048, 10.0)), decode=((64, 0.03), (4096, 0.045)), flops=1.2e11, width=2e10):
    return {"prefill": prefill, "decode": decode, "flops": flops, "bandwidth": width}


def times(slow: float, **changes) -> dict:
    """The usual phases on a machine that takes `slow` times as long."""
    usual = phases(**changes)
    return usual | {name: [[n, slow * s] for n, s in usual[name]] for name in ("prefill", "decode")}


LONG_ONLY = {"prefill": ((64, 0.13), (256, 0.6), (2048, 10.0))}
LINES = {"drafter": "n-gram", "workload": "copying", "temperature": 0.0, "batch": 1, "new_tokens": 24}


def line(speedup: float, acceptance: float = 0.9, tokens: float = 3.0, **changes) -> dict:
    return {**LINES, "speedup": speedup, "acceptance": acceptance, "tokens_per_round": tokens, **changes}


def chunks(worst: float) -> dict:
    whole = {"worst": 4.0, "median": 0.05, "ttft": 4.0, "total": 6.0}
    return {"whole": whole, "chunks": whole | {"worst": worst, "ttft": 5.0}, "long": 1500, "budget": 256}


def prefix(second: float, cached: int, changed: int) -> dict:
    found = {name: {"ttft": s, "cached": n} for name, s, n in (("second", second, cached), ("changed", 4.0, changed))}
    return {"shared": 2000, "own": 48, "first": {"ttft": 4.0, "cached": 0}, **found}


def waste(maximum: float, true: float, blocks: float) -> dict:
    return {"chat": {"maximum": maximum, "true length": true, "blocks": blocks}}


def budget(blocks: float, gpu: float) -> dict:
    rates = {"reserved": 30.0, "blocks": 30.0 * blocks, "joining": 90.0}
    return {"rates": rates, "texts a step": {"reserved": 2.0, "blocks": 5.0}, "gpu": {"a GPU": gpu}}


def bits(four: float, cost: float, half: float = 0.03) -> dict:
    decode = {"float32": 0.03, "bfloat16": half, "4 bits": four}
    costs = [["awq", 64, cost], ["rtn", 32, 0.0]]  # the second is the file's own grid
    return {"decode": decode, "prefill": decode, "length": 256, "costs": costs}


def by_batch(*gains: float) -> dict:
    return {
        "rows": [
            [n, {"float32": 1.3, "bfloat16": gain, "4 bits": 1.0}] for n, gain in zip((1, 16, 64), gains, strict=True)
        ]
    }


def twins(gains=(0.01, 0.42), three=0.0, one=0.07, noise=0.01) -> dict:
    return {"gains": [[256, 1, gain] for gain in gains], "three": three, "one": one, "noise": noise}


def guesses(prose: int, code: int, mathematics: int, of: int = 100) -> dict:
    kinds = {"prose": prose, "code": code, "mathematics": mathematics, "copying": of}
    return {"n-gram": {kind: [right, of] for kind, right in kinds.items()}}


PARTS = {"tokenize 64 tokens": 6e-5, "tokenize 2,048 tokens": 9e-4, "sample, top-p": 9e-4, "decode step": 0.03}
BY_HAND = [
    ("C1", phases(), HOLDS_IF),
    ("C1", phases(**LONG_ONLY), HOLDS),  # no short prompt among those that were measured
    ("C1", times(10), UNTESTABLE),  # neither limit is near
    ("C1", phases(flops=4e9), NOT),  # a ridge below the intensity of decode
    ("C2", phases(), HOLDS_IF),
    ("C2", times(1, prefill=((4, 1e-4), (2048, 1e-3))), HOLDS),
    ("C2", times(1, prefill=((4, 1e3), (2048, 1e4))), NOT),
    ("C3", waste(0.75, 0.4, 0.02), HOLDS_IF),
    ("C3", waste(0.75, 0.61, 0.02), HOLDS),
    ("C3", waste(0.75, 0.4, 0.09), NOT),
    ("C3", waste(0.9, 0.4, 0.02), NOT),
    ("C4", budget(2.5, gpu=1.2), HOLDS_IF),
    ("C4", budget(2.5, gpu=3.0), HOLDS),
    ("C4", budget(1.1, gpu=1.2), NOT),
    ("C5", {"rows": [[8, 0, 1.0, 1.0, 1.0], [8, 0.3, 1.5, 0.6, 0.95], [8, 2, 3.0, 0.3, 0.9]]}, HOLDS_IF),
    ("C5", {"rows": [[8, 2, 3.0, 0.3, 0.9], [32, 2, 4.0, 0.3, 0.9], [8, 0.3, 1.5, 0.3, 0.9]]}, HOLDS),
    ("C5", {"rows": [[8, 0, 1.0, 1.0, 1.0], [8, 2, 3.0, 0.3, 0.9]]}, NOT),  # nowhere 40 to 60 % more
    ("C6", {"times": [[256, 1.6, 1.0], [4096, 7.0, 1.0]]}, HOLDS_IF),
    ("C6", {"times": [[256, 2.5, 1.0], [4096, 4.0, 1.0]]}, HOLDS),
    ("C6", {"times": [[256, 4.0, 1.0], [4096, 2.5, 1.0]]}, HOLDS_IF),  # less on long sequences
    ("C6", {"times": [[256, 1.0, 1.0], [4096, 1.2, 1.0]]}, UNTESTABLE),
    ("C7", {"lines": [line(3.0), line(0.9, 0.3, 1.2)], "round": 1.2}, HOLDS_IF),
    ("C7", {"lines": [line(3.0), line(1.6, 0.8)], "round": 1.2}, HOLDS),
    ("C7", {"lines": [line(3.0), line(1.6, 0.3)], "round": 1.2}, HOLDS_IF),  # few accepted, and not slower
    ("C7", {"lines": [line(1.1, 0.6, 1.3), line(0.8, 0.3, 1.1)], "round": 1.2}, NOT),
    ("C8", {"lines": [line(3.0), line(0.8, workload="prose")]}, HOLDS_IF),
    ("C8", {"lines": [line(3.0), line(1.2, temperature=0.7), line(0.9, batch=8)]}, HOLDS),
    ("C8", {"lines": [line(3.0), line(1.2, batch=8)]}, HOLDS_IF),  # pays beyond the stated batch too
    ("C8", {"lines": [line(0.9), line(1.2, temperature=1.0)]}, NOT),
    ("C9", guesses(50, code=20, mathematics=20), HOLDS),
    ("C9", guesses(50, code=20, mathematics=50), HOLDS_IF),
    ("C9", guesses(50, code=80, mathematics=50), NOT),
    ("C9", guesses(50, code=52, mathematics=48), UNTESTABLE),
    ("C9", guesses(1, code=0, mathematics=0, of=2), UNTESTABLE),  # too few guesses
    ("C10", bits(0.012, cost=2.0), HOLDS),
    ("C10", bits(0.025, cost=2.0), HOLDS_IF),
    ("C10", bits(0.012, cost=12.0), NOT),  # and the file's own grid does not save it
    ("C10", bits(0.05, cost=2.0), HOLDS_IF),  # on an A100 alone
    ("C11", by_batch(2.1, 1.3, 1.0), NOT),
    ("C11", by_batch(1.2, 1.3, 1.4), NOT),
    ("C11", by_batch(0.8, 1.1, 1.5), HOLDS_IF),
    ("C11", by_batch(0.8, 0.7, 0.6), NOT),
    ("C12", twins(), HOLDS_IF),
    ("C12", twins(gains=(0.3, 0.35)), HOLDS),
    ("C12", twins(gains=(0.01, 0.1)), NOT),
    ("C12", twins(three=0.2), NOT),
    ("C12", twins(noise=0.1), UNTESTABLE),
    ("C13", chunks(worst=0.6), HOLDS_IF),
    ("C13", chunks(worst=0.08), HOLDS),
    ("C13", chunks(worst=3.0), NOT),
    ("C14", prefix(0.3, cached=2000, changed=0), HOLDS_IF),
    ("C14", prefix(0.3, cached=2000, changed=2000), HOLDS),
    ("C14", prefix(0.3, cached=0, changed=0), NOT),
    ("C14", prefix(3.9, cached=2000, changed=0), NOT),
    ("C16", phases() | {"four": [[2, 1.3], [512, 4.0]]}, HOLDS_IF),
    ("C16", phases(((64, 1.0), (256, 4.0)), ((64, 1.0), (4096, 1.1))) | {"four": [[64, 4.0]]}, HOLDS),
    ("C16", phases(((64, 1.0), (256, 4.0)), ((64, 1.0), (4096, 2.0))) | {"four": [[64, 4.0]]}, HOLDS_IF),
    ("C16", phases(((4, 1.0), (16, 1.1)), ((16, 1.0), (64, 1.0))) | {"four": [[2, 1.2]]}, NOT),
    ("C17", phases(), HOLDS_IF),
    ("C17", times(10), UNTESTABLE),
    ("C17", times(0.6), UNTESTABLE),  # more than 60 %
    ("C17", phases(prefill=((64, 0.22), (2048, 5.0))), UNTESTABLE),  # 52 %, but only 4 times the ridge
    ("C18", PARTS | {"sample, top-p": 6e-3}, HOLDS_IF),
    ("C18", PARTS, HOLDS),
    ("C18", dict.fromkeys(PARTS, 0.002), NOT),
    ("C19", {"rows": [[4, 0.03, 0.03, 2.0], [512, 1.0, 1.0, 3.0]], "n": 64}, HOLDS_IF),
    ("C19", {"rows": [[4, 0.03, 0.03, 2.0], [512, 0.09, 1.0, 3.0]], "n": 64}, HOLDS),
    ("C19", {"rows": [[4, 0.3, 0.3, 2.0], [512, 1.0, 1.0, 3.0]], "n": 64}, UNTESTABLE),
    ("C20", {"steps": [[64, 1.0, 1.05], [1024, 1.0, 1.0]], "n": 24}, HOLDS),
    ("C20", {"steps": [[64, 1.0, 1.05], [1024, 1.0, 1.3]], "n": 24}, HOLDS_IF),
    ("C20", {"steps": [[64, 1.0, 1.05], [1024, 1.0, 2.0]], "n": 24}, NOT),
    ("C20", {"steps": [[64, 1.0, 0.7]], "n": 24}, NOT),  # paging would gain much
    ("C21", {"kl": [0.3, *[0.1] * 28, 0.4], "tokens": 256}, HOLDS),
    ("C21", {"kl": [0.01, *[0.1] * 28, 0.4], "tokens": 256}, HOLDS_IF),
    ("C21", {"kl": [0.01, *[0.1] * 28, 0.02], "tokens": 256}, NOT),
    ("C22", {"products": [[1, 1.0, 1.1], [64, 1.0, 1.0]], "launches": [60, 150], "step": 3.0}, HOLDS_IF),
    ("C22", {"products": [[1, 1.0, 1.1], [64, 1.0, 1.1]], "launches": [60, 150], "step": 3.0}, HOLDS),
    ("C22", {"products": [[1, 1.0, 1.0], [64, 1.0, 1.01]], "launches": [60, 150], "step": 3.0}, NOT),
]


@pytest.mark.parametrize(("id", "figures", "verdict"), BY_HAND)
def test_the_verdict_follows_from_the_figures(id, figures, verdict):
    assert judge(id, figures).verdict is verdict


def test_each_measured_row_has_figures_by_hand_for_more_than_one_verdict():
    for id in IDS:
        if id != "C15":
            assert len({verdict for row, _, verdict in BY_HAND if row == id}) > 1, id


def test_a_line_is_slower_only_beyond_noise():
    few = [line(3.0), line(0.96, 0.3, 1.1), line(0.94, 0.3, 1.1)]
    finding = judge("C7", {"lines": few, "round": 1.2})
    assert "1 of the 2 with less than half accepted were slower by more than the 5%" in finding.condition
    assert "one run of 24 tokens of one text" in finding.condition
    quick_only = {"drafter": "trained", "tokens": 3.0}
    assert "0 of the 1" in judge("C7", {"lines": [line(3.0), line(0.96, 0.3, **quick_only)], "round": 1.2}).condition


def test_what_is_near_the_threshold_is_called_borderline():
    def steps(*blocks: float) -> dict:
        return {"steps": [[64, 1.0, each] for each in blocks], "n": 24}

    def products(apart: float) -> dict:
        return {"products": [[1, 1.0, apart]], "launches": [60, 150], "step": 3.0}

    near = [judge("C20", steps(1.09)), judge("C22", products(1.04)), judge("C1", phases(decode=((64, 0.064),)))]
    assert all("Borderline, within 10% of the threshold of" in finding.condition for finding in near)
    far = [judge("C20", steps(2.0)), judge("C22", products(1.28)), judge("C1", times(10))]
    assert not any("Borderline" in finding.condition for finding in far)
    assert "the threshold of 1.1: the dearest (1.09)" in near[0].condition


def test_the_limits_of_the_machine_are_printed_where_shares_of_them_are():
    for id in ("C1", "C17"):
        assert "120 GFLOP/s and 20 GB/s" in judge(id, phases()).condition


def test_fewer_accepted_guesses_are_called_fewer():
    fewer, more = judge("C9", guesses(50, code=20, mathematics=20)), judge("C9", guesses(50, code=80, mathematics=50))
    assert (fewer.figure, more.figure) == (pytest.approx(30), pytest.approx(30))
    assert fewer.unit.startswith("percentage points fewer") and more.unit.startswith("percentage points more")
    assert "100 to 100 guesses" in fewer.condition


def test_the_figure_of_4_bits_is_the_one_that_decides():
    assert judge("C10", bits(0.012, cost=2.0)).figure == pytest.approx(2.5)
    dear = judge("C10", bits(0.012, cost=12.0, half=0.04))
    assert dear.figure == 12 and "% more perplexity" in dear.unit
    assert (
        "slower than float32: a poor stand-in (ms a step: float32 30.0, bfloat16 40.0, 4 bits 12.0)" in dear.condition
    )
    assert "no faster than float32: a poor stand-in" in judge("C10", bits(0.012, cost=2.0)).condition
    assert "stand-in" not in judge("C10", bits(0.008, cost=2.0, half=0.02)).condition


def test_two_rows_on_4_bits_share_one_measurement(bench):
    assert c_quantization.four_bits(bench)["decode"] == c_quantization.by_batch(bench)["rows"][0][1]


def test_what_takes_less_time_is_not_called_a_price():
    dearer = chunks(worst=0.6)
    dearer["chunks"]["total"] = 6.6
    assert "price here: 1.25 times the long prompt's TTFT, 1.10 times the time" in judge("C13", dearer).condition
    cheaper = chunks(worst=0.6)
    cheaper["chunks"]["total"] = 5.4
    condition = judge("C13", cheaper).condition
    assert "price here: 1.25 times the long prompt's TTFT. No price: 0.90 times the time in all." in condition


def test_long_pasts_change_what_speculation_and_4_bits_gain():
    weights, kv, past = 2 * 7.505e9, 131072, 2000  # of an 8B model: bytes of its matrices, of a token's keys and values
    plain = (weights + 256 * (past + 2) * kv) / 2.039e12
    check = 256 * 4 * (weights + 4 * 32 * 4096 * (past + 2.5)) / 312e12
    assert gpu_round(256, past) == pytest.approx(max(check, plain) / plain, rel=5e-3)
    gain = 1 + 0.7 + 0.49 + 0.343
    condition = judge("C8", {"lines": [line(3.0), line(0.8, workload="prose")]}).condition
    assert f"{gain / gpu_round(256, past):.2f} times on 2,000 tokens of past" in condition
    assert gain / gpu_round(256) < 1 < gain / gpu_round(256, past)
    read = (6.979e9 * 4.25 + 0.525e9 * 16) / 8
    cache = 64 * (past + 2) * kv
    assert c_quantization.gain_on_gpu(A100, 1, past, 64) == pytest.approx((weights + cache) / (read + cache), rel=2e-3)


def test_the_shares_of_a_decode_step_are_its_bytes_and_flop_over_the_limits():
    parameters, cache = 134_479_872, 30 * 2 * 3 * 64  # matrices with the head; numbers a token
    flops = 2 * parameters + 4 * 30 * 9 * 64 * 65
    read = 4 * (parameters + 66 * cache)
    assert shares(phases(), 1, 64, 0.03) == pytest.approx((flops / 0.03 / 1.2e11, read / 0.03 / 2e10), rel=1e-3)


def test_decode_passes_a_share_where_its_steps_outweigh_the_prefill():
    assert output_beyond(0.9, 1.0, np.full(200, 0.1)) == 92  # 90 steps of 0.1 are 9 s, not more than nine tenths
    assert output_beyond(0.9, 1.0, np.full(10, 0.1)) is None
    weights = 2 * 7_504_924_672  # 8.03e9 parameters without the embedding
    assert gpu_passes(1, 2, 1)[1] == pytest.approx(weights / 3.35e12, rel=1e-3)


def test_the_knee_of_a_batch_is_where_its_flop_take_as_long_as_its_bytes():
    finding = all_claims()["C15"].judge()
    room = 80e9 - 2 * 8.03e9
    assert finding.figure == int(room / (4096 * 131072)) == 119 and finding.verdict is HOLDS_IF
    assert "185 of 128 tokens" in finding.condition and "442 of 128 tokens" in finding.condition
    batch = first_compute_bound(A100, 128, 1000)
    flops, weights = 2 * 7.505e9 + 4 * 32 * 32 * 128 * 129, 2 * 7.505e9
    longer = [n * flops / 312e12 >= (weights + n * 131072 * 130) / 2.039e12 for n in (batch - 1, batch)]
    assert longer == [False, True]
    assert first_compute_bound(H100, 4096, 1000) is None


def test_attention_in_tiles_gains_what_its_bytes_and_flop_allow():
    n, heads, width = 8192, 32, 128
    matrix = 2 * (4 * n * heads * width + 4 * heads * n * n) / 2.039e12
    moved = sum(2 * (2 * 128 * heads * width + 2 * (i + 1) * 128 * heads * width) for i in range(n // 128))
    assert gain_at_most(MODELS["Llama-2-7B"], n, A100) == pytest.approx(matrix / (moved / 2.039e12), rel=1e-6)
    assert 3.5 < gain_at_most(MODELS["Llama-2-7B"], n, A100) < 4


def test_a_layer_cut_up_gives_the_same_products():
    layer = Linear(6, 10)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(3, 6)
    parts = cut_up(layer, [5, 3, 2])
    assert torch.allclose(torch.cat([part(x) for part in parts], -1), layer(x), rtol=0, atol=1e-6)
    assert all(part.weight.data_ptr() >= layer.weight.data_ptr() for part in parts)  # views: no second copy


def test_more_texts_gain_by_the_weights_that_they_share():
    text = Text(100, 101)
    run = Run([text], [], [[(0, 100, 112)], [(0, 300, 304)]], 0)
    assert run.over_time() == Slots(416, 400)  # 208 slots and 200 tokens a text
    free = 80e9 - 2 * 6.738e9
    few, many = (int(free / (524288 * slots)) for slots in (2048, 208))
    seconds = [max((2 * 6.607e9 + n * 524288 * 202) / 2.039e12, 0) for n in (few, many)]
    expected = many / seconds[1] / (few / seconds[0])
    assert gpu_gains(run)["Llama-2-7B on A100 80GB SXM"] == pytest.approx(expected, rel=2e-3)


def test_lengths_keep_their_mean_and_spread():
    lengths = torch.tensor(log_normal(20000, 100, 0.5), dtype=torch.float64)
    assert isclose(lengths.mean(), 100, rel_tol=0.02) and isclose(lengths.std() / lengths.mean(), 0.5, rel_tol=0.05)
    assert set(log_normal(5, 10, 0)) == {10}


def test_a_check_is_free_on_a_gpu_until_the_batch_reaches_the_ridge():
    assert isclose(gpu_round(), 1, rel_tol=1e-2)
    assert gpu_round(512) > 3


def test_the_overlap_is_exact_and_can_grow_with_the_temperature():
    p, q = (torch.tensor(x).softmax(0) for x in ([2.0, 1.0, 0.0], [1.0, 2.0, 0.0]))
    assert overlap(1) == pytest.approx(float(1 - (p - q).abs().sum() / 2))
    assert overlap(0.3) < overlap(1) < overlap(5)


def test_the_error_of_a_share_shrinks_with_the_guesses():
    assert rate(0, 0) == (0.5, pytest.approx(0.5**1.5))
    assert rate(50, 100)[0] == 0.5 and rate(50, 100)[1] < rate(5, 10)[1]


def test_4_bits_gain_where_weights_are_what_is_read():
    layers, head = 6.979e9, 0.525e9
    read = (layers * 4.25 + head * 16) / 8
    assert c_quantization.gain_on_gpu(A100, 1, 0) == pytest.approx(2 * (layers + head) / read, rel=1e-3)
    assert c_quantization.gain_on_gpu(A100, 2048, 0) == 1


def test_the_cost_of_4_bits_is_the_stored_runs(bench):
    costs = {(method, group): cost for method, group, cost in c_quantization.stored_costs()}
    assert costs["awq", 64] == pytest.approx(100 * (15.8185 / 14.0410 - 1), abs=0.05)
    assert abs(costs["rtn", 32]) < 0.1


def test_grouped_queries_gain_by_the_cache_that_they_save():
    figures = c_quantization.heads_and_twins(Workbench(quick=True))
    gains = {(context, batch): gain for context, batch, gain in figures["gains"]}
    weights, row = 2 * 6.607e9, 524288
    all_heads, eight = weights + 16 * 1026 * row, weights + 16 * 1026 * row / 4
    assert gains[1024, 16] == pytest.approx(all_heads / eight - 1, rel=2e-3)
    assert len(gains) == 13 and (4096, 64) not in gains  # 128 GiB of cache
    assert judge("C12", figures).figure == pytest.approx(100 * 0.3 / (1 - 1.3 / 4))
