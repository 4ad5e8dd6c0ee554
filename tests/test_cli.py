"""The command line does what the functions do, and meets every mistake with one sentence.

Most tests call `main` in this process, with the real model that the other tests have loaded already. What is promised
of a process (quick help, exit status, a closed pipe) is checked in a child process.
"""

from __future__ import annotations

import builtins
import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minillm
from minillm import cli, commands
from minillm.fetch import ENVIRONMENT_VARIABLE, FILE_NAME, FILE_SHA256, default_model
from minillm.generation import generate
from minillm.kv_cache import ContiguousKV
from minillm.lab.roofline import Limits
from minillm.lab.serving import Arrival
from minillm.lab.workload import Requests, Workload
from minillm.model import NoCache
from minillm.sampling import SamplingParams

PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0, max_tokens=8)
SHORT = ["--max-tokens", "8"]


def run(*argv: str) -> int:
    """The status with which `minillm ARGV` ends."""
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    return ended.value.code


COMMAND = [sys.executable, "-m", "minillm"]
# One thread: two busy processes on two cores would wait for each other more than they work.
ENVIRONMENT = {**os.environ, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}


def child(*argv: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, *argv],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**ENVIRONMENT, **environment},
    )


@pytest.fixture
def loaded(smollm2, monkeypatch):
    """The commands get the model that is loaded already. -> (model, tokenizer)"""
    monkeypatch.setattr("minillm.checkpoint.load", lambda *args, **kwargs: smollm2)
    return smollm2


@pytest.fixture
def never_loaded(monkeypatch):
    """The commands must not even begin to load a model."""
    monkeypatch.setattr("minillm.checkpoint.load", lambda *args, **kwargs: pytest.fail("a model was loaded"))


