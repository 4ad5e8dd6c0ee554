"""Exercise 04, FlashAttention: online softmax, tiles and their bounds, merging two parts, two Triton kernels."""

from minillm.lab.checks.ch04 import task1_softmax, task2_tiles, task3_bounds, task4_merge, task5_norm, task6_gather
from minillm.lab.checks.ch04.base import CHAPTER, Partial

__all__ = [
    "CHAPTER",
    "Partial",
    "task1_softmax",
    "task2_tiles",
    "task3_bounds",
    "task4_merge",
    "task5_norm",
    "task6_gather",
]
