"""The benchmark: its checks can fail, its arithmetic is the roofline's, and without a GPU it says so.

What needs a GPU is run here with the clock replaced: peers compute on the CPU, and the shares are those of the clock.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

import torch

from kernels import bench, flash_attention, paged_attention, rmsnorm, store_kv, w4a16
from kernels.bench import CHECKS, TIMED, equal
from kernels.cases import W4A16, Attention, RMSNorm, StoreKV
from minillm.lab.catalogue import GPUS


def wrong(function, change):
    """The same function, and one number of its result is off."""

    def call(*args):
        out = function(*args)
        change(out[0] if isinstance(out, tuple) else out)
        return out

    return call


def one_number_off(out):
    out.view(-1)[-1] += 0.1


def test_the_checks_cover_every_kernel_and_pass_in_the_interpreter():
    assert {case.kernel for case in CHECKS} == {case.kernel for case in TIMED}
    rows = bench.check("cpu", [torch.float32])
    assert [row[0] for row in rows] == [case.kernel for case in CHECKS]
    assert all(float(row[3]) <= 1e-5 for row in rows)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (rmsnorm, "rmsnorm"),
        (flash_attention, "flash_attention"),
        (paged_attention, "paged_attention"),
        (w4a16, "linear"),
    ],
)
def test_a_kernel_that_is_wrong_in_one_number_fails_its_check(module, name, monkeypatch):
    monkeypatch.setattr(module, name, wrong(getattr(module, name), one_number_off))
    with pytest.raises(RuntimeError, match=rf"{module.__name__.removeprefix('kernels.')}, .*off by"):
        bench.check("cpu", [torch.float32])


@pytest.mark.parametrize("slot", ["the last one", "one that is nobody's"])
def test_a_store_that_writes_a_wrong_slot_fails_its_check(slot, monkeypatch):
    real = store_kv.store_kv

    def store(k, v, keys, values, slots):
        real(k, v, keys, values, slots)
        free = set(range(keys.shape[0] * keys.shape[2])) - set(slots.tolist())
        at = slots[-1].item() if slot == "the last one" else min(free)
        values[at // keys.shape[2], 0, at % keys.shape[2], 0] += 1

    monkeypatch.setattr(store_kv, "store_kv", store)
    with pytest.raises(RuntimeError, match=r"store_kv, .*off by"):
        bench.check("cpu", [torch.float32])


def test_a_result_that_is_not_a_number_fails_its_check(monkeypatch):
    monkeypatch.setattr(rmsnorm, "rmsnorm", wrong(rmsnorm.rmsnorm, lambda out: out.fill_(torch.nan)))
    with pytest.raises(RuntimeError, match="off by nan"):
        bench.check("cpu", [torch.float32])


def test_limits_are_those_of_the_catalogue():
    for short, limits in bench.PUBLISHED.items():
        (gpu,) = (gpu for name, gpu in GPUS.items() if name.startswith(short))
        assert (limits.bytes_per_s, limits.flops) == (gpu.bandwidth, gpu.flops)


def test_predicted_times_are_the_longer_of_bytes_and_arithmetic():
    limits = bench.Limits("a card", 1e12, 1e14)
    norm = RMSNorm(1000, 500)
    assert limits.seconds(norm) == pytest.approx((2 * 1000 * 500 + 500) * 2 / 1e12)
    prefill = equal(2, 300, 300, 8, 2, 64)
    assert limits.seconds(prefill) == pytest.approx(2 * (4 * 8 * 64 * 300 * 301 / 2) / 1e14)
    decode = equal(3, 1, 1000, 8, 2, 64, decode=True)
    assert limits.seconds(W4A16(2, 300, 640, 64)) == pytest.approx((300 * (320 + 10 * 4) + 2 * 2 * (640 + 300)) / 1e12)
    assert limits.seconds(decode) == pytest.approx(2 * 64 * (2 * 2 * 3000 + 2 * 8 * 3) / 1e12)


def test_without_a_gpu_it_says_so_and_predicts(capsys, tmp_path):
    file = tmp_path / "result.json"
    assert bench.main(["--json", str(file), "--gpu", "A100"]) == 0
    printed = capsys.readouterr().out
    assert "Nothing was timed" in printed and "published limits of A100" in printed
    written = json.loads(file.read_text())
    assert written["gpu"] is None and written["predicted_for"]["name"] == "A100"
    assert len(written["predictions"]) == len(TIMED)


def test_a_folder_that_is_not_there_is_met_at_the_door(capsys, tmp_path):
    with pytest.raises(SystemExit):
        bench.main(["--json", str(tmp_path / "nowhere" / "result.json")])
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["--json", str(tmp_path)])
    assert "is a folder" in capsys.readouterr().err


SMALL = (
    RMSNorm(4, 64, residual=True),
    StoreKV(6, 2, 32),
    equal(2, 40, 40, 4, 4, 32),
    equal(2, 5, 40, 4, 4, 32),
    equal(3, 1, 50, 4, 4, 32, decode=True),
    equal(2, 3, 50, 8, 2, 32, decode=True),
    W4A16(1, 20, 64, 32),
    W4A16(5, 20, 64, 64, bias=True),
)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_peer_computes_the_same(case):
    built = case.build("cpu", torch.float32)
    expected = built.reference().double()
    assert (built.ours().double() - expected).abs().max() <= 1e-5
    met = 0
    for run in built.peers.values():
        try:
            out = run()
        except RuntimeError:  # a backend for GPUs
            continue
        met += 1
        assert (out.double() - expected).abs().max() <= 1e-5
    assert met or isinstance(case, Attention)  # PyTorch has no fused backend for grouped heads on a CPU


def test_some_peer_of_attention_runs_here():
    built = equal(2, 40, 40, 4, 4, 32).build("cpu", torch.float32)
    assert (built.peers["SDPA flash_attention"]().double() - built.reference()).abs().max() <= 1e-5


def test_ragged_requests_have_no_peer():
    assert not Attention((1, 2), (3, 4), 2, 2, 32).build("cpu", torch.float32).peers


def test_the_best_peer_and_the_shares_are_those_of_the_clock(monkeypatch):
    case = RMSNorm(4, 64)
    built = case.build("cpu", torch.float32)

    def unable():
        raise RuntimeError("No available kernel")

    peers = {"slow": lambda: "slow", "quick": lambda: "quick", "unable": unable}
    monkeypatch.setattr(RMSNorm, "build", lambda *_: type(built)(lambda: "ours", built.reference, peers))
    seconds = {"ours": 2e-6, "slow": 5e-6, "quick": 3e-6}
    monkeypatch.setattr(bench, "measure", lambda run: (seconds[run()], 1e-6, 9e-6))
    limits = bench.Limits("a card", 1e9, 1e9)
    result = bench.time_case(case, limits, "cpu")
    assert (result.best, result.best_seconds, result.spread) == ("quick", 3e-6, (1e-6, 9e-6))
    assert result.bandwidth_share == pytest.approx(2 * (2 * 4 * 64 + 64) / 2e-6 / 1e9)
    assert result.matmul_share == pytest.approx(4 * 4 * 64 / 2e-6 / 1e9)
    line = bench.table([result]).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")][-3:] == ["quick", "3", "1.50"]
