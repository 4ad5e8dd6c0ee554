"""Exercise 09, W4A16: a group on its grid, packing, a quantized product, AWQ's search, GPTQ's step, a Triton kernel."""

from minillm.lab.checks.ch09 import task1_group, task2_pack, task3_linear, task4_search, task5_column, task6_kernel
from minillm.lab.checks.ch09.base import CHAPTER

__all__ = [
    "CHAPTER",
    "task1_group",
    "task2_pack",
    "task3_linear",
    "task4_search",
    "task5_column",
    "task6_kernel",
]
