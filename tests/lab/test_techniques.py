"""Each technique's gain against arithmetic done by hand, what must hold for every deployment, and its verdicts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from test_deployment import HEAD, KV, LAYERS, deployments

from minillm.lab.advice import techniques
from minillm.lab.advice.demand import Demand, find_hardware
from minillm.lab.advice.deployment import Deployment, deploy
from minillm.lab.advice.verdicts import Verdict, duration, judge, number
from minillm.lab.catalogue import MODELS

A100 = (312e12, 2.039e12)  # FLOP/s, bytes/s


def llama(prompt=1024, output=257, gpu="A100 80GB SXM", concurrency=16, **more) -> Deployment:
    bits = more.pop("bits", None)
    if "rate" in more:
        concurrency = None
    return deploy("Llama-2-7B", find_hardware(gpu), Demand(prompt, output, concurrency=concurrency, **more), bits)


def eight(gpu="H100 SXM", prompt=512, output=128, **more) -> Deployment:
    return deploy("Llama-3.1-8B", find_hardware(gpu), Demand(prompt, output, **more))


def step_by_hand(batch, rows=1, past=1151, layer_bytes=2.0, kv=KV):
    """Llama-2-7B on an A100."""
    flops = batch * rows * 2 * (LAYERS + HEAD) + batch * 4 * 32 * 4096 * (rows * past + rows * (rows + 1) / 2)
    read = LAYERS * layer_bytes + HEAD * 2 + batch * (past + 2 * rows) * kv
    return max(flops / A100[0], read / A100[1])


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [(1.06, "pays"), (1.04, "no difference"), (1.0, "no difference"), (0.96, "no difference"), (0.94, "does not pay")],
)
def test_within_the_margin_there_is_no_difference(gain, verdict):
    assert judge(gain).value == verdict


def test_the_cache_against_recomputing_by_hand():
    """Two tokens out: the prompt again with one token more, against one step. All of it is arithmetic here."""
    d = llama(1000, 2, concurrency=1)
    flops = sum(2 * LAYERS * n + 2 * HEAD + 4 * 32 * 4096 * n * (n + 1) / 2 for n in (1000, 1001))
    turn = (2 * LAYERS * 1000 + 2 * HEAD + 4 * 32 * 4096 * 500500) / A100[0] + step_by_hand(1, past=1000)
    found = techniques.kv_cache(d)
    assert found.gain == pytest.approx(flops / A100[0] / turn)
    assert found.verdict is Verdict.PAYS


def test_the_cache_brings_nothing_where_few_tokens_cost_what_one_costs():
    """10 tokens read the weights once, as one token does: far below the ridge."""
    found = techniques.kv_cache(llama(4, 6, concurrency=1))
    assert found.gain == pytest.approx(1, abs=0.01) and found.verdict is Verdict.NO_DIFFERENCE


def test_paging_by_hand():
    """99 texts fit in blocks, and 30 if each reserves the context of 4,096."""
    found = techniques.paging(llama(concurrency=64))

    def rate(batch):
        return batch * 257 / (batch * llama().prefill + 256 * step_by_hand(batch))

    assert found.gain == pytest.approx(rate(64) / rate(30))
    assert "99 texts fit in blocks (1,280 slots each), 30 if each reserves 4,096 (the whole context; " in found.reason
    assert "--reserve N for less); 64 texts run" in found.reason
    assert "each reserves 2,048; 16 texts run" in techniques.paging(llama(reserve=2048)).reason


@pytest.mark.parametrize("few", [{"concurrency": 30}, {"concurrency": 64, "reserve": 1281}, {"rate": 0.1}])
def test_paging_brings_nothing_where_all_fit_anyway(few):
    assert techniques.paging(llama(**few)).verdict is Verdict.NO_DIFFERENCE


def test_more_than_what_arrives_is_not_carried():
    """30 reserved texts carry less than what arrives, 40 in blocks a little more: that more does not count."""
    d = llama()
    rate = (d.estimate(39).requests_per_s + d.estimate(40).requests_per_s) / 2
    found = techniques.paging(llama(rate=rate))
    assert found.gain == pytest.approx(rate / d.estimate(30).requests_per_s, rel=1e-12)


def test_paging_pays_without_a_number_where_nothing_fits_without_it():
    """128K of context are 17.2 GB of keys and values, and 24 GB hold 16.1 of weights."""
    found = techniques.paging(eight("L4", concurrency=4))
    assert (found.verdict, found.gain) == (Verdict.PAYS, None) and "0 if each reserves 131,072" in found.reason


def test_sharing_by_hand():
    """896 of 1,024 tokens are found."""
    d = llama(shared=900)
    flops = 2 * LAYERS * 128 + 2 * HEAD + 4 * 32 * 4096 * (128 * 896 + 128 * 129 / 2)
    read = 2 * (LAYERS + HEAD) + (896 + 256) * KV
    found = techniques.prefix_sharing(d)
    assert found.gain == pytest.approx(llama().prefill / max(flops / A100[0], read / A100[1]))
    assert "896 of 1,024 tokens are found" in found.reason
    assert "328 texts fit and not 99" in found.reason  # 66.52 GB are 126,884 slots: less 896, by 384 for each


@pytest.mark.parametrize(("shared", "words"), [(0, "share nothing"), (15, "share 15 tokens, less than a block")])
def test_sharing_brings_nothing_where_nothing_is_shared(shared, words):
    found = techniques.prefix_sharing(llama(shared=shared))
    assert found.verdict is Verdict.NO_DIFFERENCE and words in found.reason


def test_the_longest_of_two_by_the_closed_form():
    """Of two log-normal lengths the longer one is 2 Phi(sigma / sqrt 2) times the mean."""
    for sigma in (0.3, 0.8, 1.2):
        d = llama(64, 16, concurrency=2, spread=sigma)
        assert techniques.longest_of(d) == pytest.approx(1 + math.erf(sigma / 2), rel=0.003)


def test_continuous_batching_by_hand():
    d = llama(64, 17, concurrency=2, spread=0.8)
    longest = 17 * techniques.longest_of(d)
    turn = 2 * d.prefill + 16 * step_by_hand(2, past=71)
    found = techniques.continuous_batching(d)
    assert found.gain == pytest.approx((turn + (longest - 17) * step_by_hand(2, past=71)) / turn)
    assert found.verdict is Verdict.PAYS


@pytest.mark.parametrize("alike", [{"concurrency": 1}, {"spread": 0.0}])
def test_continuous_batching_brings_nothing_to_one_text_or_to_equal_lengths(alike):
    found = techniques.continuous_batching(llama(**alike))
    assert found.gain == pytest.approx(1) and found.verdict is Verdict.NO_DIFFERENCE


def test_no_output_is_longer_than_the_context_allows():
    """3,072 tokens are left, 1.5 times the mean. The mean of what is cut: the area above its distribution, up to there.

    The distribution is scaled until that mean is 1 again.
    """
    places = [1.5 * (i + 0.5) / 4000 for i in range(4000)]

    def mean(n, scale):
        return 1.5 * sum(1 - NormalDist().cdf(math.log(x / scale) / 0.8) ** n for x in places) / 4000

    low, high = 0.1, 100.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(1, middle) < 1 else (low, middle)
    found = techniques.longest_of(llama(1024, 2048, concurrency=16, spread=0.8))
    assert found == pytest.approx(mean(16, high), rel=0.002) and found < 1.5


@pytest.mark.parametrize("spread", [0.0, 0.8, 5.0])
@pytest.mark.parametrize("output", [2048, 3000, 3071, 3072])
def test_the_longest_output_fits_into_the_context(output, spread):
    d = llama(1024, output, concurrency=99, spread=spread)
    assert output * (1 - 1e-9) <= output * techniques.longest_of(d) <= 3072 * (1 + 1e-9)
    assert "of at most 3,072" in techniques.continuous_batching(d).reason
    one = llama(1024, output, concurrency=1, spread=spread)
    assert techniques.longest_of(one) == pytest.approx(1)  # the mean is the one that was asked for


def test_the_longest_of_very_many_is_the_longest_that_the_context_allows():
    d = llama(64, 16)
    d.__dict__["batch"] = 10**40  # as if it fitted
    assert 16 * techniques.longest_of(d) == pytest.approx(4032)


def mixed_by_hand(batch, tokens, past):
    visible = tokens * past + tokens * (tokens + 1) / 2 + (batch - 1) * 1152
    flops = 2 * LAYERS * (tokens + batch - 1) + 2 * HEAD * batch + 4 * 32 * 4096 * visible
    read = 2 * (LAYERS + HEAD) + KV * (past + 2 * tokens + (batch - 1) * 1153)
    return max(flops / A100[0], read / A100[1])


def test_a_chunk_is_the_largest_that_keeps_the_goal():
    """A prompt takes 43 ms, a step of 16 texts 11 ms; the goal is 25 ms."""
    d = llama(tpot=0.025)
    found = techniques.chunked_prefill(d)
    chunk = max(n for n in range(1, 1025) if mixed_by_hand(16, n, 1024 - n) <= 0.025)
    assert f"with {chunk} tokens of it a step (by the goal of 25 ms)" in found.reason
    assert found.gain == pytest.approx((d.prefill + step_by_hand(16)) / mixed_by_hand(16, chunk, 1024 - chunk))
    reading = sum(mixed_by_hand(16, min(chunk, 1024 - i), i) for i in range(0, 1024, chunk))
    assert f"the prompt takes {reading / d.prefill:.2f} times as long" in found.reason
    assert found.verdict is Verdict.PAYS


def test_without_a_goal_a_chunk_ends_at_the_ridge():
    found = techniques.chunked_prefill(llama())
    chunk = min(n for n in range(1, 1025) if mixed_by_hand(16, n, 1024 - n) * A100[1] > 1.0001 * (
        2 * (LAYERS + HEAD) + KV * (1024 + n + 15 * 1153)))  # fmt: skip
    assert f"with {chunk} tokens of it a step (by the ridge)" in found.reason and found.verdict is Verdict.PAYS


@pytest.mark.parametrize(
    ("case", "verdict", "words"),
    [
        ({"concurrency": 1, "tpot": 0.02}, "no difference", "Nobody else waits"),
        ({"tpot": 0.2}, "no difference", "within the goal of 200 ms"),
        ({"tpot": 0.005}, "does not pay", "Even with one token"),
        # A chunked prompt takes 55.6 ms, a whole one 54.3.
        ({"tpot": 0.025, "ttft": 0.055}, "does not pay", "so TTFT is"),
    ],
)
def test_chunks_that_do_not_help(case, verdict, words):
    found = techniques.chunked_prefill(llama(**case))
    assert found.verdict.value == verdict and words in found.reason


@pytest.mark.parametrize(("batch", "acceptance", "cost"), [(1, 0.8, 0.0), (1, 0.6, 0.1), (16, 0.7, 0.05), (60, 0.9, 0)])
def test_speculation_by_hand(batch, acceptance, cost):
    """Tokens a round, (1 - a^(K + 1)) / (1 - a), over K guesses and a pass of K + 1 rows for each text."""

    def gain(k):
        tokens = (1 - acceptance ** (k + 1)) / (1 - acceptance)
        return tokens / (k * cost + step_by_hand(batch, k + 1) / step_by_hand(batch))

    best = max(range(1, 17), key=gain)
    found = techniques.speculation(llama(concurrency=batch, acceptance=acceptance, draft_cost=cost))
    assert found.gain == pytest.approx(gain(best)) and f"K = {best}," in found.reason


def test_speculation_loses_when_the_arithmetic_is_busy():
    found = techniques.speculation(eight("A100 80GB SXM", 16, 16, concurrency=512, acceptance=0.7))
    assert found.verdict is Verdict.DOES_NOT_PAY and found.gain < 0.9
    free = techniques.speculation(eight("A100 80GB SXM", 16, 16, concurrency=512))
    assert free.verdict is Verdict.NO_DIFFERENCE and "Even if every guess were right" in free.reason


def test_speculation_of_unknown_acceptance_names_the_least_that_pays():
    found = techniques.speculation(llama(concurrency=1, draft_cost=0.2))
    assert (found.verdict, found.gain) == (Verdict.PAYS_IF, None)
    least = int(found.reason.split("at least ")[1].split("%")[0]) / 100
    below, above = (llama(concurrency=1, draft_cost=0.2, acceptance=least + d) for d in (-0.02, 0.02))
    assert techniques.speculation(below).verdict is not Verdict.PAYS
    assert techniques.speculation(above).verdict is Verdict.PAYS


def test_a_drafter_that_costs_a_step_never_pays():
    assert techniques.speculation(llama(acceptance=1.0, draft_cost=1.0)).verdict is not Verdict.PAYS


def test_grouped_heads_by_hand():
    """Mistral-7B: 8 KV heads of 128 in 32 layers, 131,072 bytes a token; with 32 of them four times as many."""
    d = deploy("Mistral-7B", find_hardware("A100 80GB SXM"), Demand(1024, 257, concurrency=16))
    weights = 2 * (32 * (4096 * 48 * 128 + 4096 * 4096 + 3 * 4096 * 14336) + 32000 * 4096)
    many, few = (weights + 16 * 1153 * size for size in (524_288, 131_072))
    found = techniques.grouped_heads(d)
    assert found.gain == pytest.approx(many / few) and found.verdict is Verdict.PAYS
    assert "The model has 8 KV heads for 32 query heads" in found.reason


def test_a_model_without_groups_is_told_what_four_would_bring():
    found = techniques.grouped_heads(llama())
    many, few = (2 * (LAYERS + HEAD) + 16 * 1153 * size for size in (KV, KV / 4))
    assert found.gain == pytest.approx(many / few, rel=1e-3)
    assert "The model has none" in found.reason and "with 8 KV heads" in found.reason


@pytest.mark.parametrize("name", MODELS)
def test_another_number_of_kv_heads_leaves_the_weights_as_many(name):
    config = MODELS[name]
    other = techniques.same_weights(config, config.n_heads)
    assert other.n_kv_heads == config.n_heads
    assert other.layer_parameters == pytest.approx(config.layer_parameters, rel=1e-3)


def test_where_less_cache_lets_more_texts_run_that_is_what_counts():
    """A 7B model of 30 full contexts; with 8 KV heads it would hold 120, and 100 are wanted."""
    d = llama(3000, 1000, concurrency=100)
    assert d.batch == 31
    small = replace(d, kv_bits=8)
    ratio = small.estimate(small.batch).tokens_per_s / d.estimate(d.batch).tokens_per_s
    found = techniques.small_cache(d)
    assert found.gain == pytest.approx(ratio) and found.what == "tokens/s"
    assert ratio > d.step(31) / small.step(31) > 1


def test_a_cache_of_8_bits_by_hand():
    found = techniques.small_cache(llama())
    assert found.gain == pytest.approx(step_by_hand(16) / step_by_hand(16, kv=KV / 2)) and found.what == "decode speed"
    assert "198 texts fit and not 99" in found.reason


def test_less_cache_is_judged_at_the_chosen_batch():
    """The goal ends the batch; smaller caches would allow a larger one."""
    d = llama(concurrency=500, tpot=0.014)
    small = replace(d, kv_bits=8)
    assert d.batch < small.batch < d.fits
    ratio = step_by_hand(d.batch) / step_by_hand(d.batch, kv=KV / 2)
    found = techniques.small_cache(d)
    assert found.gain == pytest.approx(ratio) and f"a step of {d.batch} texts takes" in found.reason
    grouped = techniques.grouped_heads(d)
    assert grouped.gain == pytest.approx(step_by_hand(d.batch) / step_by_hand(d.batch, kv=KV / 4), rel=1e-3)
    assert f"a step of {d.batch} texts takes" in grouped.reason


def test_where_a_goal_and_not_memory_ends_the_batch_the_chosen_one_is_judged():
    """95 run of 99 that fit; smaller caches would let more than 99 run."""
    d = llama(concurrency=500, tpot=llama().estimate(95).tpot)
    assert d.batch == 95 and replace(d, kv_bits=8).batch > d.fits == 99
    found = techniques.small_cache(d)
    assert found.gain == pytest.approx(step_by_hand(95) / step_by_hand(95, kv=KV / 2)) and found.what == "decode speed"


@pytest.mark.parametrize(("bits", "layer_bytes"), [(4, 4.5 / 8), (8, 8.25 / 8)])
def test_fewer_bits_for_speed_by_hand(bits, layer_bytes):
    found = techniques.faster_weights(bits)(llama(concurrency=4))
    assert found.gain == pytest.approx(step_by_hand(4) / step_by_hand(4, layer_bytes=layer_bytes))
    assert found.verdict is Verdict.PAYS


def test_fewer_bits_gain_nothing_in_a_compute_bound_prefill():
    d = llama()
    assert techniques.with_weights(d, 4).prefill == pytest.approx(d.prefill, rel=1e-12)
    short = llama(16)  # 16 tokens are far below the ridge: there they do
    assert techniques.with_weights(short, 4).prefill < 0.4 * short.prefill


def test_fewer_bits_gain_nothing_in_a_compute_bound_decode():
    d = eight("A100 80GB SXM", 16, 16, concurrency=512)
    found = techniques.faster_weights(4)(d)
    assert found.gain == pytest.approx(1) and found.verdict is Verdict.NO_DIFFERENCE


def test_fewer_bits_for_memory_by_hand():
    """On 24 GB: 13.48 of weights leave room for 15 texts; 4.17 for 29."""
    found = techniques.smaller_weights(4)(llama(gpu="L4", concurrency=100))
    assert found.gain == pytest.approx(29 / 15) and found.verdict is Verdict.PAYS
    assert techniques.smaller_weights(4)(llama(gpu="L4", concurrency=20)).gain == pytest.approx(20 / 15)
    assert techniques.smaller_weights(4)(llama(gpu="L4", concurrency=15)).verdict is Verdict.NO_DIFFERENCE


def test_fewer_bits_free_no_memory_that_counts_where_the_goals_end_the_batch():
    d = llama(512, 128, "H100 SXM", 500, tpot=0.008)
    assert d.batch == 28 and d.fits == 198
    for bits in (4, 8):
        found = techniques.smaller_weights(bits)(d)
        assert (found.verdict, found.gain) == (Verdict.NO_DIFFERENCE, 1.0)
        assert "the goals allow a batch of 28, and 198 fit" in found.reason


def test_what_runs_with_fewer_bits_is_counted_within_the_goals():
    """15 fit in 16 bits and are within the goal; 29 fit in 4 bits, and the goal ends the batch before."""
    plain = llama(gpu="L4", concurrency=100)
    four = techniques.with_weights(plain, 4)
    tpot = max(plain.estimate(15).tpot, four.estimate(18).tpot)
    d = llama(gpu="L4", concurrency=100, tpot=tpot)
    runs = techniques.with_weights(d, 4).batch
    assert d.batch == 15 and 18 <= runs < 29
    found = techniques.smaller_weights(4)(d)
    assert found.gain == pytest.approx(runs / 15) and f"{runs} run and not 15" in found.reason


def test_goals_that_nothing_meets_do_not_count_against_fewer_bits():
    """One text meets the goal in 4 bits, none in 16: there 15 run all the same."""
    tpot = techniques.with_weights(llama(gpu="L4"), 4).estimate(1).tpot
    found = techniques.smaller_weights(4)(llama(gpu="L4", concurrency=100, tpot=tpot))
    assert found.gain == pytest.approx(29 / 15)


def test_for_a_rate_fewer_bits_count_by_what_they_carry():
    """A batch that is faster may be smaller and carry more."""
    plain = llama(gpu="L4")
    rate = plain.estimate(15).requests_per_s * 1.2
    found = techniques.smaller_weights(4)(llama(gpu="L4", rate=rate))
    assert found.gain == pytest.approx(1.2) and found.what == "tokens/s"


def test_fewer_bits_pay_without_a_number_where_nothing_fits_in_16():
    d = deploy("Llama-2-70B", find_hardware("H100 SXM"), Demand(512, 128, concurrency=4), 4)
    found = techniques.smaller_weights(4)(d)
    assert (found.verdict, found.gain) == (Verdict.PAYS, None) and "not even one text fits" in found.reason


@settings(max_examples=60, deadline=None, derandomize=True)
@given(deployments())
def test_what_holds_for_every_deployment(d):
    found = {a.technique: a for a in techniques.examine(d)}
    assert len(found) == len(techniques.TECHNIQUES) == 12
    for a in found.values():
        assert a.reason.endswith(".") and (a.gain is None or (math.isfinite(a.gain) and a.gain > 0))
        assert a.gain is not None or a.verdict in (Verdict.PAYS, Verdict.PAYS_IF)
    never_lose = ("paging", "continuous batching", "prefix sharing", "4-bit weights (speed)", "4-bit weights (memory)",
                  "8-bit weights (speed)", "8-bit weights (memory)", "8-bit KV cache")  # fmt: skip
    for name in never_lose:
        assert found[name].gain is None or found[name].gain >= 1 - 1e-9, name
    assert found["4-bit weights (speed)"].gain >= found["8-bit weights (speed)"].gain * (1 - 1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(deployments())
def test_speculation_gains_never_more_with_a_larger_batch(d):
    """Verifying grows dearer with the batch, and in the end a row costs a row."""
    d = replace(d, demand=replace(d.demand, acceptance=0.7, tpot=None, concurrency=1))
    gains = [techniques.speculation(at(d, batch)).gain for batch in (1, 4, 32, 256, 2048)]
    assert all(a >= b - 1e-9 for a, b in pairwise(gains))


def at(d: Deployment, batch: int) -> Deployment:
    """With memory for as many as are wanted."""
    wanted = replace(d, demand=replace(d.demand, concurrency=batch))
    wanted.__dict__["batch"] = batch  # as if it fitted
    return wanted


def test_numbers_are_written_for_a_reader():
    assert [number(x) for x in (0.01234, 12.345, 999.4, 12345.6)] == ["0.0123", "12.3", "999", "12,346"]
    assert [number(x) for x in (999_999_999, 1e9, -1e300)] == ["999,999,999", "1e+09", "-1e+300"]
    assert [duration(x) for x in (0.0123, 0.9, 1.0, 4321.0)] == ["12.3 ms", "900 ms", "1 s", "4,321 s"]