def stdin_is(monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# The process.


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["--version"], ["generate"]], ids=" ".join)
def test_help_and_wrong_arguments_answer_without_importing_torch(argv):
    code = f"""
import sys
from minillm.cli import main
try:
    main({argv})
finally:
    heavy = {{"torch", "numpy", "transformers", "tokenizers", "gguf", "matplotlib"}} & sys.modules.keys()
    print("imported:", *sorted(heavy))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == (2 if argv == ["generate"] else 0)
    assert done.stdout.splitlines()[-1].strip() == "imported:"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["generate"],
        ["generate", "hi", "there"],
        ["generate", "hi", "--no-such-option"],
        ["generate", "hi", "--max-tokens", "many"],
        ["generate", "hi", "--temperature", "warm"],
        ["generate", "hi", "--dtype", "int3"],
        ["bench"],
        ["fetch", "somewhere"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_end_with_status_2_and_the_usage(argv, capsys, never_loaded):
    assert run(*argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: minillm") and "error:" in err


def test_python_m_minillm_is_the_command():
    done = child("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"minillm {minillm.__version__}\n", "")


def test_the_help_names_every_command(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    for command in ("generate", "chat", "ladder", "bench", "fetch", "doctor"):
        assert f"\n    {command} " in text


@pytest.mark.parametrize(
    ("argv", "read", "unbuffered"),
    [
        (["generate", PROMPT, "--max-tokens", "40"], 5, ""),  # the reader goes in the middle of the text
        (["fetch"], 0, ""),  # and here before the little there is to print
        (["fetch"], 0, "1"),
    ],
    ids=["generate", "fetch", "fetch, unbuffered"],
)
def test_a_closed_pipe_ends_quietly(argv, read, unbuffered):
    process = subprocess.Popen(
        [*COMMAND, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered},
    )
    assert os.read(process.stdout.fileno(), read) == PROMPT[:read].encode()
    process.stdout.close()
    error = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() != 0
    assert error == ""


def test_ctrl_c_ends_with_its_own_status_and_no_traceback(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "fetch", interrupted)
    assert run("fetch") == 130
    assert capsys.readouterr().err == "\n"


# Mistakes.


def assert_one_sentence(status: int, out: str, err: str, saying: str) -> None:
    assert status == 1
    assert out == ""
    assert err.startswith("minillm: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "Traceback" not in err
    assert saying in err


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        (["--temperature", "-0.5"], "temperature must be 0 (greedy) or more, not -0.5"),
        (["--temperature", "nan"], "temperature must be a finite number, not nan"),
        (["--top-p", "0"], "top_p must be above 0"),
        (["--top-p", "1.5"], "top_p must be above 0 and at most 1"),
        (["--top-k", "-1"], "top_k must be 0 (off)"),
        (["--min-p", "2"], "min_p must be between 0"),
        (["--repetition-penalty", "0"], "repetition_penalty must be above 0"),
        (["--max-tokens", "-1"], "max_tokens must be 0"),
        (["--min-tokens", "20", "--max-tokens", "10"], "min_tokens must be at most max_tokens (10), not 20"),
        (["--seed", "-1"], "seed must be"),
        (["--stop", ""], "stop strings must not be empty"),
        (["--logprobs", "-1"], "logprobs must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_number_is_refused_before_the_model_is_loaded(options, saying, capsys, never_loaded):
    status = run("generate", PROMPT, *options)
    assert_one_sentence(status, *capsys.readouterr(), saying)


@pytest.mark.parametrize("prompt", ["", "-"])
def test_an_empty_prompt_is_refused_before_the_model_is_loaded(prompt, capsys, monkeypatch, never_loaded):
    stdin_is(monkeypatch, "")
    assert_one_sentence(run("generate", prompt), *capsys.readouterr(), "the prompt is empty")


@pytest.mark.parametrize("command", [["generate", PROMPT], ["chat"]], ids=["generate", "chat"])
@pytest.mark.parametrize("name", ["no-such-model", "./no/such/model.gguf", "/no/such"])
def test_an_unknown_model_is_refused(command, name, capsys):
    status = run(*command, "--model", name)
    assert_one_sentence(status, *capsys.readouterr(), f"there is no file or folder {name!r}")


def test_a_file_that_is_no_model_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("not a model\n" * 100)
    status = run("generate", PROMPT, "--model", str(tmp_path / "notes.txt"))
    assert_one_sentence(status, *capsys.readouterr(), "notes.txt is neither a GGUF file nor a Hugging Face folder")


def test_a_folder_that_is_no_model_is_refused(tmp_path, capsys):
    status = run("generate", PROMPT, "--model", str(tmp_path))
    assert_one_sentence(status, *capsys.readouterr(), "has no config.json")


def test_half_a_model_file_is_refused(tmp_path, capsys):
    with default_model().open("rb") as whole:
        (tmp_path / "half.gguf").write_bytes(whole.read(2**16))
    status = run("generate", PROMPT, "--model", str(tmp_path / "half.gguf"))
    assert_one_sentence(status, *capsys.readouterr(), "half.gguf is not a complete GGUF file")


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(device, capsys, monkeypatch, never_loaded):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    status = run("generate", PROMPT, "--device", device)
    assert_one_sentence(status, *capsys.readouterr(), f"--device {device}: PyTorch sees no such GPU here")


def test_an_unknown_device_is_refused(capsys, never_loaded):
    status = run("generate", PROMPT, "--device", "tpu")
    assert_one_sentence(status, *capsys.readouterr(), "--device must be cpu, cuda or cuda:N, not 'tpu'")


@pytest.mark.parametrize("stop_id", ["49152", "-1"])
def test_an_unknown_stop_id_is_refused(stop_id, capsys, loaded):
    status = run("generate", PROMPT, "--stop-id", stop_id)
    assert_one_sentence(status, *capsys.readouterr(), "must be token ids from 0 to 49151")


def test_a_prompt_longer_than_the_context_is_refused(capsys, loaded):
    status = run("generate", "word " * 9000)
    assert_one_sentence(status, *capsys.readouterr(), "tokens; the context ends at 8192")


def test_a_prompt_that_is_not_utf_8_is_refused(capsys, loaded):
    """Such an argument arrives with a surrogate in the place of each byte."""
    assert_one_sentence(run("generate", "caf\udce9"), *capsys.readouterr(), "not valid Unicode")


@pytest.mark.parametrize(
    "argv", [["ladder"], ["ladder", "--plot"], ["bench", "peers"], ["bench", "serving"]], ids=" ".join
)
@pytest.mark.parametrize("target", ["missing/out", "."])
def test_a_result_file_that_cannot_be_written_is_refused_before_measuring(
    argv, target, tmp_path, capsys, monkeypatch, never_loaded
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("minillm.lab.machine.describe", lambda: pytest.fail("measuring has begun"))
    option = [] if argv[-1] == "--plot" else ["--json"]
    status = run(*argv, *option, target)
    assert_one_sentence(status, *capsys.readouterr(), f"{target} cannot be written")


def test_a_wrong_name_in_the_environment_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "moved.gguf"))
    for argv in (["generate", PROMPT], ["fetch"]):
        assert_one_sentence(run(*argv), *capsys.readouterr(), f"{ENVIRONMENT_VARIABLE} names")


def test_a_mistake_in_a_real_process_gives_one_line_and_a_status():
    """The whole way, and with no network for a name that could be a hub's."""
    done = child("generate", PROMPT, "--model", "nobody/no-such-model", HF_HUB_OFFLINE="1")
    assert_one_sentence(done.returncode, done.stdout, done.stderr, "there is no folder 'nobody/no-such-model' here")


