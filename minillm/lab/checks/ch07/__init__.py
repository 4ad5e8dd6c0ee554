"""Exercise 07, speculative sampling: accept or reject, the residual, a round, look-up, the draft's cache, the gain."""

from minillm.lab.checks.ch07 import task1_accept, task2_residual, task3_round, task4_lookup, task5_cache, task6_gain
from minillm.lab.checks.ch07.base import CHAPTER

__all__ = [
    "CHAPTER",
    "task1_accept",
    "task2_residual",
    "task3_round",
    "task4_lookup",
    "task5_cache",
    "task6_gain",
]
