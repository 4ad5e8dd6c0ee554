"""What many tests share: small models that hide no bug, and the real one, loaded once."""

from __future__ import annotations

import inspect
import os
import tempfile
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

import minillm
from minillm.config import ModelConfig
from minillm.lab.tiny import TINY, tiny_model
from minillm.model import Transformer

os.environ.setdefault("MINILLM_FAST", "1")  # the notebooks' kernels inherit it: small sizes
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # and this: kernels side by side would wait for each other's threads
os.environ["MINILLM_PROGRESS"] = os.path.join(tempfile.mkdtemp(), "progress.json")  # not the learner's own
if find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"  # before it is imported: here kernels are interpreted, on a CPU
    import triton

    triton.knobs.runtime.interpret = True  # also for those that are defined later
    del os.environ["TRITON_INTERPRET"]  # the engine looks here, and is to use PyTorch where a test does not set it
torch.set_num_threads(1)  # on small models and busy machines, threads wait for each other more than they work


def random_model(config: ModelConfig = TINY, seed: int = 0) -> Transformer:
    """A `tiny_model` whose norms and biases are random too: at 1 and 0 a misplaced one would not show."""
    model = tiny_model(seed, config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.fixture
def tiny() -> Transformer:
    return tiny_model()


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer): the real default model in float32."""
    return minillm.load(device="cpu")


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with one place of its source changed."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is not in the source once: this mutant needs a new home"
    changed = ModuleType(module.__name__)
    exec(compile(source.replace(old, new), "a planted mistake", "exec"), changed.__dict__)
    return changed
