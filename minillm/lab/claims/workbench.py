"""What measuring a claim needs, made when it is first asked for: most claims need no model."""

from __future__ import annotations

from functools import cached_property

import torch

import minillm
from minillm.lab.workload import Workload, read_workload
from minillm.model import Transformer
from minillm.tokenizer import Tokenizer


class Workbench:
    """quick: smaller sizes, for a test. fresh: reuse no stored figures."""

    def __init__(self, quick: bool = False, fresh: bool = False):
        self.quick = quick
        self.fresh = fresh

    @cached_property
    def loaded(self) -> tuple[Transformer, Tokenizer]:
        """The default model in float32 on the CPU; quick: without looking for its quickest products."""
        with torch.inference_mode(False):  # whoever asks first may be in it, and its tensors serve nobody else
            model, tokenizer = minillm.load(dtype=torch.float32, device="cpu", prepare=not self.quick)
            return model.requires_grad_(False), tokenizer

    @property
    def model(self) -> Transformer:
        return self.loaded[0]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded[1]

    @cached_property
    def story(self) -> Workload:
        return read_workload("story", self.tokenizer, quick=self.quick)
