"""Exercise 06, continuous batching: what it gains, the scheduler's step, chunks, preemption, the flat batch."""

from minillm.lab.checks.ch06 import task1_steps, task2_plan, task3_chunks, task4_room, task5_flat
from minillm.lab.checks.ch06.base import CHAPTER

__all__ = ["CHAPTER", "task1_steps", "task2_plan", "task3_chunks", "task4_room", "task5_flat"]
