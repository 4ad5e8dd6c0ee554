"""The twins: the same size but for the cache, trained alike, stored so that a run can go on, and told truly."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, random_model

from minillm.attention import reference_attention
from minillm.gqa import pool_heads
from minillm.lab import twins
from minillm.model import NoCache, Transformer

SMALL = replace(twins.TWIN, d_model=18, n_layers=1, head_dim=6, d_ff=24)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(twins, "TWIN", SMALL)
    monkeypatch.setattr(twins, "WINDOW", 16)


def size(config) -> int:
    return sum(p.numel() for p in Transformer(config, device="meta").parameters())


def test_twins_have_the_same_parameters_and_a_cache_by_their_heads():
    configs = {n: twins.twin(n) for n in twins.KV_HEADS}
    assert {size(config) for config in configs.values()} == {size(twins.TWIN)}
    assert {config.kv_elements_per_token // n for n, config in configs.items()} == {2 * 3 * 24}
    assert {replace(config, n_kv_heads=9, d_ff=384) for config in configs.values()} == {twins.TWIN}


def test_a_twin_whose_weights_cannot_be_given_away_evenly_is_an_error(monkeypatch):
    monkeypatch.setattr(twins, "TWIN", replace(twins.TWIN, head_dim=16))
    with pytest.raises(ValueError, match="256 rows cannot be given to the three matrices"):
        twins.twin(1)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 6])
def test_windows_are_texts_of_their_own(n_kv_heads):
    config = replace(TINY, n_kv_heads=n_kv_heads)
    model, tokens = random_model(config), torch.randint(37, (3, 5), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5).repeat(3)
    alone = model.logits(model(tokens.flatten(), positions, NoCache([5, 5, 5], reference_attention)))
    assert torch.allclose(twins.window_logits(model, tokens), alone, rtol=0, atol=1e-9)


def test_the_text_is_cut_in_two_and_no_paragraph_is_in_both():
    learned, held_out = twins.read_text()
    assert 5 < len(learned) / len(held_out) < 20
    topics = sorted(twins.topics)
    assert held_out.startswith(twins.topics[topics[0]])
    assert learned.startswith(twins.topics[topics[1]].split("\n\n")[0])
    to_test = {p for topic in topics[::10] for p in twins.paragraphs(twins.topics[topic])}
    to_learn = set(twins.paragraphs(learned))
    assert not to_learn & to_test
    assert to_learn | to_test == {p for topic in topics for p in twins.paragraphs(twins.topics[topic])}


def test_windows_cover_the_text_once_and_know_what_follows():
    windows = twins.cut(torch.arange(14), 4)
    assert windows.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]]


def test_random_windows_are_pieces_of_the_text_and_reach_its_end():
    ids = torch.arange(12)
    seen = torch.cat(list(twins.random_windows(ids, 4, 8, 20, seed=0)))
    assert seen.shape == (160, 5) and (seen.diff(dim=1) == 1).all()
    assert seen.min() == 0 and seen.max() == 11
    again = torch.cat(list(twins.random_windows(ids, 4, 8, 20, seed=0)))
    assert torch.equal(seen, again) and not torch.equal(seen, torch.cat(list(twins.random_windows(ids, 4, 8, 20, 1))))


def test_losses_are_means_over_windows_of_what_follows():
    model, ids = random_model(), torch.randint(37, (26,), generator=torch.Generator().manual_seed(1))
    windows = twins.cut(ids, 5)
    want = []
    for window in windows:
        rows = model.logits(model(window[:-1], torch.arange(5), NoCache()))
        want.append(float(F.cross_entropy(rows, window[1:])))
    assert twins.window_losses(model, windows) == pytest.approx(want, abs=1e-5)


def test_differences_are_taken_window_by_window():
    a, b = {"losses": [1.0, 5.0, 9.0]}, {"losses": [0.5, 4.5, 8.5]}
    assert twins.difference(a, b) == (0.5, 0.0)
    assert twins.mean_and_error([1.0, 5.0, 9.0]) == pytest.approx((5.0, 4 / 3**0.5))


def test_training_is_seeded_and_learns(small):
    ids = torch.tensor(list(b"abcdefgh" * 40))
    windows = twins.cut(ids, 16)
    once, again = (twins.train_twin(3, 0, 80, ids) for _ in range(2))
    other = twins.train_twin(3, 1, 80, ids)
    losses = [sum(twins.window_losses(m, windows)) for m in (once, again, other)]
    assert losses[0] == losses[1] != losses[2]
    untrained = Transformer(twins.twin(3)).init_weights(0).requires_grad_(False)
    assert losses[0] < 0.7 * sum(twins.window_losses(untrained, windows))


def pooled_pair() -> tuple[Transformer, Transformer, torch.Tensor]:
    teacher = random_model(replace(TINY, n_kv_heads=6)).float()
    return teacher, pool_heads(teacher, 2), torch.randint(37, (400,), generator=torch.Generator().manual_seed(0))


def distance(teacher: Transformer, model: Transformer, ids: torch.Tensor) -> float:
    """The KL divergence of what the two say, in nats a token."""
    with torch.no_grad():
        wanted, got = (twins.window_logits(m, ids[None, :24]).log_softmax(-1) for m in (teacher, model))
    return float(F.kl_div(got, wanted, reduction="batchmean", log_target=True))


@pytest.mark.parametrize("healing", [twins.heal, twins.heal_layers])
def test_healing_brings_a_pooled_model_nearer_to_the_teacher_and_moves_attention_only(healing):
    teacher, pooled, ids = pooled_pair()
    before = {name: p.clone() for name, p in pooled.named_parameters()}
    far = distance(teacher, pooled, ids)
    healing(pooled, teacher, ids, steps=80, length=24, rate=1e-2)
    assert distance(teacher, pooled, ids) < 0.8 * far
    moved = {name for name, p in pooled.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(".attention." in name for name in moved)
    assert not any(p.requires_grad for p in pooled.parameters())


def test_healing_a_model_that_is_whole_changes_nothing_and_leaves_the_teacher_without_hooks():
    teacher, _, ids = pooled_pair()
    same = pool_heads(teacher, 6)
    twins.heal_layers(same, teacher, ids, steps=3, length=24)
    assert distance(teacher, same, ids) < 1e-6
    assert not any(block.attention._forward_hooks for block in teacher.blocks)


def test_a_run_goes_on_where_it_stopped(small, tmp_path, monkeypatch):
    file, trained = tmp_path / "twins.json", []
    ids = torch.tensor(list(b"abcdefgh" * 8))
    train = twins.train_twin

    def counted(n_kv_heads, seed, steps, ids):
        trained.append((n_kv_heads, seed))
        if len(trained) == 3:
            raise KeyboardInterrupt
        return train(n_kv_heads, seed, steps, ids)

    monkeypatch.setattr(twins, "train_twin", counted)
    with pytest.raises(KeyboardInterrupt):
        twins.run_twins(twins.begin(file, 2, 2, 2), file, ids, ids)
    found = twins.begin(file, 2, 2, 2)
    assert [(run["kv_heads"], run["seed"]) for run in found["twins"]] == trained[:2]
    twins.run_twins(found, file, ids, ids)
    assert trained == [(9, 0), (9, 1), (3, 0), (3, 0), (3, 1), (1, 0), (1, 1)]
    assert len(json.loads(file.read_text())["twins"]) == 6
    with pytest.raises(ValueError, match="holds results with another steps; name another file"):
        twins.begin(file, 3, 2, 2)


def test_smollm2_is_measured_as_it_is_pooled_and_healed_once(tmp_path, monkeypatch):
    class Letters:
        def encode(self, text):
            return [ord(letter) % 37 for letter in text]

    teacher, asked = random_model(replace(TINY, n_kv_heads=3)).float(), []
    monkeypatch.setattr(twins, "load", lambda **_: (teacher, Letters()))
    monkeypatch.setattr(twins, "LONG", 8)

    def healing(model, of, ids, steps):
        assert of is teacher and model.config.n_kv_heads == 1
        asked.append((ids.tolist(), steps))
        model.requires_grad_(False).head.weight.mul_(0.5)

    monkeypatch.setattr(twins, "heal_layers", healing)
    monkeypatch.setattr(twins, "heal", healing)
    file = tmp_path / "twins.json"
    twins.run_smollm2(twins.begin(file, 2, 8, 3), file, "some text", "another text, to test all of them with")
    results = twins.begin(file, 2, 8, 3)
    assert asked == [(Letters().encode("some text"), 8), (Letters().encode("some text"), 2)]
    rows = results["smollm2"]
    assert [row["what"] for row in rows] == ["as it is", "pooled", "healed layer by layer", "then end to end"]
    assert [row["kv_heads"] for row in rows] == [3, 1, 1, 1]
    assert [len(row["losses"]) for row in rows] == [3] * 4
    assert len({tuple(row["losses"]) for row in rows}) == 4
    monkeypatch.setattr(twins, "load", lambda **_: pytest.fail("it is there already"))
    twins.run_smollm2(results, file, "", "")


def test_what_is_stored_is_complete_and_says_where_it_was_made():
    results = twins.read_results()
    assert [(r["kv_heads"], r["seed"]) for r in results["twins"]] == [
        (n, s) for n in twins.KV_HEADS for s in twins.SEEDS
    ]
    assert {r["parameters"] for r in results["twins"]} == {size(twins.TWIN)}
    assert len({len(r["losses"]) for r in results["twins"]}) == 1
    assert len(results["smollm2"]) == 4
    assert results["date"] in twins.about(results) and results["machine"]["cpu"] in twins.about(results)


def test_tables_show_every_run_and_the_difference_from_the_same_seed():
    losses = {9: [1.0, 2.0], 3: [1.25, 2.25]}
    runs = [
        {"kv_heads": n, "seed": s, "parameters": 5, "kv_bytes_a_token": n, "losses": [x + s for x in losses[n]]}
        for n in (9, 3)
        for s in (0, 1)
    ]
    lines = twins.twins_table({"twins": runs}).splitlines()
    assert len(lines) == 2 + 4
    assert [line.count("+0.361 ± 0.000") for line in lines[2:]] == [0, 0, 1, 1]  # a quarter of a nat in bits
    rows = [
        {"what": w, "kv_heads": 1, "kv_bytes_a_token": 2, "losses": [x]} for w, x in (("as it is", 0.0), ("p", 1.0))
    ]
    lines = twins.smollm2_table({"smollm2": rows}).splitlines()
    assert "1.0" in lines[2] and "2.7" in lines[3] and "+1.000" in lines[3]
