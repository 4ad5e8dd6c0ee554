"""Pictures of speculative sampling: what is accepted of a guess, a text with its guesses, and what a round costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from matplotlib.patches import Patch
from torch import Tensor

from minillm import speculative
from minillm.chat import common_prefix
from minillm.lab.draw_sampling import bars, readable
from minillm.lab.plots import BLUE, GREEN, GREY, INK, KINDS, PURPLE, RED, Picture, cell, edge, picture, plain
from minillm.model import SequenceStore, Transformer
from minillm.sampling import SamplingParams
from minillm.speculative import Drafter, Proposal, expected_tokens
from minillm.tokenizer import Tokenizer
from minillm.writing import Writer

WORDS = {"guessed": "guess, accepted", "rejected": "guess, rejected", "generated": "the model's own"}
UNSEEN = {"free": "not looked at"}
LINE, MARKERS = 92.0, "os^Dv"  # the width of a line of text in letters
ACCEPTED = replace(KINDS["guessed"], label="accepted: min(p, q)")
REJECTED = replace(KINDS["rejected"], label="guessed too often: rejected")
MISSING = replace(KINDS["generated"], label="guessed too rarely: missing")


@dataclass(frozen=True)
class Turn:
    """One round as texts: the guesses, how many of them were accepted, and the model's own token behind those (none if
    an accepted guess ended the text)."""

    guesses: tuple[str, ...]
    accepted: int
    own: str | None

    @property
    def boxes(self) -> list[tuple[str, str]]:
        """(kind, text) in the order of reading. Guesses behind a rejected one were not looked at: "free"."""
        kinds = ["guessed"] * self.accepted
        kinds += ["rejected"] if self.own is not None and self.accepted < len(self.guesses) else []
        kinds += ["free"] * (len(self.guesses) - len(kinds))
        own = [] if self.own is None else [("generated", self.own)]
        return [*zip(kinds, self.guesses, strict=True), *own]


class Recorder:
    """A drafter whose proposals are written down: where they began, and the tokens."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.proposals: list[tuple[int, list[int]]] = []

    def propose(self, writers: Sequence[Writer], counts: Sequence[int]) -> list[Proposal]:
        proposals = self.drafter.propose(writers, counts)
        self.proposals += [(len(w.tokens), list(p.ids)) for w, p in zip(writers, proposals, strict=True)]
        return proposals

    def begin(self, writer: Writer, kv: SequenceStore) -> None:
        self.drafter.begin(writer, kv)

    def observe(self, writer: Writer, start: int, hidden: Tensor) -> None:
        self.drafter.observe(writer, start, hidden)

    def release(self, writer: Writer) -> None:
        self.drafter.release(writer)


def follow(
    model: Transformer, tokenizer: Tokenizer, prompt: Sequence[int], drafter: Drafter, params: SamplingParams, k: int
) -> list[Turn]:
    """Write one text with guesses, and tell its rounds. The first has none: the model reads the prompt."""
    recorder = Recorder(drafter)
    done = speculative.generate(model, tokenizer, prompt, recorder, params, k=k)
    return turns(done.prompt + done.tokens, len(done.prompt), recorder.proposals, tokenizer)


def turns(
    tokens: Sequence[int], start: int, proposals: Sequence[tuple[int, list[int]]], tokenizer: Tokenizer
) -> list[Turn]:
    """The rounds of a finished text, from its proposals. A round to which nobody was asked gave one token."""
    starts = [at for at, _ in proposals]
    told = [Turn((), 0, tokenizer.piece(token)) for token in tokens[start : starts[0] if starts else len(tokens)]]
    for (at, ids), (end, _) in pairwise([*proposals, (len(tokens), [])]):
        new = tokens[at:end]
        same = common_prefix(ids, new)
        own = [tokenizer.piece(token) for token in new[same:]] or [None]
        told.append(Turn(tuple(map(tokenizer.piece, ids)), same, own[0]))
        told += [Turn((), 0, text) for text in own[1:]]
    return told


