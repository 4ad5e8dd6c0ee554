"""Each rule of the usual decision trees can be made to disagree with the computation, and to agree; engines by case."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from test_deployment import deployments

from minillm.lab.advice import techniques
from minillm.lab.advice.decision_trees import RULES, Comparison, compare
from minillm.lab.advice.demand import Demand, find_hardware
from minillm.lab.advice.deployment import deploy
from minillm.lab.advice.engines import ENGINES, suit, suits
from minillm.lab.advice.verdicts import Verdict

RULE = {"speculation": 0, "memory": 1, "int4": 2, "long": 3, "continuous": 4, "paging": 5, "batch": 6}


def compared(rule: str, gpu="H100 SXM", **demand) -> Comparison:
    """What the rule says of Llama-3.1-8B, 512 tokens in and 128 out, unless told otherwise."""
    d = deploy("Llama-3.1-8B", find_hardware(gpu), Demand(**{"prompt": 512, "output": 128, **demand}))
    return compare(d, techniques.examine(d))[RULE[rule]]


@pytest.mark.parametrize(
    ("rule", "case", "says", "agrees"),
    [
        # At batch 16 a round of guesses still costs a plain step; at 512, with short texts, it costs one for each row.
        ("speculation", {"concurrency": 16, "acceptance": 0.7}, "leave", False),
        ("speculation", {"concurrency": 2, "acceptance": 0.7, "tpot": 0.05}, "use", True),
        ("speculation", {"concurrency": 2, "acceptance": 0.0, "tpot": 0.05}, "use", False),
        ("speculation", {"concurrency": 512, "acceptance": 0.7, "prompt": 16, "output": 16,
                         "gpu": "A100 80GB SXM"}, "leave", True),
        ("speculation", {"concurrency": 2, "acceptance": 0.7}, "nothing", None),  # no goal for latency
        ("speculation", {"concurrency": 16}, "leave", None),  # the acceptance is not known
        ("memory", {"concurrency": 4}, "leave", False),
        ("memory", {"concurrency": 200, "gpu": "L4"}, "use", True),
        ("memory", {"concurrency": 2000}, "use", True),
        ("memory", {"concurrency": 2000, "tpot": 0.05}, "leave", False),  # 762 fit, and the goals allow 569
        ("memory", {"concurrency": 512, "prompt": 16, "output": 16, "gpu": "A100 80GB SXM"}, "leave", True),
        ("int4", {"concurrency": 1}, "leave", False),
        ("int4", {"concurrency": 16}, "use", True),
        ("int4", {"concurrency": 512, "prompt": 16, "output": 16, "gpu": "A100 80GB SXM"}, "use", False),
        ("long", {"concurrency": 128, "prompt": 1000}, "leave", False),
        ("long", {"concurrency": 1}, "leave", True),
        ("long", {"concurrency": 16, "prompt": 8000}, "use", True),
        ("continuous", {"concurrency": 4}, "leave", False),
        ("continuous", {"concurrency": 1}, "leave", True),
        ("continuous", {"concurrency": 16}, "use", True),
        ("continuous", {"concurrency": 16, "spread": 0.0}, "use", False),
        ("paging", {"concurrency": 64}, "use", True),
        ("paging", {"concurrency": 64, "reserve": 1024}, "use", False),
        ("paging", {"concurrency": 1}, "leave", True),
        ("paging", {"concurrency": 2, "gpu": "L4"}, "leave", False),
        ("batch", {"concurrency": 8}, "32 to 128", False),
        ("batch", {"concurrency": 8, "tpot": 0.01}, "32 to 128", True),
    ],
)  # fmt: skip
def test_every_disagreement_appears_and_vanishes(rule, case, says, agrees):
    found = compared(rule, **case)
    assert (found.says, found.agrees) == (says, agrees), found.computed
    assert any(letter.isdigit() for letter in found.computed)


def test_a_comparison_shows_the_numbers_of_what_pays():
    found = compared("int4", concurrency=1)
    assert found.computed.startswith("4-bit weights (speed) pays (2.99 times, decode speed): A step of 1 text takes")
    paging = compared("paging", concurrency=1)
    assert paging.computed.startswith("Paging makes no difference (1 times, tokens/s): 762 texts fit")
    open_one = compared("speculation", concurrency=16)
    assert open_one.computed.startswith("Speculation pays if the acceptance is at least")


@pytest.mark.parametrize(
    ("case", "best", "why"),
    [
        ({"concurrency": 8}, "762", "the memory"),
        ({"concurrency": 8, "tpot": 0.05}, "569", "the goals"),
        ({"concurrency": 8, "prompt": 16, "output": 16}, "316", "a step is compute-bound from there on"),
    ],
)
def test_the_best_batch_ends_at_memory_goals_or_arithmetic(case, best, why):
    assert compared("batch", **case).computed.startswith(f"{best} ({why}).")


def test_the_knee_lies_at_the_ridge():
    """H100: 295 FLOP a byte. A text of 23 past tokens adds 2 FLOP a weight, some attention, and 3.3 MB of cache."""
    weights = 32 * (4096 * 48 * 128 + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    flops, cache = 2 * weights + 4 * 32 * 4096 * 24, 131_072 * (23 + 2)
    knee = next(b for b in range(1, 1000) if b * flops / (2 * weights + b * cache) >= 989 / 3.35)
    assert compared("batch", concurrency=8, prompt=16, output=16).computed.startswith(f"{knee} ")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(deployments())
def test_agreement_is_that_of_word_and_verdict(d):
    advice = techniques.examine(d)
    pays = {a.technique for a in advice if a.verdict is Verdict.PAYS}
    found = compare(d, advice)
    assert len(found) == len(RULES) + 1
    for rule, comparison in zip(RULES, found, strict=False):
        if comparison.agrees is not None:
            assert comparison.agrees == ((comparison.says == "use") == bool(pays & set(rule.techniques)))


def test_every_rule_is_about_techniques_that_are_computed():
    d = deploy("Llama-3.1-8B", find_hardware("H100 SXM"), Demand(concurrency=8))
    known = {a.technique for a in techniques.examine(d)}
    assert {name for rule in RULES for name in rule.techniques} <= known


@pytest.mark.parametrize(
    ("kind", "batch", "names"),
    [
        ("nvidia", 64, {"vLLM", "SGLang", "TensorRT-LLM"}),
        ("nvidia", 1, {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp", "transformers"}),
        ("amd", 64, {"vLLM", "SGLang"}),
        ("cpu", 8, {"vLLM", "SGLang", "llama.cpp", "transformers"}),
        ("apple", 1, {"llama.cpp", "transformers", "MLX (mlx-lm)"}),
        ("apple", 9, set()),
    ],
)
def test_engines_suit_by_hardware_and_requests_at_a_time(kind, batch, names):
    found = [suit(engine, kind, batch) for engine in ENGINES]
    assert {s.engine.name for s in found if s.suits} == names


def test_engines_are_judged_by_the_batch_that_runs():
    d = deploy("Llama-3.1-8B", find_hardware("MI300X"), Demand(concurrency=16))
    why = {s.engine.name: s.why for s in suits(d)}
    assert why["llama.cpp"] == "runs here, but is made for few at a time, and 16 are to run"
    assert why["TensorRT-LLM"] == "does not run on this hardware (amd)"
