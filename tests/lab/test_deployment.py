"""Memory, times and batches of a deployment, against arithmetic done by hand, and what must hold for every one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.lab.advice import demand as demand_module
from minillm.lab.advice.demand import Demand, Hardware, find_hardware, find_model
from minillm.lab.advice.deployment import GRIDS, deploy, largest
from minillm.lab.catalogue import GPUS, MODELS
from minillm.lab.roofline import Limits

# Llama-2-7B: 32 layers of 4 * 4096^2 + 3 * 4096 * 11008 weights, a head and an embedding of 32000 * 4096 each.
LAYERS, HEAD = 6_476_005_376, 131_072_000
KV = 524_288  # bytes a token: 2 * 32 * 4096 * 2
PAIR = Demand(1024, 257, concurrency=2)


@pytest.fixture
def llama():
    return deploy("Llama-2-7B", find_hardware("A100 80GB SXM"), PAIR)


def test_memory_by_hand(llama):
    """1,280 tokens are kept, which fill 80 blocks of 16; the model's context is 4,096."""
    assert llama.weights == 2 * (LAYERS + 2 * HEAD) == 13_476_298_752
    assert llama.kv_token == KV and llama.slots == 1280
    assert llama.memory(3) == 13_476_298_752 + 3 * 1280 * 524_288
    assert llama.fits == 99  # (80e9 - 13,476,298,752) / 671,088,640 = 99.13
    assert replace(llama, paged=False).fits == 30  # / 2,147,483,648 = 30.98


def test_a_last_block_is_counted_whole():
    one_more = deploy("Llama-2-7B", find_hardware("A100 80GB SXM"), replace(PAIR, output=258))
    assert one_more.slots == 1296


def test_times_by_hand(llama):
    """A step in the middle of the output has 1,024 + 127 tokens of past for each text."""
    read = 2 * (LAYERS + HEAD)
    one, two = ((read + b * (1151 + 2) * KV) / 2.039e12 for b in (1, 2))
    assert llama.middle == 1151
    assert [llama.step(1), llama.step(2)] == pytest.approx([one, two])
    flops = 2 * LAYERS * 1024 + 2 * HEAD + 4 * 32 * 4096 * 1024 * 1025 / 2
    prompt = flops / 312e12
    assert llama.prefill == pytest.approx(prompt)
    at = llama.estimate(2)
    assert at.ttft == pytest.approx(one + prompt)
    assert at.tpot == pytest.approx(two + prompt / 256)
    assert at.tokens_per_s == pytest.approx(2 * 257 / (2 * prompt + 256 * two))
    assert at.requests_per_s == pytest.approx(at.tokens_per_s / 257)
    assert at.bound == "memory"
    assert llama.estimate(1).ttft == llama.prefill


def test_a_request_lasts_as_long_as_the_throughput_says(llama):
    """Little's law: requests at a time = requests a second x seconds of a request, waiting for the step left out."""
    at = llama.estimate(16)
    assert at.requests_per_s * (llama.prefill + 256 * at.tpot) == pytest.approx(16)


def test_efficiency_scales_all_times(llama):
    half = deploy("Llama-2-7B", find_hardware("A100 80GB SXM", efficiency=0.5), PAIR)
    assert half.estimate(2).tpot == pytest.approx(2 * llama.estimate(2).tpot)
    assert half.prefill == pytest.approx(2 * llama.prefill)
    assert half.fits == llama.fits


@pytest.mark.parametrize(("bits", "of_a_weight"), [(4, 4.5), (8, 8.25), (16, 16)])
def test_fewer_bits_shrink_the_layers_and_not_the_head(llama, bits, of_a_weight):
    """4 bits in groups of 64 with scale and minimum in 16 bits: 4 + 32 / 64; 8 bits have the scale alone."""
    small = replace(llama, weight_bits=bits)
    assert small.weights == pytest.approx(LAYERS * of_a_weight / 8 + 2 * HEAD * 2)
    assert small.step_work(1).bytes == pytest.approx(LAYERS * of_a_weight / 8 + HEAD * 2 + 1153 * KV)


def test_the_groups_divide_the_rows_of_every_model():
    for config in MODELS.values():
        for n_in in (config.d_model, config.n_heads * config.head_dim, config.d_ff):
            assert [GRIDS[bits].bits_a_weight(n_in) for bits in (4, 8)] == [4.5, 8.25]


@pytest.mark.parametrize(("shared", "found"), [(0, 0), (15, 0), (16, 16), (1000, 992), (1023, 1008), (1024, 1008)])
def test_whole_blocks_are_found_and_never_the_last_token(llama, shared, found):
    sharing = replace(llama, demand=replace(PAIR, shared=shared))
    assert sharing.found == found
    assert sharing.memory(5) - sharing.weights == KV * (found + 5 * (1280 - found))
    assert replace(sharing, sharing=False).found == replace(sharing, paged=False).found == 0


