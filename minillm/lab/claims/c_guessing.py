"""When does speculation pay, and which texts are easy to guess? Two drafters on pinned texts of four kinds.

How many guesses are accepted depends on drafter and text, hardly on the machine. What a round costs depends on the
machine: measured here, computed for a GPU, where a pass of a few rows costs as much as a pass of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import torch

from minillm import speculative
from minillm.drafters import NgramDrafter
from minillm.feature_drafter import load_drafter
from minillm.lab.catalogue import MODELS
from minillm.lab.claims.decide import decide
from minillm.lab.claims.ledger import ALGORITHM, THIS_MACHINE, Figures, Finding, Ledger, Verdict
from minillm.lab.claims.passes import greedy, model_of
from minillm.lab.claims.workbench import Workbench
from minillm.lab.roofline import gpu_limits, step_work
from minillm.lab.speculative_bench import Watched, compare, step_seconds
from minillm.lab.workload import read_json
from minillm.speculative import Drafter, expected_tokens

ledger = Ledger()
K, CONTEXT, LONG = 3, 128, 2000  # guesses a round; tokens of past where costs are measured and computed; a long past
TEXTS, WRITTEN = 4, 64  # of each kind, and tokens of each, to count accepted guesses
MATHEMATICS = (
    "Solve 3x + 5 = 26. Subtract 5 from both sides: 3x = 21. Divide both sides by 3: x = 7.\n"
    "Solve 4x + 9 = 41. Subtract 9 from both sides:",
    "A train travels 180 km in 3 hours. Its speed is 180 / 3 = 60 km per hour. In 5 hours it travels 60 * 5 =",
    "Theorem. The sum of two even numbers is even. Proof. Let m = 2a and n = 2b be even numbers. Then m + n =",
    "The derivative of x^2 is 2x, and the derivative of x^3 is 3x^2. In general, the derivative of x^n is",
)


def prompts(bench: Workbench, kind: str) -> list[list[int]]:
    texts = MATHEMATICS if kind == "mathematics" else read_json("speculative")[kind]
    return [bench.tokenizer.encode(text) for text in texts]


def drafters(bench: Workbench) -> dict[str, Callable[[], Drafter]]:
    return {"n-gram": NgramDrafter, "trained": lambda: load_drafter(bench.model)}


def line(bench: Workbench, drafter: str, kind: str, temperature: float = 0.0, batch: int = 1, n: int = 24) -> dict:
    """Speed with guesses and without, in turn, and what the drafter got right (speculative_bench.py)."""
    texts, make = (2 * prompts(bench, kind))[:batch], drafters(bench)[drafter]
    if bench.quick:
        texts, n = [text[-12:] for text in texts], 5
    found = compare(model_of(bench), drafter, make, kind, texts, temperature, K, n, repeats=1)
    return {**asdict(found), "new_tokens": n}


def gpu_round(batch: int = 1, past: int = CONTEXT) -> float:
    """Least seconds of a pass of K + 1 rows for each text of an 8B model on an A100, in units of a pass of one."""
    model, gpu = MODELS["Llama-3.1-8B"], gpu_limits("A100 80GB SXM")
    verifying, plain = (step_work(model, rows, past, batch, rows, 2, 2).seconds(gpu) for rows in (K + 1, 1))
    return verifying / plain


def usual_lines(bench: Workbench) -> Figures:
    cases = [("n-gram", "prose"), ("n-gram", "copying")]
    cases += (
        [] if bench.quick else [("n-gram", "code"), ("trained", "prose"), ("trained", "code"), ("trained", "copying")]
    )
    several, one = (step_seconds(model_of(bench), CONTEXT, 1, rows, 2 if bench.quick else 9) for rows in (K + 1, 1))
    return {"lines": [line(bench, *case) for case in cases], "round": several / one}


@ledger.claim(
    "C7", sources="T1 T4", notebook="07_speculative_sampling", scope=THIS_MACHINE, measure=usual_lines, slow=True,
    text="Speculation is 1.5 to 5 times as fast; with less than half of the guesses accepted it may be slower",
)  # fmt: skip
def speculation_pays(figures: Figures) -> Finding:
    least, half, noise, lines = 1.5, 0.5, 0.05, figures["lines"]
    factors = [each["speedup"] for each in lines]
    on_gpu = [each["tokens_per_round"] / gpu_round() for each in lines if each["drafter"] == "n-gram"]
    fast = [factor >= least for factor in (*factors, *on_gpu)]
    few = [each for each in lines if each["acceptance"] < half]
    slower = [each for each in few if each["speedup"] < 1 - noise]
    as_said = not few or bool(slower)
    best = max(lines, key=lambda each: each["speedup"])
    return Finding(
        best["speedup"],
        f"times plain decoding at best: {best['drafter']} on {best['workload']}",
        decide(any(fast), always=all(fast) and as_said),
        "The conditions: many guesses accepted, guesses for almost nothing, and a cheap check. Measured "
        + ", ".join(
            f"{each['speedup']:.2f} ({each['drafter']}, {each['workload']}, {each['acceptance']:.0%} accepted)"
            for each in lines
        )
        + f", each in one run of {written(lines)} tokens of one text; {len(slower)} of the {len(few)} with less than "
        f"half accepted were slower by more than the {noise:.0%} taken for noise. A check of {K + 1} rows on {CONTEXT} "
        f"tokens costs {figures['round']:.2f} steps here and {gpu_round():.2f} for an 8B model on an A100, where the "
        f"same look-ups, guessing for nothing, would reach {min(on_gpu):.2f} to {max(on_gpu):.2f} times at most.",
    )


def written(lines: list[dict]) -> str:
    """How many tokens a text each line has."""
    return " or ".join(f"{n}" for n in sorted({each["new_tokens"] for each in lines}))


def overlap(temperature: float) -> float:
    """The chance that a guess is accepted, for two distributions that peak at different tokens."""
    model, drafter = (torch.tensor(x, dtype=torch.float64) for x in ((2.0, 1.0, 0.0), (1.0, 2.0, 0.0)))
    p, q = ((x / temperature).softmax(0) for x in (model, drafter))
    return float(torch.minimum(p, q).sum())


def varied_lines(bench: Workbench) -> Figures:
    """The look-up on copied text, and one thing changed at a time. The first line is the unchanged one."""
    changes = [{}, {"temperature": 0.7}, {"batch": 2 if bench.quick else 4}]
    if not bench.quick:
        changes += [{"n": 64}, {"kind": "prose"}, {"temperature": 1.0}, {"batch": 8, "n": 16}]
    return {"lines": [line(bench, **{"drafter": "n-gram", "kind": "copying", **change}) for change in changes]}


@ledger.claim(
    "C8", sources="T4", notebook="07_speculative_sampling", scope=THIS_MACHINE, measure=varied_lines, slow=True,
    text="Speculation pays for batches of 1 to 4, temperatures up to 0.7, and long outputs",
)  # fmt: skip
def where_it_pays(figures: Figures) -> Finding:
    largest, warmest, alpha = 4, 0.7, 0.7
    lines = figures["lines"]
    inside = [each["batch"] <= largest and each["temperature"] <= warmest for each in lines]
    pays = [each["speedup"] > 1 for each in lines]
    among = [paid for paid, stated in zip(pays, inside, strict=True) if stated]
    beyond = [paid for paid, stated in zip(pays, inside, strict=True) if not stated]
    gain = expected_tokens(alpha, K)
    last = max(batch for batch in (2**i for i in range(13)) if gain > gpu_round(batch))
    crowd = 256
    short, long = (gain / gpu_round(crowd, past) for past in (CONTEXT, LONG))
    caches = crowd * LONG * 2 * MODELS["Llama-3.1-8B"].kv_elements_per_token
    cold, warm, hot = 0.3, 1, 5
    return Finding(
        lines[0]["speedup"],
        f"times plain decoding: {lines[0]['drafter']} on {lines[0]['workload']}, batch 1, temperature 0",
        decide(any(among), always=all(among) and not any(beyond)),
        "The text decides first: "
        + ", ".join(
            f"{each['speedup']:.2f} ({each['workload']}, T {each['temperature']:g}, batch {each['batch']}, "
            f"{each['new_tokens']} tokens)"
            for each in lines
        )
        + f"; one run each, with {K} guesses a round. By the roofline an 8B model on an A100 pays up to a batch of "
        f"about {last} at {alpha:.0%} acceptance, {K} free guesses a round and {CONTEXT} tokens of past. At batch "
        f"{crowd} speculation is {short:.2f} times as fast there, but {long:.2f} times on {LONG:,} tokens of past, "
        "since all rows of a check share one reading of a text's cache (if there is room for their "
        f"{caches / 1e9:.0f} GB). A higher temperature need not accept less of drawn guesses: two unlike distributions "
        "overlap by "
        f"{overlap(cold):.0%} at temperature {cold}, {overlap(warm):.0%} at {warm} and {overlap(hot):.0%} at {hot}.",
    )


def accepted_guesses(bench: Workbench) -> Figures:
    """[accepted, judged] guesses of each drafter on each kind of text, greedily; the machine's speed plays no part."""
    found: dict[str, dict[str, list[int]]] = {}
    n_texts, n = (1, 3) if bench.quick else (TEXTS, WRITTEN)
    for name, make in drafters(bench).items():
        found[name], drafter = {}, make()
        for kind in ("prose", "code", "mathematics", "copying"):
            rounds = []
            for text in prompts(bench, kind)[:n_texts]:
                watched = Watched(drafter)
                text = text[-12:] if bench.quick else text
                speculative.generate(bench.model, None, text, watched, greedy(n), k=K)
                rounds += watched.rounds
            found[name][kind] = [sum(r.accepted for r in rounds), sum(r.judged for r in rounds)]
    return found


