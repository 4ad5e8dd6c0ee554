"""The Triton kernels inside the engine: the same attention, slot by slot, and the same logits as the naive pass.

The kernels themselves are proved elsewhere. Here it is what stands between them and the engine: who uses them and
when, which rows of a step go to which kernel, and what it is told about tables, lengths and slots. They run in Triton's
interpreter, mostly in float32, on pools full of NaN. Stored mutants, each one changed place of the real source, must be
rejected.
"""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch
from conftest import TINY, mutant, random_model
from torch import Tensor

import minillm
from minillm import SamplingParams, generate, kernel_attention, paged_kv
from minillm.attention import reference_attention, tiled_attention
from minillm.engine import Engine
from minillm.engine_request import EngineRequest
from minillm.kernel_attention import LONG, KernelView, flash_attention, kernels_serve
from minillm.kv_cache import ContiguousKV
from minillm.model import NoCache, Transformer
from minillm.paged_kv import PagedKV, PagedView
from minillm.request import Request, Span, Step

EXACT = 1e-5  # of attention alone, where queries, keys and values are about 1
TOLERANCE = 2e-5  # of logits up to 11 in float32, where its digits are 1e-6 apart; PyTorch's own are off by up to 7e-6
CONFIGS = {
    "groups of 3": TINY,
    "a group of 9": replace(TINY, n_heads=9, n_kv_heads=1),
    "every head its own": replace(TINY, n_heads=3, n_kv_heads=3, head_dim=12),
}
MODELS = {name: random_model(config).float() for name, config in CONFIGS.items()}
MODEL = MODELS["groups of 3"]


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def launches(monkeypatch, interpreted) -> list[tuple[str, tuple[int, ...]]]:
    """The kernels that are launched, each with the shape of its first argument."""
    seen = []

    def spy(name):
        module = import_module(f"kernels.{name}")
        launch = getattr(module, name)

        def record(x, *args, **kwargs):
            seen.append((name, tuple(x.shape)))
            return launch(x, *args, **kwargs)

        monkeypatch.setattr(module, name, record)

    for name in ("flash_attention", "paged_attention", "store_kv"):
        spy(name)
    return seen


@torch.inference_mode()
def naive(model: Transformer, tokens: list[int]) -> Tensor:
    """The logits of one pass without a cache, in float64."""
    wide = copy.deepcopy(model).double()
    return wide.logits(wide(torch.tensor(tokens), torch.arange(len(tokens)), NoCache(attention=reference_attention)))