def test_a_found_prefix_shortens_the_prompt_but_not_the_decode_step(llama):
    sharing = replace(llama, demand=replace(PAIR, shared=1008))
    flops = 2 * LAYERS * 16 + 2 * HEAD + 4 * 32 * 4096 * (16 * 1008 + 16 * 17 / 2)
    read = 2 * (LAYERS + HEAD) + KV * (1008 + 32)
    assert sharing.prefill == pytest.approx(max(flops / 312e12, read / 2.039e12))
    assert sharing.step(4) == llama.step(4)


def goals(ttft=None, tpot=None, **more):
    return deploy("Llama-2-7B", find_hardware("A100 80GB SXM"), Demand(1024, 257, ttft=ttft, tpot=tpot, **more))


def test_the_batch_ends_where_a_goal_ends(llama):
    for batch in (1, 7, 40):
        at, beyond = llama.estimate(batch), llama.estimate(batch + 1)
        for kept in ({"tpot": (at.tpot + beyond.tpot) / 2}, {"ttft": (at.ttft + beyond.ttft) / 2}):
            assert goals(**kept, concurrency=1000).batch == batch
    assert goals(tpot=1.0, concurrency=1000).batch == 99  # then memory ends it
    assert goals(tpot=1.0, concurrency=5).batch == 5


def test_goals_that_nothing_meets_do_not_end_the_batch(llama):
    late = goals(ttft=1e-6, concurrency=1000)
    assert (late.within_goals, late.batch) == (0, 99)


def test_a_rate_asks_for_the_smallest_batch_that_carries_it(llama):
    rates = [llama.estimate(b).requests_per_s for b in (6, 7)]
    assert goals(rate=sum(rates) / 2).batch == 7
    assert goals(rate=1e-6).batch == 1
    assert goals(rate=1e6).batch == 99 and goals(rate=1e6).short and not goals(rate=1e-6).short


def test_memory_is_short_when_not_all_fit():
    assert not goals(concurrency=99).short and goals(concurrency=100).short


def test_memory_is_not_short_where_the_goals_end_the_batch_first(llama):
    tpot = llama.estimate(40).tpot
    assert goals(tpot=tpot, concurrency=1000).batch == 40
    assert not goals(tpot=tpot, concurrency=1000).short and not goals(tpot=tpot, rate=1e6).short
    assert goals(tpot=1.0, concurrency=1000).short  # the goal allows more than fit
    assert goals(tpot=1e-6, concurrency=1000).short  # a goal that nothing meets ends no batch


@pytest.mark.parametrize(
    ("border", "limit", "found"), [(0, 9, 0), (1, 9, 1), (5, 9, 5), (9, 9, 9), (50, 9, 9), (3, 0, 0)]
)
def test_the_largest_that_holds(border, limit, found):
    assert largest(lambda n: n <= border, limit) == found


ROOM = {name: [gpu for gpu, g in GPUS.items() if g.memory > 3e9 + 2.1 * (c.layer_parameters + 2 * c.head_parameters)]
        for name, c in MODELS.items()}  # fmt: skip


@st.composite
def deployments(draw):
    model = draw(st.sampled_from([name for name, gpus in ROOM.items() if gpus]))
    prompt, output = draw(st.integers(1, 3000)), draw(st.integers(2, 1000))
    demand = Demand(
        prompt, output, concurrency=draw(st.integers(1, 2000)), shared=draw(st.integers(0, prompt)),
        tpot=draw(st.sampled_from([None, 0.005, 0.05])), acceptance=draw(st.sampled_from([None, 0.0, 0.6, 1.0])),
        draft_cost=draw(st.sampled_from([0.0, 0.1])), spread=draw(st.sampled_from([0.0, 0.8])),
    )  # fmt: skip
    return deploy(model, find_hardware(draw(st.sampled_from(ROOM[model]))), demand, draw(st.sampled_from([4, 8, 16])))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(deployments(), st.integers(1, 3000))
