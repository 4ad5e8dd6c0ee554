"""Stage 6: the engine. Many requests, one model, one pool of blocks, one step at a time.

A step asks the scheduler who computes what, sends all those tokens through the model as one flat list, and lets each
text whose tokens are all computed choose its next one. Requests can be added, streamed and given up between any two
steps. What is wrong with a request is said when it is added, and hurts nobody else.

    engine = Engine(model, tokenizer)
    request = engine.add("Once upon a time", SamplingParams(max_tokens=40))
    for _, piece in engine.stream(request):
        print(piece.text, end="")

An engine is used from one thread.

Yu et al., "Orca" (2022), section 4; Kwon et al., "PagedAttention" (2023), section 5.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minillm.blocks import BlockPool, require_counts
from minillm.engine_request import EngineRequest
from minillm.generation import new_writer
from minillm.model import Transformer
from minillm.paged_kv import PagedKV
from minillm.policies import Policy
from minillm.request import Step
from minillm.sampling import SamplingParams
from minillm.scheduler import Scheduler
from minillm.speculative import Drafter, require_drafter, verify
from minillm.tokenizer import Tokenizer
from minillm.writing import Generation, Piece


class Engine:
    """Continuous batching over a paged cache.

    n_blocks, block_size: the pool, n_blocks * block_size tokens for all requests together.
    max_num_seqs: requests that run at a time. max_num_batched_tokens: tokens that a step computes; longer prompts are
    cut into chunks. sharing: whether requests with the same beginning share its blocks. policy: see policies.py.
    drafter: guesses up to k tokens of each text that decodes (speculative.py); a step verifies them. clock: the time in
    seconds, for arrivals and all that is measured.

    Raises ValueError for arguments of the wrong kind, and for a pool that does not fit into memory.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        n_blocks: int = 1024,
        block_size: int = 16,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 256,
        sharing: bool = True,
        policy: Policy | None = None,
        drafter: Drafter | None = None,
        k: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if not isinstance(model, Transformer):
            raise ValueError(f"model must be a Transformer, as minillm.load() gives, not {type(model).__name__}")
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            raise ValueError(f"tokenizer must be a Tokenizer or None, not {type(tokenizer).__name__}")
        if policy is not None and (isinstance(policy, type) or not hasattr(policy, "may_join")):
            raise ValueError(f"policy must be an object such as Continuous() or Static(), not {policy!r}")
        self.model, self.tokenizer, self.clock = model, tokenizer, clock
        if drafter is not None:
            require_drafter(drafter, model, k)
        self.drafter, self.k = drafter, k
        self.kv = PagedKV(model.config, n_blocks, block_size, model.dtype, model.device)
        blocks = BlockPool(n_blocks, block_size, sharing)
        self.scheduler = Scheduler(blocks, max_num_seqs, max_num_batched_tokens, policy)
        self.last_step = Step([])

    @property
    def blocks(self) -> BlockPool:
        return self.scheduler.blocks

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def requests(self) -> list[EngineRequest]:
        """All that are not finished."""
        return [r for each in (*self.scheduler.running, *self.scheduler.waiting) for r in (each, *each.followers)]

    def add(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, priority: int = 0
    ) -> EngineRequest:
        """Take a request in. ValueError says what is wrong with it; nobody else notices.

        prompt: text or token ids. priority: a higher one is served first.
        """
        return self.add_samples(prompt, 1, params, priority)[0]

    def add_samples(
        self, prompt: str | Sequence[int], n: int, params: SamplingParams | None = None, priority: int = 0
    ) -> list[EngineRequest]:
        """n texts from one prompt, computed and kept once for all that find a place. Sample i has the seed + i."""
        require_counts(n=n)
        requests = [self.make_request(prompt, params, priority, i) for i in range(n)]
        self.submit(requests)
        return requests

    def make_request(
        self, prompt: str | Sequence[int], params: SamplingParams | None, priority: int = 0, sample: int = 0
    ) -> EngineRequest:
        """Check a request, and make it without taking it in."""
        writer = new_writer(self.model, self.tokenizer, prompt, params)
        if writer.params.seed is not None:
            writer.generator.manual_seed((writer.params.seed + sample) % 2**64)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be a whole number, not {priority!r}")
        request = EngineRequest(writer, priority, self.clock())
        if request.finish_reason is None:
            self.scheduler.require_room(request)
        return request

    def submit(self, samples: Sequence[EngineRequest]) -> None:
        """Queue the samples of one prompt: the first, with the others behind it."""
        leader, *followers = samples
        if leader.finish_reason is None:  # else not a single token was asked for
            leader.followers.extend(followers)
            self.scheduler.add(leader)

    @torch.inference_mode()
    def step(self) -> list[tuple[EngineRequest, Piece]]:
        """One pass of the model. -> the tokens that it gave; none while prompts are read, or with nothing to do."""
        now = self.clock()
        self.draft()
        step = self.last_step = self.scheduler.schedule(now)
        if not step.spans:
            return []
        for span in step.spans:
            if span.request.admitted is None:
                span.request.admitted = now
        hidden = self.forward(step).split([span.count for span in step.spans])
        for span in step.spans:  # the rows of guesses are not past yet
            self.scheduler.computed(span.request, min(span.end, len(span.request.tokens)) - span.start)
        # The rows to choose from: the last decided token's, and those of the guesses. None while a prompt is read.
        rows = [h[max(0, len(s.request.tokens) - 1 - s.start) :] for s, h in zip(step.spans, hidden, strict=True)]
        logits = self.model.logits(torch.cat(rows)).split([len(each) for each in rows])
        written = []
        for span, each in zip(step.spans, logits, strict=True):
            if len(each):
                for request in (span.request, *self.scheduler.fork(span.request)):  # samples choose from the same row
                    written += self.write(request, each)
        if self.drafter is not None:
            for span, h in zip(step.spans, hidden, strict=True):
                if span.request.finish_reason is None:
                    self.drafter.observe(
                        span.request.writer, span.start, h[: len(span.request.tokens) - 1 - span.start]
                    )
        return written

    @torch.inference_mode()
    def draft(self) -> None:
        """Let the drafter guess for all texts that decode. The scheduler may give guesses up again."""
        if self.drafter is None:
            return
        texts = [r for r in self.scheduler.running if r.wants_one and r.writer.output and not r.draft]
        counts = [min(self.k, r.writer.left - 1) for r in texts]
        proposals = self.drafter.propose([r.writer for r in texts], counts)
        for request, proposal in zip(texts, proposals, strict=True):
            request.draft, request.proposal = proposal.ids, proposal

    def forward(self, step: Step) -> Tensor:
        """Send the tokens of all spans through the model. -> hidden [tokens of the step, d_model]"""
        ids = [token for span in step.spans for token in span.ids]
        positions = torch.cat([torch.arange(span.start, span.end) for span in step.spans])
        device = self.model.device
        return self.model(torch.tensor(ids, device=device), positions.to(device), self.kv.view(step))

    def write(self, request: EngineRequest, logits: Tensor) -> list[tuple[EngineRequest, Piece]]:
        """Let one text choose its next token, or judge its guesses. If it cannot, it ends with its sentence, and the
        others go on. logits: [guesses + 1, vocab_size]"""
        if request.admitted is None:
            request.admitted = self.clock()
        proposal, request.draft = replace(request.proposal, ids=request.draft), []
        shown = len(request.pieces)
        try:
            request.pieces += verify(request.writer, logits, proposal, self.clock() - request.arrival)
        except (ValueError, RuntimeError) as error:
            request.error = str(error)
        if reason := "error" if request.error else request.writer.finish_reason:
            self.end(request, reason)
        else:
            self.scheduler.computed(request, len(request.pieces) - shown - 1)  # the guesses that were right
        return [(request, piece) for piece in request.pieces[shown:]]

    def end(self, request: EngineRequest, reason: str) -> None:
        request.finish_reason = reason
        self.scheduler.finish(request)
        if self.drafter is not None:
            self.drafter.release(request.writer)

    def abort(self, request: EngineRequest) -> None:
        """Give a request up: its blocks are free at once. One that has finished stays as it is."""
        self.require_own(request)
        if request.finish_reason is None:
            self.end(request, "abort")

    def require_own(self, request: EngineRequest) -> None:
        if not isinstance(request, EngineRequest):
            raise ValueError(f"expected a request, not {type(request).__name__}; for a list of them write *requests")
        if request.finish_reason is None and request not in self.requests:
            raise ValueError("this request belongs to another engine")

    def stream(self, *requests: EngineRequest) -> Iterator[tuple[EngineRequest, Piece]]:
        """Run until these requests are done (without any: all that are here now), and give each piece as it comes.

        What other requests write meanwhile is kept in their `pieces`. A request can be streamed later, or twice.
        """
        requests = requests or tuple(self.requests)
        for request in requests:
            self.require_own(request)
        return self.pieces_of(requests)

    def pieces_of(self, requests: Sequence[EngineRequest]) -> Iterator[tuple[EngineRequest, Piece]]:
        """The loop behind the checks of `stream`. Others may run the engine between two pieces."""
        shown: Counter[EngineRequest] = Counter()
        while True:
            for request in requests:
                while shown[request] < len(request.pieces):
                    shown[request] += 1
                    yield request, request.pieces[shown[request] - 1]
            if any(shown[r] < len(r.pieces) for r in requests):  # written by others meanwhile
                continue
            if all(r.finish_reason for r in requests):
                return
            self.step()
            if not self.last_step.spans:
                time.sleep(1e-3)  # a policy waits for more requests

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]:
        """All texts, in the order of their prompts. params: the same for all, or one for each.

        Nothing is run unless every prompt is sound. A text for which no token can be chosen on the way ends with the
        finish reason "error", and a warning that says why; the others go on.
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise ValueError("prompts is a list of prompts; for a single one give [prompt]")
        prompts = list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if not isinstance(params, (list, tuple)):
            raise ValueError(f"params must be SamplingParams or a list of them, not {type(params).__name__}")
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(params)} params")
        requests = [self.make_request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        for request in requests:
            self.submit([request])
        try:
            for _ in self.stream(*requests):
                pass
        except BaseException:  # nobody else holds these requests: without this they would run on, unseen
            for request in requests:
                self.abort(request)
            raise
        for number, request in enumerate(requests):
            if request.error is not None:
                warnings.warn(f"prompt {number} ended early: {request.error}", stacklevel=2)
        return [request.generation for request in requests]