def summary(told: Sequence[Turn]) -> str:
    accepted = sum(turn.accepted for turn in told)
    written = accepted + sum(turn.own is not None for turn in told)
    return f"{len(told)} passes of the model gave {written} tokens"


def draw_text(told: Sequence[Turn], step: int | None = None, before: str = "") -> Picture:
    """The text after a round, token by token, with what was rejected left in it. A bar stands between two rounds.

    step: the last round to be shown; None shows all. before: the end of the prompt.
    """
    told = told if step is None else told[: step + 1]
    kinds = [kind for turn in told for kind, _ in turn.boxes]
    counted = ", ".join(
        f"{kinds.count(kind)} {name}"
        for kind, name in (("guessed", "accepted"), ("rejected", "rejected"), ("generated", "of the model's own"))
    )
    title = f"{summary(told)}: {counted}"
    alt = f"A text as boxes, a box for a token. {title}."
    figure, axes = picture(9.5, 1, title, alt)
    x, y = 0.0, 0.0
    boxes = [[("prompt", before)]] if before else []
    for group in [*boxes, *(turn.boxes for turn in told)]:
        for kind, text in group:
            if kind == "free":
                continue
            label = readable(text)
            width = len(label) + 1.2
            if x + width > LINE:
                x, y = 0.0, y - 1.5
            cell(axes, x, y, kind, label, width)
            x += width + 0.2
        if x:
            axes.plot([x, x], [y - 0.12, y + 1.12], color=INK, linewidth=1.2)
            x += 0.4
    axes.set(xlim=(-0.5, LINE + 0.8), ylim=(y - 0.3, 1.3))
    axes.set_axis_off()
    figure.set_size_inches(9.5, 1.1 + 0.34 * (1 - y / 1.5))
    explain(figure, {"prompt": "prompt"} | WORDS if before else WORDS)
    return figure


def explain(figure: Picture, words: Mapping[str, str]) -> None:
    """What became of a guess, in words."""
    looks = [(KINDS[kind], label) for kind, label in words.items()]
    patches = [Patch(facecolor=k.color, hatch=k.hatch, edgecolor=edge(k), label=label) for k, label in looks]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)


def draw_rounds(told: Sequence[Turn], title: str | None = None) -> Picture:
    """The chain of guesses, a row a round: accepted up to the first that is not, and the model's own token behind."""
    title = title or summary(told)
    lengths = [turn.accepted for turn in told]
    alt = f"A row of boxes a round. {summary(told)}. Guesses accepted by round: {', '.join(map(str, lengths))}."
    figure, axes = picture(9, 1.1 + 0.34 * len(told), title, alt)
    most = max(len(turn.guesses) for turn in told)
    for row, turn in enumerate(told):
        for place, (kind, text) in enumerate(turn.boxes):
            own = place == len(turn.guesses)
            cell(axes, most + 0.3 if own else place, -row, kind, readable(text), 0.94, 0.84)
    axes.set(xlim=(0, most + 1.3), ylim=(0.1 - len(told), 1))
    axes.set_yticks([0.42 - row for row in range(len(told))], [f"round {row + 1}" for row in range(len(told))])
    names = [f"guess {place + 1}" for place in range(most)]
    axes.set_xticks([*(place + 0.47 for place in range(most)), most + 0.77], [*names, "the model's own"])
    axes.xaxis.tick_top()
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0, labelcolor=INK)
    explain(figure, WORDS | UNSEEN)
    return figure