def draw(n_queries: int, n_keys: int, heads=(6, 2), head_dim: int = 8, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (n_queries, heads[0]), (n_keys, heads[1]), (n_keys, heads[1])
    return tuple(torch.randn(*shape, head_dim, generator=generator) for shape in shapes)


def require_equal(out: Tensor, q: Tensor, k: Tensor, v: Tensor, tolerance: float = EXACT) -> None:
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    error = (out - reference_attention(q.double(), k.double(), v.double())).abs().max()
    assert error <= tolerance, f"off by {error}"


# --- Who is served by the kernels. ---


@pytest.mark.parametrize(
    ("dtype", "head_dim", "served"),
    [
        (torch.float32, 64, {"interpreter", "gpu", "both"}),
        (torch.float16, 128, {"interpreter", "gpu", "both"}),
        (torch.bfloat16, 128, {"gpu"}),  # the interpreter computes it wrongly
        (torch.float64, 64, set()),
        (torch.int32, 64, set()),
        (torch.float32, 129, set()),
        (torch.bfloat16, 129, set()),
        (torch.float32, 1, {"interpreter", "gpu", "both"}),
    ],
)
@pytest.mark.parametrize("where", ["cpu", "interpreter", "gpu", "both"])
def test_the_kernels_serve_a_gpu_and_the_interpreter_and_what_they_can_compute(
    dtype, head_dim, served, where, monkeypatch
):
    """A GPU is played by an object that says so."""
    if where in ("interpreter", "both"):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.zeros(3, 2, head_dim, dtype=dtype)
    if where in ("gpu", "both"):
        x = SimpleNamespace(is_cuda=True, dtype=dtype, shape=x.shape, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernels_serve(x) == (where in served)


@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True), ((9, 4), True)])
def test_gpus_whose_shared_memory_is_too_small_are_not_served(capability, served, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x = SimpleNamespace(is_cuda=True, dtype=torch.float16, shape=(3, 2, 64), device="cuda:0")
    assert kernels_serve(x) == served


def test_the_limits_are_those_of_the_kernels():
    """They are written down twice, so that the engine need not import Triton to know them."""
    assert kernel_attention.MAX_HEAD_DIM == import_module("kernels.checks").MAX_HEAD_DIM


@pytest.mark.parametrize(("value", "on"), [("0", False), ("", False), ("no", False), ("true", True), ("ON", True)])
def test_the_variable_is_read_as_triton_reads_it(value, on, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert kernels_serve(torch.zeros(1, 1, 8)) == on


def test_without_triton_nothing_is_served(monkeypatch, interpreted):
    gpu = SimpleNamespace(is_cuda=True, dtype=torch.float16, shape=(1, 1, 8))
    assert kernels_serve(gpu)
    monkeypatch.setattr(kernel_attention, "find_spec", lambda name: None)
    assert not kernels_serve(gpu)
    assert not kernels_serve(torch.zeros(1, 1, 8))


@pytest.mark.parametrize(
    ("config", "dtype", "variable", "expected"),
    [
        (TINY, torch.float32, "1", KernelView),
        (TINY, torch.float16, "1", KernelView),
        (TINY, torch.float64, "1", PagedView),
        (TINY, torch.bfloat16, "1", PagedView),
        (replace(TINY, head_dim=130), torch.float32, "1", PagedView),
        (TINY, torch.float32, "0", PagedView),
    ],
)
def test_the_pool_chooses_the_view(config, dtype, variable, expected, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", variable)
    span = Span(Request([1, 2], 9, block_table=[0]), 0, 2)
    assert type(PagedKV(config, 2, 4, dtype).view(Step([span]))) is expected


def test_on_a_cpu_triton_is_never_imported():
    """A whole generation, with and without the engine. With the variable set, the same lines do import it."""
    code = (
        "import sys, minillm\n"
        "from minillm.lab.tiny import tiny_model\n"
        "model, params = tiny_model().float(), minillm.SamplingParams(temperature=0, max_tokens=3)\n"
        "store = minillm.NoCache(attention=minillm.flash_attention)\n"
        "tokens = [minillm.generate(model, None, [5, 6, 7], params, kv).tokens for kv in (None, store)]\n"
        "tokens.append(minillm.Engine(model, None, 4).generate([[5, 6, 7]], params)[0].tokens)\n"
        "print('triton' in sys.modules, 'kernels' in sys.modules, *tokens)\n"
    )
    printed = []
    for variable in (None, "1"):
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        if variable:
            env["TRITON_INTERPRET"] = variable
        root = Path(minillm.__file__).parent.parent
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=env)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0].startswith("False False [")
    assert printed[1] == printed[0].replace("False", "True")


# --- One sequence. ---


def test_flash_attention_is_tiled_attention_where_no_kernel_serves(monkeypatch):
    calls = []

    def spy(*args):
        calls.append(args)
        return tiled_attention(*args)

    monkeypatch.setattr(kernel_attention, "tiled_attention", spy)
    q, k, v = draw(5, 9)
    require_equal(flash_attention(q, k, v), q, k, v)
    assert len(calls) == 1
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    flash_attention(q.double(), k.double(), v.double())
    assert len(calls) == 2
    flash_attention(q, k, v)
    assert len(calls) == 2


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (9, 1)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 70), (33, 33), (31, 65)])
def test_flash_attention_goes_through_the_kernel_and_gives_the_reference(shape, heads, launches):
    for dtype, tolerance in [(torch.float32, EXACT), (torch.float16, 5e-3)]:
        q, k, v = (x.to(dtype) for x in draw(*shape, heads, head_dim=12))
        require_equal(flash_attention(q, k, v), q, k, v, tolerance)
    assert launches == 2 * [("flash_attention", (shape[0], heads[0], 12))]