def rate(accepted: int, judged: int) -> tuple[float, float]:
    """A share and its standard error, as if guesses were independent; one right and one wrong are added, so that few
    guesses are not taken for certainty."""
    share = (accepted + 1) / (judged + 2)
    return share, math.sqrt(share * (1 - share) / (judged + 2))


@ledger.claim(
    "C9", sources="T4", text="Code and mathematics are harder to guess than prose", notebook="07_speculative_sampling",
    scope=ALGORITHM, measure=accepted_guesses, slow=True,
)  # fmt: skip
def harder_to_guess(figures: Figures) -> Finding:
    sure = 2  # standard errors
    differences = {}
    for drafter, kinds in figures.items():
        prose, prose_error = rate(*kinds["prose"])
        for kind in ("code", "mathematics"):
            share, error = rate(*kinds[kind])
            differences[drafter, kind] = (share - prose) / math.hypot(error, prose_error)
    harder = [difference < -sure for difference in differences.values()]
    easier = [difference > sure for difference in differences.values()]
    shares = {(d, kind): accepted / max(1, n) for d, kinds in figures.items() for kind, (accepted, n) in kinds.items()}
    gap = 100 * (shares["n-gram", "code"] - shares["n-gram", "prose"])
    sign = "fewer" if gap < 0 else "more"
    looked_at = [n for kinds in figures.values() for _, n in kinds.values()]
    return Finding(
        abs(gap),
        f"percentage points {sign} of the look-up's guesses are accepted in code than in prose",
        decide(any(harder), all(harder)) if any(harder + easier) else Verdict.NOT_TESTABLE,
        "Accepted: "
        + ", ".join(f"{share:.0%} ({drafter}, {kind})" for (drafter, kind), share in shares.items())
        + f". Of {len(differences)} comparisons with prose these are harder by more than {sure} standard errors: "
        + (", ".join(named(differences, harder)) or "none")
        + "; easier: "
        + (", ".join(named(differences, easier)) or "none")
        + ". It depends on drafter and text: a look-up likes whatever repeats itself, also prose that a small model "
        f"writes in circles. The sample is small: {TEXTS} texts of each kind in a full run, {WRITTEN} tokens of each; "
        f"{min(looked_at)} to {max(looked_at)} guesses were looked at. C7's one text of each kind is another sample.",
    )


def named(differences: dict[tuple[str, str], float], chosen: list[bool]) -> list[str]:
    return [f"{kind} ({drafter})" for (drafter, kind), taken in zip(differences, chosen, strict=True) if taken]
