"""Triton kernels, one a file, each beside its plain PyTorch reference.

    checks.py            what every wrapper asks of its tensors and their device
    rmsnorm.py           the warm-up: one row, one program
    online_softmax.py    the walk over tiles of keys that both attention kernels share
    flash_attention.py   prefill: many query rows
    paged_attention.py   decode: few query rows, the past split among programs
    store_kv.py          new keys and values into their slots
    nibbles.py           packed 4-bit weights on their way into registers
    w4a16.py             a linear layer that reads them: one row, and tiles of rows
    specs.py, aot.py     what is compiled without a GPU, and what the compiler makes of it
    cases.py, bench.py   what is run on a GPU, and how fast it is

They import nothing from `minillm`. Without a GPU they run in Triton's interpreter: set TRITON_INTERPRET=1 before the
start. The interpreter runs one program after the other, so it cannot show a race between two of them.

Hugging Face publishes a package of the same name. If that one is imported instead, its folder comes first on Python's
path: uninstall it, or install this project after it.
"""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ImportError(
        "SKIP: the kernels need Triton, which is made for Linux (pip install triton). "
        "Everything else of minillm works without it."
    )