@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize("layout", ["one projection", "rotated keys", "heads first"])
def test_keys_and_values_may_be_views_that_lie_in_any_way(layout, n, launches):
    """Even a single row, which PyTorch calls contiguous whatever its stride."""
    q, k, v = draw(n, n)
    fused = torch.cat([q, k, v], dim=1)
    if layout == "one projection":
        views = fused.split([6, 2, 2], dim=1)
    elif layout == "rotated keys":  # as the model gives them
        views = (*torch.cat([q, k], dim=1).split([6, 2], dim=1), fused[:, 8:])
    else:  # as the cache gives them
        views = q, *(torch.stack([x, x], dim=1).transpose(0, 2)[:, 0].transpose(0, 1) for x in (k, v))
    assert (views[1].stride() == views[2].stride()) == (layout != "rotated keys")
    assert views[2].stride() != v.stride()
    require_equal(flash_attention(*views), q, k, v)
    assert len(launches) == 1


@pytest.mark.parametrize("layout", ["coordinates first", "one coordinate for all"])
def test_rows_that_do_not_lie_in_one_piece_are_taken_too(layout, launches):
    q, k, v = draw(5, 9)
    if layout == "coordinates first":
        views = [x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (q, k, v)]
    else:
        views = [x[..., :1].expand(-1, -1, 8) for x in (q, k, v)]
    assert views[1].stride() == views[2].stride() and all(x.stride(-1) != 1 for x in views)
    require_equal(flash_attention(*views), *views)
    assert launches == [("flash_attention", (5, 6, 8))]


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_where_a_gradient_is_wanted_it_is_there(trained, launches):
    """The kernel's own output would look as if nothing led to it."""
    inputs = draw(5, 9)
    inputs[trained].requires_grad_()
    gradients = [
        torch.autograd.grad(f(*inputs).square().sum(), inputs[trained])[0]
        for f in (flash_attention, reference_attention)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=EXACT)
    assert launches == []
    with torch.no_grad():
        flash_attention(*inputs)
    assert len(launches) == 1