def test_a_message_of_several_lines_is_printed_on_one(monkeypatch, capsys):
    """As libraries write them."""

    def refused(options):
        raise OSError("no such\n\n    place")

    monkeypatch.setattr(commands, "fetch", refused)
    assert run("fetch") == 1
    assert capsys.readouterr().err == "minillm: no such place\n"


def test_our_own_mistakes_are_not_hidden(monkeypatch):
    def broken(options):
        raise AssertionError("a bug")

    monkeypatch.setattr(commands, "fetch", broken)
    with pytest.raises(AssertionError, match="a bug"):
        cli.main(["fetch"])


# Options.

EVERY_OPTION = {
    "temperature": (0.5, "--temperature 0.5"),
    "top_k": (7, "--top-k 7"),
    "top_p": (0.8, "--top-p 0.8"),
    "min_p": (0.1, "--min-p 0.1"),
    "repetition_penalty": (1.2, "--repetition-penalty 1.2"),
    "presence_penalty": (0.3, "--presence-penalty 0.3"),
    "frequency_penalty": (0.4, "--frequency-penalty 0.4"),
    "seed": (9, "--seed 9"),
    "max_tokens": (33, "--max-tokens 33"),
    "min_tokens": (3, "--min-tokens 3"),
    "stop": (("a", "b"), "--stop a --stop b"),
    "stop_ids": ((4, 5), "--stop-id 4 --stop-id 5"),
    "ignore_eos": (True, "--ignore-eos"),
    "logprobs": (2, "--logprobs 2"),
}


def parsed(*argv: str) -> SamplingParams:
    options = cli.build_parser().parse_args(["generate", PROMPT, *argv])
    return commands.sampling_params(options, options.logprobs)


def test_every_sampling_parameter_has_an_option():
    assert set(EVERY_OPTION) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_an_option_sets_its_own_parameter_and_no_other(name):
    value, option = EVERY_OPTION[name]
    assert parsed(*option.split()) == dataclasses.replace(parsed(), **{name: value})
    assert parsed() != parsed(*option.split())


def test_without_options_the_defaults_are_those_of_the_package_but_greedy():
    assert parsed() == SamplingParams(temperature=0)