def test_what_holds_for_every_deployment(d, batch):
    at, more = d.estimate(batch), d.estimate(batch + 1)
    assert more.tokens_per_s >= at.tokens_per_s * (1 - 1e-12)  # a larger batch never lowers throughput
    assert more.tpot >= at.tpot and more.ttft >= at.ttft and more.memory > at.memory
    assert d.fits >= replace(d, paged=False).fits  # paged >= reserved
    assert d.fits >= replace(d, sharing=False).fits
    assert d.memory(d.fits) <= d.hardware.memory < d.memory(d.fits + 1)
    assert 1 <= d.batch <= d.most <= d.fits and d.batch <= d.demand.concurrency
    assert d.meets(d.batch) or not d.within_goals
    four, sixteen = replace(d, weight_bits=4), replace(d, weight_bits=16)
    assert four.step(batch) <= sixteen.step(batch)  # 4 bits never lose in decode
    if sixteen.step_work(batch).bound(d.hardware.reached) == "compute":
        assert four.step(batch) == pytest.approx(sixteen.step(batch))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompt": 0}, "prompt must be a whole number of at least 1, not 0"),
        ({"output": 1}, "one token has no TPOT"),
        ({"prompt": 4000}, "4257 tokens of prompt and output are more than Llama-2-7B's context, 4096"),
        ({"concurrency": 0}, "concurrency must be"),
        ({"concurrency": True}, "concurrency must be"),
        ({"concurrency": None}, "either the requests at a time or those that arrive"),
        ({"rate": 2.0}, "either the requests at a time or those that arrive"),
        ({"rate": math.nan, "concurrency": None}, "rate must be a finite number above 0, not nan"),
        ({"ttft": 0.0}, "ttft-ms must be a finite number above 0, not 0$"),
        ({"tpot": -1.0}, "tpot-ms must be a finite number above 0, not -1000$"),
        ({"tpot": math.inf}, "tpot-ms must be a finite number above 0, not inf"),
        ({"shared": 1025}, "from 0 to all 1024 tokens of the prompt can be shared, not 1025"),
        ({"shared": -1}, "can be shared"),
        ({"spread": -0.1}, "spread must be from 0 to 5, not -0.1"),
        ({"spread": 5.1}, "spread must be from 0 to 5, not 5.1"),
        ({"spread": math.nan}, "spread must be from 0 to 5, not nan"),
        ({"draft_cost": math.nan}, "draft-cost must be a finite number of at least 0, not nan"),
        *(
            ({name: 10**400}, f"{name} must be a whole number of at most 1,000,000,000$")
            for name in ("prompt", "output", "concurrency", "shared", "reserve")
        ),
        ({"acceptance": 1.01}, "an acceptance is from 0 to 1, not 1.01"),
        ({"acceptance": math.nan}, "an acceptance is from 0 to 1, not nan"),
        ({"reserve": 1280}, "reserves from 1281 to 4096 tokens, not 1280"),
        ({"reserve": 5000}, "reserves from 1281 to 4096 tokens, not 5000"),
    ],
)
def test_a_wrong_demand_gets_a_sentence(wrong, words):
    with pytest.raises(ValueError, match=words):
        find_model("Llama-2-7B", replace(PAIR, **wrong))


@pytest.mark.parametrize("memory", [0, -1.0, math.nan, math.inf, 1e290])
def test_a_memory_is_above_zero_and_one_that_exists(memory):
    with pytest.raises(ValueError, match=r"the memory must be above 0 GB and at most 1,000,000, not .{1,10}$"):
        find_hardware("T4", memory)


@pytest.mark.parametrize("efficiency", [0, 1e-320, 0.0009, 1.1, -1, math.nan, math.inf])
def test_an_efficiency_is_a_share(efficiency):
    with pytest.raises(ValueError, match=r"an efficiency is from 0\.001 to 1, not "):
        find_hardware("T4", efficiency=efficiency)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown model 'GPT-5'; known: SmolLM2-135M, .*Llama-2-70B"):
        find_model("GPT-5", PAIR)
    with pytest.raises(ValueError, match=r"unknown GPU 'T5'; known: T4, .*MI300X"):
        find_hardware("T5")


def test_names_may_be_written_in_any_case():
    assert find_model("llama-2-7b", PAIR) == ("Llama-2-7B", MODELS["Llama-2-7B"])
    assert find_hardware("h100 sxm").limits.name == "H100 SXM"
    assert [find_hardware(name).kind for name in ("MI300X", "T4")] == ["amd", "nvidia"]


def test_a_model_that_does_not_fit_is_refused_with_a_way_out():
    """70B: 137.95 GB in 16 bits, 39.55 with 4 in the layers, and 0.42 for a request of 1,280 slots."""
    with pytest.raises(ValueError, match=r"needs 138.4 GB, and H100 SXM has 80.0; with 4-bit weights it needs 40.0"):
        deploy("Llama-2-70B", find_hardware("H100 SXM"), PAIR)
    assert deploy("Llama-2-70B", find_hardware("H100 SXM"), PAIR, 4).fits == 96


@pytest.mark.parametrize("bits", [2, 5, 32, 0])
def test_bits_that_nobody_stores_are_refused(bits):
    with pytest.raises(ValueError, match=f"a weight has 4, 8, 16 bits here, not {bits}"):
        deploy("Llama-2-7B", find_hardware("H100 SXM"), PAIR, bits)


def test_this_machine_is_measured_in_32_bits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demand_module, "this_machine", lambda: Limits("this machine", 50e9, 20e9))
    found = find_hardware()
    assert (found.limits.flops, found.bits) == (50e9, 32) and found.kind in ("cpu", "apple")
    assert found.memory > 1e8
    assert find_hardware(memory=4e9).memory == 4e9
    small = deploy("SmolLM2-135M", find_hardware(memory=4e9), Demand(64, 64, concurrency=1))
    assert small.kv_token == 2 * 30 * 3 * 64 * 4
    assert deploy("SmolLM2-135M", found, Demand(64, 64, concurrency=1), 16).weight_bits == 16


def test_this_machine_s_gpu_is_measured_in_16_bits(monkeypatch):
    class Properties:
        total_memory = 24 * 10**9

    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(demand_module, "this_machine", lambda *a: asked.append(a) or Limits("Card", 1e14, 1e12))
    assert find_hardware() == Hardware(Limits("Card", 1e14, 1e12), 24e9, 16, "nvidia")
    assert asked == [(torch.float16, "cuda")]
