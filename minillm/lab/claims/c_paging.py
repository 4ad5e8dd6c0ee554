"""What reserving the cache in one piece wastes, and what blocks and shared prefixes bring.

Waste is counted by the real scheduler without a model (kv_memory.py): the same on every machine. Seconds are those of
the real engine on this one. What more memory brings a GPU is arithmetic (roofline.py).
"""

from __future__ import annotations

from statistics import mean

from minillm.engine import Engine
from minillm.lab.catalogue import GPUS, MODELS
from minillm.lab.claims.a_memory import weight_bytes
from minillm.lab.claims.decide import decide
from minillm.lab.claims.ledger import ALGORITHM, THIS_MACHINE, Figures, Finding, Ledger
from minillm.lab.claims.passes import greedy, model_of
from minillm.lab.claims.workbench import Workbench
from minillm.lab.kv_memory import Run, Text, exact_room, power_of_two_room, read_lengths, room_of, run_lengths
from minillm.lab.metrics import throughput
from minillm.lab.roofline import gpu_limits, step_work
from minillm.lab.serving import Arrival, cut, replay
from minillm.policies import Continuous, Policy, Static

ledger = Ledger()
LONGEST = 2048  # tokens that are set aside for a text whose length nobody knows


def waste(bench: Workbench) -> Figures:
    """The share of empty slots over time, for each kind of texts: in one piece of three sizes, and in blocks of 16."""
    rooms = {"maximum": room_of(LONGEST), "power of two": power_of_two_room, "true length": exact_room, "blocks": None}
    found = {}
    for kind in ("chat", "instructions"):
        texts = read_lengths(kind)[: 60 if bench.quick else None]
        run = run_lengths(texts, n_blocks=4096, block_size=16)
        found[kind] = {name: run.over_time(room).waste for name, room in rooms.items()}
    return found


@ledger.claim(
    "C3", sources="T4 T1", text="Contiguous reservation wastes 60 to 80 % of the cache's memory, paging under 4 %",
    notebook="05_paged_attention", scope=ALGORITHM, measure=waste,
)  # fmt: skip
def wasted_memory(figures: Figures) -> Finding:
    least, most, little, block = 0.6, 0.8, 0.04, 16
    pieces = {(kind, way): w for kind, ways in figures.items() for way, w in ways.items() if way != "blocks"}
    blocks = {kind: ways["blocks"] for kind, ways in figures.items()}
    inside = [least <= w <= most for w in pieces.values()]
    paged = [w < little for w in blocks.values()]
    empty = (block - 1) / 2  # slots of a text's last block
    needed = empty / little - empty
    return Finding(
        100 * max(blocks.values()),
        f"% of the slots in blocks of {block} are empty for the shorter kind of texts",
        decide(any(inside) and any(paged), all(inside + paged)),
        "In one piece, over time: "
        + ", ".join(f"{w:.0%} ({kind}, {way})" for (kind, way), w in pieces.items())
        + "; in blocks "
        + ", ".join(f"{w:.1%} ({kind})" for kind, w in blocks.items())
        + ". The conditions: reserved to a maximum of two and a half to five times the usual length; and at block size "
        f"{block} a mean of over {needed:.0f} tokens, since {empty} slots a text are empty whatever its length.",
    )


def gpu_gains(chat: Run) -> dict[str, float]:
    """Decode throughput with as many texts as fit in blocks, over that with the maximum set aside for each."""
    parts = sum(map(len, chat.steps))
    slots, past = chat.over_time().reserved / parts, chat.over_time().used // parts
    found = {}
    for name, card in (("Llama-2-7B", "RTX 4090"), ("Llama-2-7B", "A100 80GB SXM"), ("Llama-3.1-8B", "A100 80GB SXM"),
                       ("Qwen2.5-32B", "A100 80GB SXM")):  # fmt: skip
        model = MODELS[name]
        free = GPUS[card].memory - weight_bytes(model)
        texts = [int(free / (2 * model.kv_elements_per_token * each)) for each in (LONGEST, slots)]
        piece, blocks = (n / step_work(model, 1, past, n, 1, 2, 2).seconds(gpu_limits(card)) for n in texts)
        found[f"{name} on {card}"] = blocks / piece
    return found