def test_model_dtype_and_device_reach_the_loader(monkeypatch, capsys):
    seen = {}

    def load(name, **kwargs):
        seen.update(kwargs, name=name)
        raise ValueError("enough")

    monkeypatch.setattr("minillm.checkpoint.load", load)
    run("generate", PROMPT, "--model", "here", "--dtype", "bfloat16", "--device", "cpu")
    assert seen == {"name": "here", "dtype": torch.bfloat16, "device": "cpu"}
    run("generate", PROMPT)
    assert seen == {"name": "smollm2-135m", "dtype": torch.float32, "device": None}
    run("generate", PROMPT, "--weights", "native")
    assert (seen["weights"], seen["compute"]) == ("native", torch.bfloat16)


# generate, on the real model.


@pytest.fixture
def expected(smollm2):
    return generate(*smollm2, PROMPT, GREEDY)


def test_generate_prints_the_prompt_and_the_same_text_as_the_function(loaded, expected, capsys):
    assert run("generate", PROMPT, *SHORT) == 0
    out, err = capsys.readouterr()
    assert "Paris" in expected.text and len(expected.tokens) == 8
    assert out == f"{PROMPT}{expected.text}\n"
    assert err.startswith("[8 tokens, first after ") and err.endswith("; ended by length]\n")


def test_text_is_shown_token_by_token(loaded, monkeypatch):
    """Each piece is written and flushed before the next token is asked for."""
    out = io.StringIO()
    shown = []
    out.flush = lambda: shown.append(out.getvalue())
    monkeypatch.setattr(sys, "stdout", out)
    seen_at_each_token = []
    real = minillm.generation.next_logits

    def next_logits(*args):
        seen_at_each_token.append(shown[-1])
        return real(*args)

    monkeypatch.setattr("minillm.generation.next_logits", next_logits)
    status = run("generate", PROMPT, *SHORT)
    tokens = generate(*loaded, PROMPT, GREEDY).tokens
    assert status == 0
    assert seen_at_each_token[:8] == [PROMPT + loaded[1].decode(tokens[:i]) for i in range(8)]


@pytest.mark.parametrize(("option", "store"), [([], ContiguousKV), (["--no-cache"], NoCache)])
def test_no_cache_gives_the_same_text_without_a_cache(option, store, loaded, expected, capsys, monkeypatch):
    stores = set()
    real = minillm.generation.next_logits

    def next_logits(model, tokens, kv):
        stores.add(type(kv))
        return real(model, tokens, kv)

    monkeypatch.setattr("minillm.generation.next_logits", next_logits)
    assert run("generate", PROMPT, *SHORT, *option) == 0
    assert stores == {store}
    assert capsys.readouterr().out == f"{PROMPT}{expected.text}\n"


def test_ids_prints_the_new_tokens_and_nothing_else(loaded, expected, capsys):
    assert run("generate", PROMPT, *SHORT, "--ids") == 0
    assert [int(word) for word in capsys.readouterr().out.split()] == expected.tokens


def test_logprobs_lists_each_token_and_the_best(loaded, capsys):
    model, tokenizer = loaded
    params = dataclasses.replace(GREEDY, max_tokens=4, logprobs=2)
    wanted = generate(model, tokenizer, PROMPT, params)
    assert run("generate", PROMPT, "--max-tokens", "4", "--logprobs", "2") == 0
    text, listing = capsys.readouterr().out.split(wanted.text + "\n")
    table = listing.splitlines()
    assert text == PROMPT and len(table) == 4
    for line, token, logprob, best in zip(table, wanted.tokens, wanted.logprobs, wanted.top_logprobs, strict=True):
        (a, b), (c, d) = best.items()
        pair = f"{tokenizer.piece(a)!r} {b:.3f}, {tokenizer.piece(c)!r} {d:.3f}"
        assert line.startswith(repr(tokenizer.piece(token)))
        assert line.endswith(f" {logprob:.3f}   {pair}")


def test_a_dash_reads_the_prompt_from_standard_input(loaded, expected, capsys, monkeypatch):
    stdin_is(monkeypatch, PROMPT)
    assert run("generate", "-", *SHORT) == 0
    assert capsys.readouterr().out == f"{PROMPT}{expected.text}\n"