@pytest.mark.parametrize("variable", ["0", "1"])
def test_more_queries_than_keys_is_an_error_with_the_kernel_too(variable, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", variable)
    with pytest.raises(ValueError, match=r"5 queries .* 4 keys"):
        flash_attention(*draw(5, 4))


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_the_stores_of_one_sequence_give_the_naive_logits_by_the_kernel(name, launches):
    model, rnd = MODELS[name], random.Random(0)
    tokens = [rnd.randrange(TINY.vocab_size) for _ in range(40)]

    def feed(kv, tokens: list[int], start: int, end: int) -> None:
        hidden = model(torch.tensor(tokens[start:end]), torch.arange(start, end), kv)
        error = (model.logits(hidden) - naive(model, tokens)[start:end]).abs().max()
        assert error <= TOLERANCE, f"off by {error}"
        kv.commit(end - start)

    feed(NoCache(attention=flash_attention), tokens, 0, 40)
    feed(NoCache(attention=flash_attention), tokens[:1], 0, 1)
    kv = ContiguousKV(model.config, 48, torch.float32, attention=flash_attention)
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    for start, end in [(0, 34), (34, 35), (35, 38)]:
        feed(kv, tokens, start, end)
    kv.truncate(20)
    other = [*tokens[:20], 1, 2, 3, 4, 5]
    branch = kv.fork()
    feed(kv, tokens, 20, 24)
    feed(branch, other, 20, 25)
    feed(kv, tokens, 24, 25)
    assert len(launches) == 8 * model.config.n_layers
    assert branch.attention is flash_attention


# --- The store of a step. ---


def span(start: int, count: int, block_table: list[int]) -> Span:
    return Span(Request([0] * (start + count), 200, block_table=block_table), start, count)


class Texts:
    """Some texts with their own q, k, v, in one layer of a pool full of NaN: all attend in random spans."""

    def __init__(self, rnd: random.Random, lengths: list[int], config=TINY):
        self.layer, self.block_size = rnd.randrange(config.n_layers), rnd.choice([1, 3, 4, 16])
        tables = [-(-n // self.block_size) for n in lengths]
        self.kv = PagedKV(config, sum(tables) + 2, self.block_size, torch.float32)
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        free = rnd.sample(range(sum(tables) + 2), sum(tables) + 2)
        self.tables = [[free.pop() for _ in range(n)] for n in tables]
        heads = config.n_heads, config.n_kv_heads
        self.texts = [draw(n, n, heads, config.head_dim, rnd.getrandbits(32)) for n in lengths]
        self.ends = [0] * len(lengths)

    def step(self, counts: dict[int, int]) -> Counter:
        """counts: tokens of each text that takes part, in the order of the step. -> what was met"""
        spans, parts, expected, slots = [], [], [], set()
        for i, count in counts.items():
            start, end = self.ends[i], self.ends[i] + count
            self.ends[i] = end
            q, k, v = self.texts[i]
            spans.append(span(start, count, self.tables[i]))
            parts.append((q[start:end], k[start:end], v[start:end]))
            expected.append(reference_attention(*(x.double() for x in (q[start:end], k[:end], v[:end]))))
        view = self.kv.view(Step(spans))
        out = view.attend(self.layer, *(torch.cat(x) for x in zip(*parts, strict=True)))
        error = (out - torch.cat(expected)).abs().max()
        assert error <= EXACT, f"the rows are off by {error}"
        for table, end in zip(self.tables, self.ends, strict=True):
            slots |= {(table[p // self.block_size], p % self.block_size) for p in range(end)}
        for x in (self.kv.k, self.kv.v):
            written = ~x.isnan().any(-1).any(2)  # [layers, blocks, rows]
            assert {tuple(slot) for slot in written[self.layer].nonzero().tolist()} == slots, "slots are off by some"
            assert written.sum() == len(slots), "another layer was written"
        sizes = Counter(group.count for group in view.groups)
        assert max(sizes.values()) == 1
        met = Counter({"long and short": LONG in sizes and len(sizes) > 1, "groups": len(sizes)})
        for group in view.groups:
            many = len(group.lengths) > 1
            kind = "long" if group.count == LONG else "single" if group.count == 1 else "guessed"
            met[kind] += len(group.lengths)
            met[f"several {kind}"] += many
            if kind == "long":
                met["ragged long"] += len(set(group.cu_seqlens.diff().tolist())) > 1
        return met


def check_spans(examples: int) -> Counter:
    """The property: spans of any length side by side give the reference, and write their own slots. -> what was met"""
    rnd, met = random.Random(0), Counter()
    for i in range(examples):
        lengths = [rnd.choice([4, 25, 30]) for _ in range(4)]
        texts = Texts(rnd, lengths, list(CONFIGS.values())[i % len(CONFIGS)])
        while left := {i: n - end for i, (n, end) in enumerate(zip(lengths, texts.ends, strict=True)) if n > end}:
            some = rnd.choice([1, 1, 2, 3, 8])  # often the same for several texts, so that they share a launch
            order = rnd.sample(list(left), len(left))
            met += texts.step({i: min(left[i], rnd.choice([some, some, 9, 20])) for i in order})
    return met


LONG_PASTS = [70, 9, 66]  # longer than a tile of keys, beside one that is shorter


def check_long_pasts() -> None:
    """More keys than a tile, in both kernels, and more queries than a tile beside fewer."""
    texts = Texts(random.Random(5), [n + 4 for n in LONG_PASTS])
    texts.step(dict(enumerate(LONG_PASTS)))
    texts.step({1: 1, 0: 1, 2: 1})
    texts.step({2: 3, 1: 3, 0: 3})


def test_spans_of_any_length_side_by_side_give_the_reference_and_write_their_own_slots(interpreted):
    met = check_spans(6)
    for name in ("long and short", "several single", "several guessed", "several long", "ragged long"):
        assert met[name] >= 3, met
    assert min(met[name] for name in ("single", "guessed", "long")) >= 10, met


def test_pasts_longer_than_a_tile_beside_shorter_ones(interpreted):
    check_long_pasts()


@pytest.mark.parametrize(("heads_per_group", "few"), [(1, 8), (3, 8), (8, 8), (9, 7), (32, 2), (64, 1)])
def test_up_to_a_few_tokens_are_decoded_and_more_are_prefilled(heads_per_group, few, launches):
    """As many query rows as a program of the decode kernel takes: 64 for a key head, and not more than 8 tokens."""
    config = replace(TINY, n_heads=heads_per_group, n_kv_heads=1)
    for count in (1, few, few + 1):
        texts = Texts(random.Random(count), [few + 1], config)
        texts.step({0: count})
        name, shape = launches[-1]
        assert name == ("paged_attention" if count <= few else "flash_attention")
        assert shape == ((1, count) if count <= few else (count,)) + (heads_per_group, config.head_dim)


MUTANTS = {
    "slots are off by one": ("* size + p % size", "* size + (p + 1) % size"),
    "slots follow no table": ("span.block_table[p // size] * size", "p // size * size"),
    "lengths do not count the new tokens": ("[span.end for span in spans]", "[span.start for span in spans]"),
    "rows of a group are swapped": ("= group(q[group.rows], keys", "= group(q[group.rows.flip(0)], keys"),
    "rows go to those of another group": ("out[group.rows] =", "out[(group.rows + 1) % len(out)] ="),
    "each reads the table of another": ("batch_first=True)", "batch_first=True).roll(1, 0)"),
    "spans begin where others do": ("accumulate(counts, initial=0)", "accumulate(counts[::-1], initial=0)"),
    "the longest span is not thought of": ("max(counts), max(lengths)", "min(counts), max(lengths)"),
    "the longest past is not thought of": ("max(counts), max(lengths)", "max(counts), min(lengths)"),
    "all layers share one memory": ("self.pool.k[layer], self.pool.v[layer]", "self.pool.k[0], self.pool.v[0]"),
    "keys are values": ("(k, v, keys, values, self.slots)", "(v, k, keys, values, self.slots)"),
    "all spans of a group begin at its first": ("[start + i for span, start in", "[members[0][1] + i for span, _ in"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_property_rejects_a_planted_mistake(name, monkeypatch, interpreted):
    monkeypatch.setattr(paged_kv, "KernelView", mutant(kernel_attention, *MUTANTS[name]).KernelView)
    with pytest.raises(AssertionError, match="off by"):
        if "longest" in name:  # else one tile is enough for all
            check_long_pasts()
        else:
            check_spans(4)


# --- In the engine. ---


class Listening(Engine):
    """Keeps each row of logits that a token is chosen from. Its pool is full of NaN."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        self.rows: list[tuple[EngineRequest, int, Tensor]] = []

    def write(self, request, logits):
        self.rows.append((request, len(request.tokens), logits.clone()))
        return super().write(request, logits)


def prompts() -> list[list[int]]:
    rnd = random.Random(0)
    base = [rnd.randrange(TINY.vocab_size) for _ in range(64)]
    return [base[:12], [3], base[:20], [*base[:12], 5, 6, 7], base[40:45], base[:33]]


LENGTHS = [4, 5, 4, 3, 2, 3]  # tokens to write, for each prompt
POOLS = {"ample": 200, "forcing": 48}


def serve(model: Transformer, block_size: int, budget: int, sharing: bool, pool: str) -> Counter:
    """Ragged requests, three of them samples of one prompt. Each row is compared with the naive pass of its text."""
    engine = Listening(model, None, POOLS[pool] // block_size, block_size, 4, budget, sharing)
    greedy = SamplingParams(temperature=0)
    for prompt, n in zip(prompts(), LENGTHS, strict=True):
        engine.add(prompt, replace(greedy, max_tokens=n))
    engine.add_samples(prompts()[3][:14], 3, SamplingParams(seed=1, max_tokens=3))
    met = Counter()
    while not engine.idle:
        engine.step()
        counts = [span.count for span in engine.last_step.spans]
        met["short and long together"] += min(counts) == 1 and max(counts) > 8
        met["several long together"] += sum(count > 8 for count in counts) > 1
        met["steps"] += 1
    engine.blocks.check_integrity([])
    expected = {}
    for request, length, row in engine.rows:
        if request not in expected:
            expected[request] = naive(model, request.tokens)
        error = (row - expected[request][length - 1]).abs().max()
        assert error <= TOLERANCE, f"the logits after {length} tokens are off by {error}"
    assert len(engine.rows) == sum(LENGTHS) + 9
    return met + engine.scheduler.met


SETTINGS = [
    ("groups of 3", 1, 64, True, "ample"),
    ("a group of 9", 3, 64, True, "forcing"),
    ("groups of 3", 16, 13, True, "forcing"),
    ("every head its own", 3, 13, False, "forcing"),
    ("a group of 9", 16, 64, False, "ample"),
]


@pytest.mark.parametrize(("name", "block_size", "budget", "sharing", "pool"), SETTINGS)
def test_every_sampled_row_equals_the_naive_pass(name, block_size, budget, sharing, pool, launches):
    met = serve(MODELS[name], block_size, budget, sharing, pool)
    assert (met["preemptions"] > 0) == (pool == "forcing"), met
    assert (met["cache hits"] > 0) == sharing, met
    assert (met["chunks"] > 0) == (budget == 13), met
    assert (met["copies"] > 0) == (block_size > 1), met
    assert met["short and long together"] > 0, met
    if budget > 13:
        assert met["several long together"] > 0, met
    names = Counter(name for name, _ in launches)
    assert names["store_kv"] == met["steps"] * TINY.n_layers
    assert names["flash_attention"] >= 4, names
    assert names["paged_attention"] >= 16, names


@torch.inference_mode()
def test_guesses_are_verified_in_one_pass_and_wrong_ones_leave_nothing_behind(launches):
    """Three texts guess 1 to 7 tokens at a time, of which some are kept; a fourth comes in with its prompt."""
    rnd = random.Random(3)
    kv = PagedKV(TINY, 40, 4, torch.float32)
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    free = rnd.sample(range(40), 40)
    first, second, third, late = (
        Request([rnd.randrange(37) for _ in range(n)], 100, block_table=[free.pop() for _ in range(10)])
        for n in (5, 14, 9, 12)
    )
    rejected = 0
    for guesses in (0, 1, 7, 2, 4):  # none while the prompts are read
        spans = []
        for request in (first, second, third):
            request.draft = [rnd.randrange(37) for _ in range(guesses)]
            spans.append(Span(request, request.num_computed, request.wanted))
        if guesses == 2:
            spans.insert(1, Span(late, 0, 12))
        ids = [token for span in spans for token in span.ids]
        positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
        logits = MODEL.logits(MODEL(torch.tensor(ids), positions, kv.view(Step(spans))))
        for span, rows in zip(spans, logits.split([span.count for span in spans]), strict=True):
            request = span.request
            expected = naive(MODEL, request.tokens + request.draft)[span.start :]
            assert (rows - expected).abs().max() <= TOLERANCE
            kept = request.draft[: rnd.randint(0, len(request.draft))]
            rejected += len(request.draft) - len(kept)
            request.num_computed = len(request.tokens) + len(kept)
            request.tokens = [*request.tokens, *kept, rnd.randrange(37)]  # the rows of the rejected are overwritten
            request.draft = []
    assert rejected > 10
    groups = [shape[:2] for name, shape in launches if name == "paged_attention"]
    assert groups == [each for group in [(1, 5), (3, 2), (3, 8), (3, 3), (3, 5)] for each in [group] * TINY.n_layers]
    assert ("flash_attention", (12, 6, 4)) in launches


def test_the_real_model_writes_the_same_first_tokens_through_the_kernels(smollm2, launches):
    model, tokenizer = smollm2
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    texts = ["Once upon a", "The days of the week: Monday, Tuesday,"]
    engine = Listening(model, tokenizer, 6)
    done = engine.generate(texts, params)
    layers = model.config.n_layers
    names = Counter(name for name, _ in launches)
    assert names == {"store_kv": 2 * layers, "flash_attention": layers, "paged_attention": 2 * layers}
    for text, generation in zip(texts, done, strict=True):
        assert generation.tokens == generate(model, tokenizer, text, params, NoCache()).tokens