def one_budget(bench: Workbench) -> Figures:
    """Tokens a second of the same texts in the same memory, by how it is given out; and what a GPU can gain."""
    shrink, n_texts = (128, 4) if bench.quick else (16, 32)
    reserve, chat = LONGEST // shrink, read_lengths("chat")
    budget = 4 * -(-reserve // 16)  # blocks: room for four texts of the longest length
    texts = [Text(max(1, t.prompt // shrink), max(1, t.output // shrink)) for t in chat[:n_texts]]
    trace = [Arrival(0.0, cut(bench.story.prompt, 5 * i, t.prompt), t.output) for i, t in enumerate(texts)]
    ways: dict[str, Policy] = {"reserved": Static(reserve), "blocks": Static(), "joining": Continuous()}
    rates, sizes = {}, {}
    for name, policy in ways.items():
        played = replay(Engine(model_of(bench), None, n_blocks=budget, sharing=False, policy=policy), trace)
        rates[name] = throughput(played.times)
        sizes[name] = mean(len(step.parts) for step in played.steps)
    chats = run_lengths(chat[: 60 if bench.quick else None], n_blocks=4096, block_size=16)
    return {"rates": rates, "texts a step": sizes, "gpu": gpu_gains(chats)}


@ledger.claim(
    "C4", sources="T1", text="PagedAttention brings 2 to 4 times the throughput", notebook="05_paged_attention",
    scope=THIS_MACHINE, measure=one_budget, slow=True,
)  # fmt: skip
def paged_throughput(figures: Figures) -> Finding:
    least, most = 2, 4
    rates, sizes = figures["rates"], figures["texts a step"]
    here = rates["blocks"] / rates["reserved"]
    inside = [least <= gain <= most for gain in (here, *figures["gpu"].values())]
    return Finding(
        here,
        "times the tokens a second through blocks, in the same memory",
        decide(any(inside), all(inside)),
        f"On this machine {sizes['blocks']:.1f} texts a step instead of {sizes['reserved']:.1f}; "
        f"{rates['joining'] / rates['reserved']:.1f} times with joining at every step too. By the roofline "
        + ", ".join(f"{gain:.1f} times ({where})" for where, gain in figures["gpu"].items())
        + ". The conditions: requests are waiting, and memory is so tight that the reserved batch is small beside what "
        "fills the GPU.",
    )


def shared_prefix(bench: Workbench) -> Figures:
    """TTFT of a first request, of one with the same beginning, and how much of the beginning each kind found."""
    shared, own = (128, 16) if bench.quick else (2000, 48)
    text = bench.story.prompt
    prompts = {name: cut(text, 0, shared) + cut(text, shared + at, own) for name, at in (("first", 3), ("second", 11))}
    prompts["changed"] = [text[1], *prompts["second"][1:]]  # another first token
    engine = Engine(model_of(bench), None, n_blocks=512, max_num_batched_tokens=4096)
    engine.generate([cut(text, 7, own)], greedy(1))  # to warm up
    found = {"shared": shared, "own": own}
    for name, prompt in prompts.items():
        request = engine.add(prompt, greedy(1))
        for _ in engine.stream(request):
            pass
        found[name] = {"ttft": request.ttft, "cached": request.cached_tokens}
    return found


@ledger.claim(
    "C14", sources="T4", text="With a shared prompt of 2,000 tokens, later requests skip its prefill",
    notebook="05_paged_attention", scope=THIS_MACHINE, measure=shared_prefix, slow=True,
)  # fmt: skip
def skipped_prefill(figures: Figures) -> Finding:
    nearly_all, sooner_at_least = 0.9, 2
    first, second, changed = (figures[name] for name in ("first", "second", "changed"))
    sooner = first["ttft"] / second["ttft"]
    skips = second["cached"] >= nearly_all * figures["shared"] and sooner >= sooner_at_least
    always = changed["cached"] >= nearly_all * figures["shared"]
    return Finding(
        sooner,
        "times sooner comes the first token of the second request",
        decide(skips, always),
        f"{second['cached']:,} of {figures['shared'] + figures['own']:,} tokens were not computed again; of the same "
        f"prompt with another first token {changed['cached']} were found. The conditions: the same tokens from the "
        "very first one on, and blocks that nobody evicted meanwhile. Only full blocks are found, and what is left "
        "attends to all of the past.",
    )