def test_a_seed_repeats_a_sampled_text(loaded, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        assert run("generate", PROMPT, *SHORT, "--temperature", "1.5", "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_stop_string_ends_the_text_and_is_not_shown(loaded, expected, capsys):
    assert run("generate", PROMPT, *SHORT, "--stop", "aris") == 0
    out, err = capsys.readouterr()
    assert out == PROMPT + expected.text[: expected.text.index("aris")] + "\n"
    assert err.endswith("; ended by stop]\n")


def test_no_tokens_are_no_error(loaded, capsys):
    assert run("generate", PROMPT, "--max-tokens", "0") == 0
    assert capsys.readouterr() == (PROMPT + "\n", "[no token was asked for, or the prompt fills the context]\n")


# chat


@pytest.fixture
def conversation(loaded, capsys, monkeypatch):
    """Type lines; -> the answers, what was written to stderr, and the conversations (`Chat`) that were held."""
    chats = []
    real = minillm.Chat

    def make(*args):
        chats.append(real(*args))
        return chats[-1]

    def talk(*lines: str, options: tuple[str, ...] = ()):
        monkeypatch.setattr("minillm.chat.Chat", make)
        stdin_is(monkeypatch, "".join(line + "\n" for line in lines))
        assert run("chat", *SHORT, *options) == 0
        out, err = capsys.readouterr()
        return out.split("> ")[1:], err, chats

    return talk


def answer_to(smollm2, *messages: tuple[str, str]) -> str:
    model, tokenizer = smollm2
    ids = tokenizer.encode_chat([{"role": role, "content": text} for role, text in messages])
    return generate(model, tokenizer, ids, GREEDY).text


def test_chat_keeps_the_conversation_until_it_is_reset(conversation, smollm2):
    answers, err, chats = conversation("My name is Ada.", "What is my name?", "/reset", "What is my name?")
    first = answer_to(smollm2, ("user", "My name is Ada."))
    second = answer_to(smollm2, ("user", "My name is Ada."), ("assistant", first), ("user", "What is my name?"))
    anew = answer_to(smollm2, ("user", "What is my name?"))
    assert len({first, second, anew}) == 3
    assert answers == [f"{first}\n", f"{second}\n", "", f"{anew}\n", ""]
    assert err.count("\n") == 1 and "/reset starts anew" in err
    assert [len(chat.messages) for chat in chats] == [4, 2]


def test_an_empty_line_ends_the_conversation(conversation):
    answers, _, chats = conversation("", "Hello?")
    assert answers == [""]
    assert chats[0].messages == []


def test_a_system_message_is_kept_through_a_reset(conversation, smollm2):
    system = "Answer in French."
    answers, _, chats = conversation("Hello!", "/reset", "Hello!", options=("--system", system))
    wanted = answer_to(smollm2, ("system", system), ("user", "Hello!"))
    assert wanted != answer_to(smollm2, ("user", "Hello!"))
    assert answers == [f"{wanted}\n", "", f"{wanted}\n", ""]
    assert [chat.messages[0]["content"] for chat in chats] == [system, system]


def test_a_message_that_is_too_long_is_refused_and_the_conversation_goes_on(conversation, smollm2):
    answers, err, (chat,) = conversation("My name is Ada.", "word " * 9000, "What is my name?")
    first = answer_to(smollm2, ("user", "My name is Ada."))
    second = answer_to(smollm2, ("user", "My name is Ada."), ("assistant", first), ("user", "What is my name?"))
    assert answers == [f"{first}\n", "", f"{second}\n", ""]
    refusal = err.splitlines()[1]
    assert refusal.startswith("minillm: the prompt has ") and refusal.endswith("8192; /reset starts anew")
    assert len(err.splitlines()) == 2 and "Traceback" not in err
    assert len(chat.messages) == 4


def test_ctrl_c_ends_the_answer_and_not_the_conversation(conversation, monkeypatch):
    real, asked = minillm.generation.next_logits, []

    def interrupted_once(*args):
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr("minillm.generation.next_logits", interrupted_once)
    answers, err, (chat,) = conversation("Tell me a story.", "Go on.")
    assert len(asked) > 4
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert answers[0] == chat.messages[1]["content"] + "\n"
    assert answers[1] == chat.messages[3]["content"] + "\n" and answers[1] != "\n"
    assert "Traceback" not in err


def test_ctrl_c_at_the_prompt_ends_the_command(loaded, monkeypatch, capsys):
    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupted)
    assert run("chat") == 130


def test_chat_refuses_wrong_options_before_the_model_is_loaded(capsys, never_loaded):
    assert_one_sentence(run("chat", "--top-p", "0"), *capsys.readouterr(), "top_p must be above 0")


# fetch and doctor


def test_fetch_names_the_file(capsys):
    assert run("fetch") == 0
    assert capsys.readouterr() == (f"{default_model()}\n", "")


def test_fetch_to_a_folder_copies_the_file_and_says_how_to_use_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("minillm.fetch.download", lambda *args: pytest.fail("it is on this machine already"))
    folder = tmp_path / "class" / "room"
    assert run("fetch", "--to", str(folder)) == 0
    out, err = capsys.readouterr()
    file = folder / FILE_NAME
    assert out == f"{file}\n"
    assert err == f"to use it: set {ENVIRONMENT_VARIABLE}={file}\n"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == FILE_SHA256
    assert list(folder.iterdir()) == [file]
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(file))
    assert default_model() == file


