"""What the commands do that write texts and look after the model's file; those of the course are in lab/commands.py.
Heavy imports stand inside the functions, so that --help is quick."""

from __future__ import annotations

import argparse
import re
import sys

RESET = "/reset"


def sampling_params(options: argparse.Namespace, logprobs: int | None = None):
    from minillm.sampling import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop=options.stop,
        stop_ids=options.stop_id,
        ignore_eos=options.ignore_eos,
        logprobs=logprobs,
    )


def load_model(options: argparse.Namespace):
    import torch

    from minillm.checkpoint import load

    if options.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, not {options.device!r}")
    index = int(options.device.partition(":")[2] or 0) if options.device not in (None, "cpu") else -1
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device {options.device}: PyTorch sees no such GPU here")
    native = {"weights": "native", "compute": torch.bfloat16} if options.weights == "native" else {}
    return load(options.model, dtype=getattr(torch, options.dtype), device=options.device, **native)


def generate(options: argparse.Namespace) -> None:
    params = sampling_params(options, options.logprobs)  # before the model: a wrong option should not wait for it
    prompt = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
    if not prompt:
        raise ValueError("the prompt is empty: there is nothing to continue")
    model, tokenizer = load_model(options)

    from minillm.generation import stream
    from minillm.model import NoCache

    done = []
    pieces = stream(model, tokenizer, prompt, params, NoCache() if options.no_cache else None)
    if not options.ids:  # printed after `stream` has taken the prompt
        print(prompt, end="", flush=True)
    for piece in pieces:
        print(f"{piece.token} " if options.ids else piece.text, end="", flush=True)
        done.append(piece)
    print()
    if options.logprobs is not None:
        for piece in done:
            best = ", ".join(f"{tokenizer.piece(t)!r} {lp:.3f}" for t, lp in piece.top_logprobs.items())
            print(f"{tokenizer.piece(piece.token)!r:20} {piece.logprob:8.3f}   {best}")
    print(f"[{summary(done)}]", file=sys.stderr)


def summary(pieces: list) -> str:
    """What `generate` says of the speed when it is done."""
    if not pieces:
        return "no token was asked for, or the prompt fills the context"
    first, last = pieces[0], pieces[-1]
    rate = "" if len(pieces) < 2 else f", {(len(pieces) - 1) / (last.seconds - first.seconds):.1f} tokens/s after it"
    return f"{len(pieces)} tokens, first after {first.seconds * 1e3:.0f} ms{rate}; ended by {last.finish_reason}"


def chat(options: argparse.Namespace) -> None:
    params = sampling_params(options)
    model, tokenizer = load_model(options)

    from minillm.chat import Chat

    chat = Chat(model, tokenizer, options.system)
    print(f"Type a message; {RESET} starts anew; an empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            break
        if not text:
            break
        if text == RESET:
            chat = Chat(model, tokenizer, options.system)
            continue
        try:
            for piece in chat.send(text, params):
                print(piece.text, end="", flush=True)
            print()
        except KeyboardInterrupt:  # ends the answer, not the conversation
            print()
        except ValueError as error:  # a message that does not fit changes nothing
            print(f"minillm: {error}; {RESET} starts anew", file=sys.stderr)


def fetch(options: argparse.Namespace) -> None:
    from minillm.fetch import ENVIRONMENT_VARIABLE, default_model, fetch

    if options.to is None:
        print(default_model())
        return
    if not options.to:
        raise ValueError("--to needs the name of a folder")
    file = fetch(options.to).resolve()
    print(file)
    print(f"to use it: set {ENVIRONMENT_VARIABLE}={file}", file=sys.stderr)


def doctor(options: argparse.Namespace) -> int:
    from minillm.lab.doctor import report

    text, healthy = report()
    print(text)
    return 0 if healthy else 1
