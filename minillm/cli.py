"""The `minillm` command. Parsing and errors; what the commands do is in commands.py and lab/commands.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from minillm import __version__, commands
from minillm.lab import commands as course


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. A mistake of the user's gives one sentence on stderr and a non-zero status."""
    options = build_parser().parse_args(argv)
    try:
        status = options.run(options)
        sys.stdout.flush()  # a pipe that is closed shall be noticed here, not when Python ends
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone, as `| head` does
            sys.stderr.close()
            sys.exit(1)
        print(f"minillm: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    sys.exit(status or 0)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minillm", description="How LLM inference works, one technique at a time.")
    parser.add_argument("--version", action="version", version=f"minillm {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = subparsers.add_parser("generate", help="continue a text")
    command.add_argument(
        "prompt", help="the text to continue; - reads it from standard input (without its last line end)"
    )
    command.add_argument("--no-cache", action="store_true", help="recompute everything at every step (stage 1)")
    command.add_argument("--ids", action="store_true", help="print token ids instead of text")
    command.add_argument(
        "--logprobs", type=int, metavar="N", help="after the text, list each token's log-probability and the N best"
    )
    add_model_options(command)
    add_sampling_options(command)
    command.set_defaults(run=commands.generate)

    command = subparsers.add_parser("chat", help="talk with the model; it keeps its cache between turns")
    command.add_argument("--system", help="the system message; the model's own if not given")
    add_model_options(command)
    add_sampling_options(command)
    command.set_defaults(run=commands.chat)

    command = subparsers.add_parser(
        "ladder", help="measure every stage on the real model and check that the tokens are the same"
    )
    command.add_argument("--quick", action="store_true", help="smaller sizes, about a minute")
    command.add_argument("--json", metavar="FILE", help="write the result as JSON")
    command.add_argument("--plot", metavar="FILE", help="draw the result as a png")
    command.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    command.set_defaults(run=course.ladder)

    command = subparsers.add_parser("bench", help="measure against other implementations")
    benches = command.add_subparsers(title="benchmarks", required=True, metavar="WHAT")
    peers = benches.add_parser("peers", help="transformers and, where installed, llama.cpp, with the same weights")
    peers.add_argument("--json", metavar="FILE", help="write the result as JSON")
    peers.set_defaults(run=course.peers)
    add_serving(benches)
    guessing = benches.add_parser("speculative", help="speculative sampling: when does it pay?")
    guessing.add_argument("--quick", action="store_true", help="short texts, one run of each")
    guessing.add_argument("--json", metavar="FILE", help="write the result as JSON")
    guessing.set_defaults(run=course.speculative)
    grids = benches.add_parser("quant", help="quantized weights: what do they cost, and what do they bring?")
    grids.add_argument("--quick", action="store_true", help="a short text, few cases, one run of each")
    grids.add_argument(
        "--json", metavar="FILE", help="write each result as JSON when it is there; go on with that file"
    )
    grids.add_argument(
        "--only", action="append", choices=course.QUANT_PARTS, help="a part of it; may be given several times"
    )
    grids.set_defaults(run=course.quant)

    command = subparsers.add_parser("claims", help="what is often said about LLM inference, and what holds of it")
    command.add_argument("--only", action="append", metavar="ID", help="one claim, as A5; may be given several times")
    command.add_argument("--fresh", action="store_true", help="measure everything here: reuse no stored figures")
    command.add_argument("--quick", action="store_true", help="smaller sizes where something is measured")
    command.add_argument("--json", metavar="FILE", help="write the result as JSON")
    command.set_defaults(run=course.claims)

    add_advise(subparsers)

    command = subparsers.add_parser(
        "check", help="run the checks of an exercise notebook, for example: minillm check 02"
    )
    command.add_argument("number", help="the notebook's two digits")
    command.set_defaults(run=course.check)

    command = subparsers.add_parser("progress", help="which exercise tasks have been passed")
    command.set_defaults(run=course.progress)

    command = subparsers.add_parser("exercises", help="for teachers: make exercises/ from solutions/")
    action = command.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the exercises that are out of date")
    action.add_argument("--check", action="store_true", help="fail if any is out of date, missing or left over")
    command.set_defaults(run=course.exercises)

    command = subparsers.add_parser("notebooks", help="for authors: run lecture notebooks and store their outputs")
    command.add_argument("numbers", nargs="+", metavar="NN", help="the notebooks' two digits")
    command.add_argument("--fast", action="store_true", help="small sizes, and store nothing: does it run?")
    command.set_defaults(run=course.notebooks)

    command = subparsers.add_parser("fetch", help="get the default model's file")
    command.add_argument(
        "--to", metavar="DIR", help="put a copy into DIR, for a classroom or a machine without network"
    )
    command.set_defaults(run=commands.fetch)

    command = subparsers.add_parser("doctor", help="what this machine has, what can run here, and how to mend it")
    command.set_defaults(run=commands.doctor)
    return parser


def add_advise(subparsers: argparse._SubParsersAction) -> None:
    guide = subparsers.add_parser("advise", help="which techniques pay for your workload and machine, by the roofline")
    guide.add_argument("--model", default="SmolLM2-135M", help="of the course's catalogue (default: %(default)s)")
    guide.add_argument("--gpu", metavar="NAME", help="of the catalogue (default: this machine, measured)")
    guide.add_argument("--memory-gb", type=float, metavar="X", help="another memory than the machine's, in 10^9 bytes")
    guide.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens in (default: %(default)s)")
    guide.add_argument("--output", type=int, default=128, metavar="N", help="tokens out (default: %(default)s)")
    load = guide.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, metavar="N", help="requests at a time (default: 8)")
    load.add_argument("--rate", type=float, metavar="X", help="instead: requests that arrive a second")
    guide.add_argument("--ttft-ms", type=float, metavar="X", help="goal for the time to the first token")
    guide.add_argument("--tpot-ms", type=float, metavar="X", help="goal for the time of each further one")
    guide.add_argument(
        "--shared", type=int, default=0, metavar="N", help="tokens that all prompts begin with (default: %(default)s)"
    )
    guide.add_argument(
        "--spread", type=float, default=0.8, metavar="X",
        help="sigma of the outputs' log-normal lengths; 0: all alike (default: %(default)s)",
    )  # fmt: skip
    guide.add_argument("--reserve", type=int, metavar="N", help="tokens a request sets aside without paging")
    guide.add_argument(
        "--acceptance", type=float, metavar="A", help="of a drafter's guess, from 0 to 1, if you know it"
    )
    guide.add_argument(
        "--draft-cost", type=float, default=0.0, metavar="C", help="of a guess, in plain steps (default: %(default)s)"
    )
    guide.add_argument("--bits", type=int, metavar="N", help="of a weight: 4, 8, 16 (default: the machine's)")
    guide.add_argument(
        "--efficiency", type=float, default=1.0, metavar="E", help="share of the limits that is reached (default: 1)"
    )
    guide.add_argument("--json", metavar="FILE", help="write the result as JSON")
    guide.set_defaults(run=course.advise)


