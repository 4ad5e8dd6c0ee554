"""The ledger's rows on loops: who joins a batch, when a text ends, and whether guesses change what is written.

Each loop runs: the scheduler without a model, counting steps; a small model in float64; and the real one, where the
question is how rounding moves its logits.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from statistics import mean

import torch
from torch import Tensor

from minillm import ContiguousKV, NoCache, SamplingParams, speculative
from minillm.blocks import BlockPool
from minillm.chat import common_prefix
from minillm.drafters import LayerSkipDrafter
from minillm.generation import generate, next_logits
from minillm.lab.claims.decide import decide
from minillm.lab.claims.ledger import ALGORITHM, Figures, Finding, Ledger
from minillm.lab.claims.workbench import Workbench
from minillm.lab.tiny import tiny_model
from minillm.model import Transformer
from minillm.policies import Continuous, Dynamic, Policy
from minillm.request import Request
from minillm.scheduler import Scheduler

ledger = Ledger()


def count_steps(outputs: Sequence[int], every: int, policy: Policy, places: int = 8) -> dict[str, float]:
    """The real scheduler without a model; a step takes the time 1, and request i arrives at the time i * every.

    joined: how many began while others were in the midst of their texts. wait: steps to the first token, on average.
    """
    scheduler = Scheduler(BlockPool(places, 10**6, sharing=False), places, 10**6, policy)  # a block holds any text
    coming = [Request([0], limit=1 + n, arrival=i * every) for i, n in enumerate(outputs)]
    joined, waits, time = 0, [], 0
    while coming or not scheduler.idle:
        while coming and coming[0].arrival <= time:
            scheduler.add(coming.pop(0))
        spans = scheduler.schedule(now=time).spans
        time += 1
        first = [span.request for span in spans if span.start == 0]
        joined += len(first) * (len(first) < len(spans))
        waits += [time - request.arrival for request in first]
        for span in spans:
            scheduler.computed(span.request, span.count)
            span.request.tokens.append(0)
            if len(span.request.tokens) == span.request.limit:
                scheduler.finish(span.request)
    return {"joined": joined, "wait": mean(waits), "steps": time}


def two_policies(bench: Workbench) -> Figures:
    """mixed: outputs of unlike lengths, one request every second step. equal: of one length, all at the start."""
    lengths = random.Random(0)
    mixed = [max(1, round(lengths.expovariate(1 / 16))) for _ in range(128)]
    return {
        "mixed": {"collect": count_steps(mixed, 2, Dynamic(timeout=8)), "join": count_steps(mixed, 2, Continuous())},
        "equal": {
            "collect": count_steps([16] * 128, 0, Dynamic(timeout=8)),
            "join": count_steps([16] * 128, 0, Continuous()),
        },
        "requests": len(mixed),
    }


@ledger.claim(
    "B3",
    sources="T3",
    text="Continuous batching collects requests until the batch is full or time is up, runs it, and clears it",
    notebook="06_continuous_batching",
    scope=ALGORITHM,
    measure=two_policies,
)
def collected_batches(figures: Figures) -> Finding:
    (collect, join), equal, n = figures["mixed"].values(), figures["equal"], figures["requests"]
    return Finding(
        collect["steps"] / join["steps"],
        "times the steps of a batch that requests join and leave at every step",
        decide(collect["joined"] >= join["joined"]),
        f"Of {n} requests {collect['joined']} joined while others were being written, with joining at every step "
        f"{join['joined']}; the first token took {collect['wait']:.0f} steps and not {join['wait']:.0f}. That loop is "
        "static batching with a timeout (dynamic batching). With outputs of one length, all there at the start, it "
        f"takes {equal['collect']['steps'] / equal['join']['steps']:.2f} times the steps.",
    )


def late_loop(bench: Workbench) -> Figures:
    """A loop that appends a token and then looks whether there are more than `limits` of them."""
    model, limits, written = tiny_model(seed=0), [1, 5, 8], []
    for limit in limits:
        output: list[int] = []
        while not len(output) > limit:
            output.append(int(next_logits(model, [5, *output], NoCache()).argmax()))
        written.append(len(output))
    package = [len(generate(model, None, [5], SamplingParams(temperature=0, max_tokens=n)).tokens) for n in limits]
    return {"limits": limits, "written": written, "package": package}


@ledger.claim(
    "B12",
    sources="T2",
    text="A loop that appends a token and stops when len(output) > max writes max tokens at most",
    notebook="01_autoregression",
    scope=ALGORITHM,
    measure=late_loop,
)
def tokens_too_many(figures: Figures) -> Finding:
    limits, written = figures["limits"], figures["written"]
    over = max(n - limit for n, limit in zip(written, limits, strict=True))
    return Finding(
        over,
        "beyond the maximum, in tokens",
        decide(over <= 0),
        f"With a maximum of {', '.join(map(str, limits))} it writes {', '.join(map(str, written))} tokens. Right is to "
        f"look before appending, len(output) < max: {', '.join(map(str, figures['package']))}.",
    )


@torch.inference_mode()
def logits_in_passes(model: Transformer, tokens: list[int], known: int, rows: int) -> Tensor:
    """The logits that choose tokens[known:], when a text is fed `rows` tokens at a time after its beginning."""
    kv = ContiguousKV(model.config, len(tokens), model.dtype, model.device)
    found = []
    for start, end in [(0, known), *((i, min(i + rows, len(tokens) - 1)) for i in range(known, len(tokens) - 1, rows))]:
        hidden = model(torch.tensor(tokens[start:end]), torch.arange(start, end), kv)
        kv.commit(end - start)
        found.append(model.logits(hidden[-1:] if start == 0 else hidden))
    return torch.cat(found)


def greedy_both_ways(model: Transformer, prompt: list[int], n: int) -> dict[str, float]:
    """margin: between the two best logits, the least of the text, and where the two texts part (if they do)."""
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    plain = generate(model, None, prompt, params).tokens
    drafter = LayerSkipDrafter(model, max(1, model.config.n_layers // 3))
    same = common_prefix(plain, speculative.generate(model, None, prompt, drafter, params).tokens)
    alone, in_fours = (logits_in_passes(model, prompt + plain, len(prompt), rows) for rows in (1, 4))
    best = alone.topk(2).values
    margins = (best[:, 0] - best[:, 1]).tolist()
    return {
        "tokens": n,
        "same": same,
        "margin": min(margins),
        "margin_there": margins[same] if same < n else min(margins),
        "difference": float((alone - in_fours).abs().max()),
    }


def same_texts(bench: Workbench) -> Figures:
    """sampled: of `seeds` texts of a small model with temperature 1, how many are those without guesses."""
    prompt, n, seeds = (
        bench.story.prompt[: 16 if bench.quick else 64],
        4 if bench.quick else 48,
        3 if bench.quick else 20,
    )
    greedy = {"float32": greedy_both_ways(bench.model, prompt, n)}
    if not bench.quick:
        narrow = copy.deepcopy(bench.model).to(torch.bfloat16).prepare()
        greedy["bfloat16"] = greedy_both_ways(narrow, prompt, n)
    small, sampled = tiny_model(seed=0), 0
    for seed in range(seeds):
        params = SamplingParams(seed=seed, max_tokens=12)
        guessed = speculative.generate(small, None, [1, 2, 3], LayerSkipDrafter(small, 1), params)
        sampled += guessed.tokens == generate(small, None, [1, 2, 3], params).tokens
    return {"greedy": greedy, "sampled": sampled, "seeds": seeds}


@ledger.claim(
    "B8",
    sources="T2",
    text="Speculation gives the same output as plain decoding",
    notebook="07_speculative_sampling",
    scope=ALGORITHM,
    measure=same_texts,
    slow=True,
)
def same_output(figures: Figures) -> Finding:
    greedy, sampled, seeds = figures["greedy"], figures["sampled"], figures["seeds"]
    same = all(found["same"] == found["tokens"] for found in greedy.values())
    ties = all(
        found["same"] == found["tokens"] or found["margin_there"] <= 2 * found["difference"]
        for found in greedy.values()
    )
    told = "; ".join(
        f"in {dtype} the first {found['same']} of {found['tokens']} tokens are the same (logits in a pass of 4 tokens "
        f"differ by up to {found['difference']:.1g}; the two best are "
        + (f"at least {found['margin']:.1g} apart)" if found["margin"] else "equal at some token)")
        for dtype, found in greedy.items()
    )
    return Finding(
        100 * greedy["float32"]["same"] / greedy["float32"]["tokens"],
        "% of a greedy text in float32 is the same",
        decide(ties, always=same and sampled == seeds),
        f"Greedy, up to near-ties: {told}. With a temperature the same seed gave the same text {sampled} of {seeds} "
        "times: the distribution is the same (B5), the text is not.",
    )