def test_fetch_to_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "taken").touch()
    assert_one_sentence(run("fetch", "--to", str(tmp_path / "taken")), *capsys.readouterr(), "taken")


def test_doctor_finds_this_machine_fit_and_prints_versions():
    done = child("doctor")
    assert done.returncode == 0 and done.stderr == ""
    assert f"torch              {torch.__version__}\n" in done.stdout
    assert f"minillm            {minillm.__version__}\n" in done.stdout
    assert "[ok  ] Python" in done.stdout and "[FAIL]" not in done.stdout


def test_doctor_ends_with_a_status_where_something_fails(monkeypatch, capsys):
    monkeypatch.setattr("minillm.lab.doctor.report", lambda: ("[FAIL] memory", False))
    assert run("doctor") == 1
    assert capsys.readouterr() == ("[FAIL] memory\n", "")


# ladder and bench


@pytest.fixture
def tiny_workload(loaded, monkeypatch):
    """A workload of seconds, on a machine that is always idle and measured at once. -> the values of `quick` asked"""
    asked = []

    def read_workload(name, tokenizer, quick=False):
        asked.append((name, quick))
        return Workload(name, tokenizer.encode(PROMPT), new_tokens=4, repeats=1)

    machine = {"cpu": "Chip", "cores": 4, "threads": 4, "memory_gb": 16.0, "gpu": None, "os": "Linux",
               "python": "3.12", "torch": "2.13", "busy": 0.0}  # fmt: skip

    def read_requests(name, tokenizer, quick=False):
        asked.append((name, quick))
        trace = [Arrival(0.0, tokenizer.encode(PROMPT)[i:], 2 + i) for i in range(3)]
        return Requests(name, trace, max_num_seqs=2, block_size=4, n_blocks=8, reserve=12, repeats=1)

    monkeypatch.setattr("minillm.lab.workload.read_workload", read_workload)
    monkeypatch.setattr("minillm.lab.workload.read_requests", read_requests)
    monkeypatch.setattr("minillm.lab.machine.describe", lambda: machine)
    monkeypatch.setattr("minillm.lab.roofline.this_machine", lambda: Limits("m", 50e9, 20e9))
    return asked