def draw_one_guess(p: Sequence[float], q: Sequence[float], names: Sequence[str] | None = None) -> Picture:
    """What becomes of one guess: q cut into accepted and rejected, p into accepted and missing, and the residual."""
    names = [str(i) for i in range(len(p))] if names is None else names
    both = [min(a, b) for a, b in zip(p, q, strict=True)]
    missing = [a - m for a, m in zip(p, both, strict=True)]
    total = sum(missing)
    residual = [m / total for m in missing] if total > 0 else list(p)
    said = "; ".join(
        f"{n}: p {a:.2f}, q {b:.2f}, residual {r:.2f}" for n, a, b, r in zip(names, p, q, residual, strict=True)
    )
    alt = f"Bars for each token. {said}. Accepted in all {sum(both):.2f}, rejected {1 - sum(both):.2f}."
    figure = Picture(9.2, 3.5, alt)
    panels = figure.subplots(1, 3)
    stacks = (
        ("q: the drafter guesses", [(both, ACCEPTED), ([b - m for b, m in zip(q, both, strict=True)], REJECTED)]),
        ("p: what must come out", [(both, ACCEPTED), (missing, MISSING)]),
        ("residual: after a rejection", [(residual, MISSING)]),
    )
    for axes, (name, parts) in zip(panels, stacks, strict=True):
        plain(axes)
        axes.set_title(name, loc="left", fontsize=10)
        floor = [0.0] * len(p)
        for heights, look in parts:
            axes.bar(range(len(p)), heights, 0.7, floor, color=look.color, hatch=look.hatch, edgecolor="white")
            floor = [low + high for low, high in zip(floor, heights, strict=True)]
        for i, height in enumerate(floor):
            axes.annotate(f"{height:.2f}", (i, height), (0, 2), textcoords="offset points", ha="center", fontsize=9)
        axes.set_xticks(range(len(p)), names)
        axes.set_ylim(0, 1.08)
        axes.tick_params(labelcolor=INK)
    figure.suptitle(
        f"{sum(both):.0%} of the guesses pass; what was rejected is drawn again where q was too small", fontsize=11
    )
    handles = [
        panels[0].bar(0, 0, color=look.color, hatch=look.hatch, edgecolor="white", label=look.label)
        for look in (ACCEPTED, REJECTED, MISSING)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def draw_verify_cost(
    rows: Sequence[int], measured: Sequence[float], roofline: Mapping[str, Sequence[float]]
) -> Picture:
    """The time of a pass by the tokens in it, in units of a pass of one token: measured, and by each roofline."""
    ends = "; ".join(f"{name}: {values[-1]:.2f} times" for name, values in roofline.items())
    alt = f"Lines over tokens in a pass, from {rows[0]} to {rows[-1]}. Measured here: {measured[-1]:.2f} times; {ends}"
    title = f"A pass of {rows[-1]} tokens takes {measured[-1]:.1f} times a pass of one token here, not {rows[-1]} times"
    figure, axes = picture(8.5, 3.6, title, alt)
    axes.plot(rows, measured, color=PURPLE, marker="o", label="measured on this machine")
    for (name, values), (color, style) in zip(
        roofline.items(), ((BLUE, "--"), (GREEN, ":"), (INK, "-.")), strict=False
    ):
        axes.plot(rows, values, color=color, linestyle=style, label=name)
    axes.plot(rows, rows, color=GREY, linewidth=0.8, label="one after the other")
    axes.set(xlabel="tokens in one pass", ylabel="times a pass of one token", ylim=(0, max(2.0, 1.3 * max(measured))))
    axes.set_xticks(list(rows))
    axes.legend(frameon=False, fontsize=9)
    return figure


def draw_expected(ks: Sequence[int], measured: Mapping[float, Sequence[float]]) -> Picture:
    """Tokens a round by the number of guesses: the formula as lines, what was counted as marks.

    measured: for each acceptance, the mean tokens a round at each k.
    """
    last = "; ".join(f"acceptance {a:g}: {expected_tokens(a, ks[-1]):.2f}" for a in measured)
    alt = f"Curves that flatten out. At {ks[-1]} guesses, {last}. The marks counted in a simulation lie on them."
    figure, axes = picture(8.5, 3.6, "More guesses soon bring nothing, unless nearly all are accepted", alt)
    colors = (BLUE, PURPLE, GREEN, RED, INK)
    for (a, counted), color, marker in zip(measured.items(), colors, MARKERS, strict=False):
        axes.plot(ks, [expected_tokens(a, k) for k in ks], color=color)
        axes.plot(ks, counted, color=color, marker=marker, linestyle="", label=f"acceptance {a:g}")
    axes.set(xlabel="guesses a round, K", ylabel="tokens a round", ylim=(0, None))
    axes.set_xticks(list(ks))
    axes.legend(frameon=False, fontsize=9)
    return figure


def by_place(told: Sequence[Turn]) -> list[tuple[int, int]]:
    """(guesses accepted, guesses looked at) at each place of the chain."""
    most = max(len(turn.guesses) for turn in told)
    judged = [turn.boxes for turn in told if turn.guesses]
    seen = [[boxes[i][0] for boxes in judged if i < len(boxes)] for i in range(most)]
    return [(kinds.count("guessed"), kinds.count("guessed") + kinds.count("rejected")) for kinds in seen]


def draw_places(texts: Mapping[str, Sequence[Turn]]) -> Picture:
    """The share of the guesses accepted at each place, given that all before it were."""
    shares = {name: [(a, n) for a, n in by_place(told) if n] for name, told in texts.items()}
    alt = "Bars by place in the chain. " + "; ".join(
        f"{name}: {', '.join(f'{a} of {n}' for a, n in pairs)}" for name, pairs in shares.items()
    )
    figure = Picture(9, 3.2, alt)
    panels = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    for axes, (name, pairs) in zip(panels, shares.items(), strict=True):
        plain(axes)
        bars(axes, range(len(pairs)), [a / n for a, n in pairs], KINDS["guessed"])
        mean = sum(a for a, _ in pairs) / sum(n for _, n in pairs)
        axes.axhline(mean, color=INK, linestyle="--", linewidth=1)
        axes.set_xticks(range(len(pairs)), [f"guess {i + 1}\n{a} of {n}" for i, (a, n) in enumerate(pairs)])
        axes.tick_params(labelcolor=INK)
        axes.set_title(f"{name}: on average {mean:.0%} (dashed)", loc="left", fontsize=10)
        axes.set_ylim(0, 1.05)
    panels[0].set_ylabel("share accepted")
    figure.suptitle("In real texts acceptance differs from text to text, and from place to place", fontsize=11)
    return figure


def draw_speedups(lines: Mapping[str, tuple[float, float]]) -> Picture:
    """Times as fast as plain decoding, (predicted, measured) by setting. Left of the line at 1 guessing costs time."""
    slower = sum(measured < 1 for _, measured in lines.values())
    alt = "Horizontal bars, measured, with a mark where predicted. " + "; ".join(
        f"{name}: measured {m:.2f}, predicted {p:.2f}" for name, (p, m) in lines.items()
    )
    title = f"Guessing is slower than plain decoding in {slower} of {len(lines)} settings"
    figure, axes = picture(9, 1.4 + 0.3 * len(lines), title, alt)
    for y, (predicted, measured) in enumerate(lines.values()):
        look = KINDS["generated"] if measured >= 1 else KINDS["rejected"]
        axes.barh(y, measured, 0.66, color=look.color, hatch=look.hatch, edgecolor="white")
        axes.plot(predicted, y, color=INK, marker="D", markersize=5, linestyle="")
        word = "faster" if measured >= 1 else "slower"
        place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": 9, "zorder": 4}
        note = axes.annotate(f"{measured:.2f} {word}", (max(measured, predicted), y), **place)
        note.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.axvline(1, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(max(pair) for pair in lines.values()))
    axes.set_xlabel("times as fast as plain decoding (diamond: predicted)")
    axes.tick_params(labelcolor=INK)
    return figure
