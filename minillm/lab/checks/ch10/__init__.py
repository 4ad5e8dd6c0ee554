"""Exercise 10, the exam: memory, times, the batch, speculation, the choice of a quantization, a profile."""

from minillm.lab.checks.ch10 import task1_memory, task2_times, task3_batch, task4_guesses, task5_choice, task6_profile
from minillm.lab.checks.ch10.base import CHAPTER, Option, ProfileRow

__all__ = [
    "CHAPTER",
    "Option",
    "ProfileRow",
    "task1_memory",
    "task2_times",
    "task3_batch",
    "task4_guesses",
    "task5_choice",
    "task6_profile",
]