def test_ladder_writes_tables_json_and_a_picture(tiny_workload, tmp_path, capsys):
    files = [tmp_path / "ladder.json", tmp_path / "ladder.png"]
    assert run("ladder", "--quick", "--json", str(files[0]), "--plot", str(files[1])) == 0
    assert tiny_workload == [("story", True), ("requests", True)]
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line]
    assert lines[0] == "One request: 5 tokens in, 4 out; 1 runs."
    assert lines[1].startswith("stage") and set(lines[2]) <= set("- ")
    assert lines[8].startswith("3 requests at once: 3 to 5 tokens in, 2 to 4 out; up to 2 at a time, memory for 32")
    rungs = ["naive", "kv_cache", "tiled", "speculative", "w4a16", "one_by_one", "static", "paged", "continuous",
             "everything"]  # fmt: skip
    for line, stage in zip(lines[3:8] + lines[11:16], rungs, strict=True):
        assert line.startswith(stage) and line.endswith("yes")  # so few tokens, and none of them is close
    caption = " ".join(lines[16:])
    assert "Chip, 4 cores" in caption and "20.0 GB/s, 50 GFLOP/s" in caption
    assert "Traceback" not in err and "busy" not in err

    result = json.loads(files[0].read_text())
    assert result["machine"]["cpu"] == "Chip" and result["machine"]["gb_per_s"] == 20
    assert [rung["stage"] for rung in result["rungs"]] == rungs
    assert all(rung["same_tokens"] for rung in result["rungs"])
    assert result["rungs"][1]["kv_bytes"] == (5 + 4 - 1) * 2 * 30 * 3 * 64 * 4
    assert files[1].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_ladder_in_markdown_at_full_size(tiny_workload, capsys):
    assert run("ladder", "--markdown") == 0
    assert tiny_workload == [("story", False), ("requests", False)]
    assert capsys.readouterr().out.count("\n| stage ") == 2


def test_a_busy_machine_is_warned_of(tiny_workload, capsys, monkeypatch):
    from minillm.lab import machine

    busy = machine.describe() | {"busy": 0.8}
    monkeypatch.setattr(machine, "describe", lambda: busy)
    monkeypatch.setattr("minillm.lab.ladder.climb", lambda *args, **kwargs: [])
    monkeypatch.setattr("minillm.lab.batch_ladder.climb", lambda *args, **kwargs: [])
    assert run("ladder", "--quick") == 0
    err = capsys.readouterr().err
    assert err.startswith("minillm: the machine was busy (80%") and err.count("\n") == 1


def test_bench_peers_prints_every_ratio_and_writes_json(tiny_workload, tmp_path, capsys, monkeypatch):
    results = [{"name": "minillm float32", "task": "one request", "tokens_per_s": 30.0, "spread": (29.0, 31.0)}]
    ratios = {"single_stream_vs_transformers": 1.625, "w4a16_vs_llama_cpp": None}
    asked = []

    def compare(model, small, prompt):
        assert (model, small) == ("float", "native")
        asked.append(prompt)
        return {"results": results, "ratios": ratios}

    more = {
        "results": [{"name": "minillm engine", "task": "3 requests", "tokens_per_s": 99.0, "spread": (98.0, 99.9)}],
        "ratios": {"throughput_vs_transformers_best": 2.25},
    }
    tokenizer = minillm.load()[1]
    monkeypatch.setattr("minillm.checkpoint.load", lambda weights="float", **kwargs: (weights, tokenizer))
    monkeypatch.setattr("minillm.lab.peers.compare", compare)
    monkeypatch.setattr("minillm.lab.batch_peers.compare_batches", lambda model, requests: more)
    assert run("bench", "peers", "--json", str(tmp_path / "peers.json")) == 0
    assert tiny_workload == [("story", False), ("requests", False)] and len(asked[0]) == 5
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("minillm float32") and "29.0 to 31.0" in lines[2]
    assert "single_stream_vs_transformers: 1.62" in lines
    assert "w4a16_vs_llama_cpp: not measured" in lines
    assert lines[3].startswith("minillm engine") and "throughput_vs_transformers_best: 2.25" in lines
    assert lines[-1].startswith("Chip, 4 cores")
    written = json.loads(Path(tmp_path / "peers.json").read_text())
    assert list(written) == ["machine", "date", "results", "ratios"]
    assert written["results"] == json.loads(json.dumps(results + more["results"]))
    assert written["ratios"] == ratios | more["ratios"] and written["machine"]["cpu"] == "Chip"


