"""Exercise 05, PagedAttention: block tables, the allocator, the prefix hash, copy-on-write, attention over blocks."""

from minillm.lab.checks.ch05 import task1_slots, task2_resize, task3_prefix, task4_append, task5_attend
from minillm.lab.checks.ch05.base import CHAPTER, CachedBlock, Pool

__all__ = [
    "CHAPTER",
    "CachedBlock",
    "Pool",
    "task1_slots",
    "task2_resize",
    "task3_prefix",
    "task4_append",
    "task5_attend",
]
