"""A workload is what its file says: the same tokens on every machine, greedy and to the full."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from minillm.lab import workload
from minillm.lab.workload import Workload, read_requests, read_workload
from minillm.sampling import SamplingParams


def test_the_story_is_pinned(smollm2):
    """A changed file, tokenizer or cut would make numbers of different days incomparable."""
    _, tokenizer = smollm2
    story = read_workload("story", tokenizer)
    assert (story.name, len(story.prompt), story.new_tokens, story.repeats) == ("story", 64, 64, 5)
    assert story.prompt[:8] == [504, 1573, 9191, 16201, 4161, 418, 260, 1112]
    assert tokenizer.decode(story.prompt).endswith("but the sailors did not. They knew that each clock belonged to a")


def test_quick_is_the_same_text_with_smaller_sizes(smollm2):
    _, tokenizer = smollm2
    full, quick = read_workload("story", tokenizer), read_workload("story", tokenizer, quick=True)
    assert quick.prompt == full.prompt
    assert (quick.new_tokens, quick.repeats) == (32, 3)


def test_a_workload_is_greedy_and_runs_to_the_full():
    params = Workload("w", [1, 2], new_tokens=7, repeats=1).params
    assert params == SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)


class Letters:
    """A token for each letter."""

    def encode(self, text):
        return [ord(letter) for letter in text]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of workloads in the package's place."""
    monkeypatch.setattr(workload.resources, "files", lambda package: tmp_path)
    (tmp_path / "workloads").mkdir()
    return tmp_path / "workloads"


def write(folder, **changes):
    content = {"name": "w", "prompt": "abcdef", "prompt_tokens": 4, "new_tokens": 3, "repeats": 2, **changes}
    (folder / "w.json").write_text(json.dumps(content))


def test_the_prompt_is_cut_to_the_tokens_that_the_file_names(folder):
    write(folder)
    assert read_workload("w", Letters()) == Workload("w", [97, 98, 99, 100], 3, 2)


def test_quick_takes_only_what_the_file_gives_for_it(folder):
    write(folder, quick={"prompt_tokens": 2, "repeats": 1})
    assert read_workload("w", Letters(), quick=True) == Workload("w", [97, 98], 3, 1)
    assert read_workload("w", Letters()) == Workload("w", [97, 98, 99, 100], 3, 2)


def test_a_text_that_is_too_short_is_refused(folder):
    write(folder, prompt_tokens=7)
    with pytest.raises(ValueError, match="workload 'w' has 6 tokens, fewer than 7"):
        read_workload("w", Letters())


def test_an_unknown_workload_is_an_error_that_names_its_file():
    with pytest.raises(FileNotFoundError, match=r"epic\.json"):
        read_workload("epic", Letters())


@pytest.mark.parametrize("quick", [False, True])
def test_every_workload_of_the_package_can_be_read(smollm2, quick):
    names = {file.name for file in (resources.files("minillm.lab") / "workloads").iterdir()}
    # Lengths only (kv_memory.py), prompts (speculative_bench.py), and questions (quality.py).
    others = {"lengths.json", "speculative.json", "quality.json"}
    assert names == {"story.json", "requests.json"} | others
    story, many = read_workload("story", smollm2[1], quick), read_requests("requests", smollm2[1], quick)
    assert (story.name, many.name) == ("story", "requests")
    assert story.prompt and story.new_tokens > 1 and story.repeats > 0 and many.repeats > 0


# Many requests.


def test_the_requests_are_pinned(smollm2):
    _, tokenizer = smollm2
    many = read_requests("requests", tokenizer)
    assert (len(many.trace), many.max_num_seqs, many.block_size, many.n_blocks) == (32, 16, 16, 128)
    assert (many.reserve, many.repeats) == (256, 3)
    prompts, outputs = [len(a.prompt) for a in many.trace], [a.max_tokens for a in many.trace]
    assert (sum(prompts), min(prompts), max(prompts)) == (1940, 16, 128)
    assert (sum(outputs), min(outputs), max(outputs)) == (2121, 10, 128)
    assert all(a.at == 0 for a in many.trace)
    assert many.trace[0].prompt == read_workload("story", tokenizer).prompt[:25]
    assert len({tuple(a.prompt[:4]) for a in many.trace}) == 32  # nothing to share


def test_quick_requests_are_fewer_and_shorter_and_fit(smollm2):
    _, tokenizer = smollm2
    quick = read_requests("requests", tokenizer, quick=True)
    assert len(quick.trace) == 12 and quick.repeats == 1
    assert max(len(a.prompt) + a.max_tokens for a in quick.trace) <= quick.reserve <= quick.n_blocks * quick.block_size


def test_prompts_are_cut_around_the_end_of_the_text(folder):
    write(folder)
    sizes = {"max_num_seqs": 2, "block_size": 4, "n_blocks": 8, "reserve": 12, "repeats": 1}
    many = {"name": "many", "text": "w", "requests": [[3, 2], [8, 1]], **sizes}
    (folder / "many.json").write_text(json.dumps(many))
    first, second = read_requests("many", Letters()).trace
    assert (first.prompt, first.max_tokens) == ([97, 98, 99], 2)
    assert second.prompt == [97 + (37 + i) % 6 for i in range(8)]
    (folder / "many.json").write_text(json.dumps(many | {"reserve": 8}))
    with pytest.raises(ValueError, match="longer than the 8 tokens set aside"):
        read_requests("many", Letters())