def test_bench_serving_replays_a_trace_file_under_three_policies(tiny_workload, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"at": 0, "prompt_tokens": 3, "max_tokens": 2}\n\n{"at": 0.5, "prompt": [1, 2], "max_tokens": 3}\n'
    )
    assert run("bench", "serving", "--trace", str(trace), "--timeout", "0", "--json", str(tmp_path / "s.json")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5] if line[0] != "-"] == ["policy", "static", "dynamic", "continuous"]
    assert lines[6].startswith("2 requests in 0 s, 5 tokens in, 5 out; up to 16 at a time.")
    assert lines[-1].startswith("Chip, 4 cores")
    written = json.loads((tmp_path / "s.json").read_text())
    assert written["target"] == {"ttft": 2.0, "tpot": 0.2} and written["machine"]["cpu"] == "Chip"
    assert written["trace"][1] == {"at": 0.5, "prompt_tokens": 2, "max_tokens": 3}


def test_bench_serving_draws_a_trace_from_its_seed(tiny_workload, monkeypatch):
    traces = []
    monkeypatch.setattr("minillm.lab.policy_bench.compare_policies", lambda _, trace, *rest: traces.append(trace) or [])
    for seed in ("5", "5", "6"):
        assert run("bench", "serving", "--requests", "2", "--rate", "9", "--seed", seed, "--max-num-seqs", "1") == 0
    first, again, other = traces
    assert len(first) == 2 and first == again != other


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--requests", "0"], "at least one request"),
        (["--rate", "0"], "a rate above 0"),
        (["--rate", "nan"], "a rate above 0"),
        (["--timeout", "-1"], "timeout must be from 0 to 3600"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1, not 0"),
        (["--slo-ttft", "0"], "targets must be above 0"),
        (["--trace", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_bench_serving_refuses_what_makes_no_sense_before_the_model_is_loaded(argv, words, capsys, never_loaded):
    assert_one_sentence(run("bench", "serving", *argv), *capsys.readouterr(), words)


def test_a_trace_with_a_bad_line_is_refused_by_its_number(tmp_path, capsys, never_loaded):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"at": 0, "prompt_tokens": 3, "max_tokens": 2}\n{"at": 1}\n')
    assert_one_sentence(run("bench", "serving", "--trace", str(trace)), *capsys.readouterr(), "line 2: expected")


def test_bench_speculative_prints_the_table_and_writes_json(monkeypatch, tmp_path, capsys):
    from minillm.lab.speculative_bench import Line

    line = Line("n-gram", "prose", 0.0, 3, 1, 0.5, 1.9, 1.5, 1.4, 1.6, (1.5, 1.7))
    asked = []
    monkeypatch.setattr("minillm.checkpoint.load", lambda **options: (None, None))
    monkeypatch.setattr("minillm.lab.speculative_bench.drafters", lambda model: {})
    monkeypatch.setattr(
        "minillm.lab.speculative_bench.sweep",
        lambda model, tokenizer, drafters, quick: asked.append(quick) or [line],
    )
    file = tmp_path / "result.json"
    assert run("bench", "speculative", "--quick", "--json", str(file)) == 0
    out = capsys.readouterr().out
    assert asked == [True] and "n-gram" in out and "off by 6% in the median" in out
    assert json.loads(file.read_text())["results"][0]["speedup"] == 1.6
    assert run("bench", "speculative", "--json", str(tmp_path / "nowhere" / "x.json")) == 1 and len(asked) == 1