def add_serving(benches: argparse._SubParsersAction) -> None:
    serving = benches.add_parser("serving", help="one trace of requests under static, dynamic and continuous batching")
    serving.add_argument("--trace", metavar="FILE", help="JSON lines with at, prompt_tokens and max_tokens")
    serving.add_argument("--requests", type=int, default=40, help="without a trace: how many (default: %(default)s)")
    serving.add_argument("--rate", type=float, default=1.5, help="without a trace: a second (default: %(default)s)")
    serving.add_argument("--seed", type=int, default=0, help="of the trace's arrivals and lengths")
    serving.add_argument("--max-num-seqs", type=int, default=16, help="requests at a time (default: %(default)s)")
    serving.add_argument(
        "--timeout", type=float, default=2.0, help="seconds that dynamic batching collects (default: %(default)s)"
    )
    serving.add_argument("--slo-ttft", type=float, default=2.0, help="target in seconds (default: %(default)s)")
    serving.add_argument("--slo-tpot", type=float, default=0.2, help="target in seconds (default: %(default)s)")
    serving.add_argument("--json", metavar="FILE", help="write the result as JSON")
    serving.set_defaults(run=course.serving)


def add_model_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model",
        default="smollm2-135m",
        help="a GGUF file, a Hugging Face folder, a .safetensors file that minillm saved, or a hub name "
        "(default: %(default)s)",
    )
    command.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16", "float64"))
    command.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    command.add_argument(
        "--weights",
        default="float",
        choices=("float", "native"),
        help="native: keep a GGUF file's own 4 and 8 bits; for these and for a saved quantized model, products in "
        "bfloat16 (default: %(default)s)",
    )


def add_sampling_options(command: argparse.ArgumentParser) -> None:
    """One option for each field of SamplingParams. Here the default is greedy, so that a text can be repeated."""
    group = command.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, default=0, help="keep the k best tokens; 0 is off")
    group.add_argument("--top-p", type=float, default=1.0, help="keep the smallest set that reaches p; 1 is off")
    group.add_argument(
        "--min-p", type=float, default=0.0, help="keep tokens at least this probable relative to the best; 0 is off"
    )
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is off")
    group.add_argument("--presence-penalty", type=float, default=0.0, help="0 is off")
    group.add_argument("--frequency-penalty", type=float, default=0.0, help="0 is off")
    group.add_argument("--seed", type=int, help="the same seed gives the same text")
    group.add_argument("--max-tokens", type=int, default=128)
    group.add_argument("--min-tokens", type=int, default=0)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be given several times"
    )
    group.add_argument(
        "--stop-id",
        action="append",
        type=int,
        default=[],
        metavar="ID",
        help="end at this token; may be given several times",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")
