"""The real model, SmolLM2-135M in float32, through the engine: the greedy texts are those of each prompt alone.

Float32 rounds differently where rows share a product, so a text could turn where two tokens are nearly tied. Then the
margin between the two is said.
"""

from __future__ import annotations

import pytest

from minillm import SamplingParams, generate
from minillm.engine import Engine
from minillm.generation import next_logits
from minillm.model import NoCache

START = "<|im_start|>user\nAnswer in one word. Do not explain, do not ask. "
PROMPTS = [
    START + "What is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    START + "Which colour is the sky?<|im_end|>\n<|im_start|>assistant\n",
    START + "Which colour is the sky at night?<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 4,",
    "def fibonacci(n):\n",
    "Once upon a time",
]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(smollm2):
    return [generate(*smollm2, prompt, PARAMS) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("block_size", "budget", "sharing", "pool"),
    [(1, 64, True, 64), (3, 7, True, 400), (16, 64, False, 64), (16, 7, True, 64)],
)
def test_greedy_texts_are_those_of_each_prompt_alone(block_size, budget, sharing, pool, smollm2, alone):
    model, tokenizer = smollm2
    engine = Engine(model, tokenizer, pool // block_size, block_size, 4, budget, sharing)
    engine.kv.k.fill_(float("nan"))
    engine.kv.v.fill_(float("nan"))
    for done, solo in zip(engine.generate(PROMPTS, PARAMS), alone, strict=True):
        assert done.tokens == solo.tokens, turning_point(model, done, solo)
        assert done.text == solo.text
    met = engine.scheduler.met
    assert (met["preemptions"] > 0) == (pool < 400)
    assert (met["cache hits"] > 0) == sharing
    assert (met["chunks"] > 0) == (budget == 7)
    engine.blocks.check_integrity([])


def turning_point(model, done, solo) -> str:
    """Where two texts part, and how near the two tokens are to a tie."""
    at = next(i for i, (a, b) in enumerate(zip(done.tokens, solo.tokens, strict=True)) if a != b)
    logits = next_logits(model, [*solo.prompt, *solo.tokens[:at]], NoCache())
    ours, theirs = (float(logits[each.tokens[at]]) for each in (done, solo))
    return f"token {at} is {done.tokens[at]} and not {solo.tokens[at]}: logits {ours:.6f} and {theirs:.6f}"
