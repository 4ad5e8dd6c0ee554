"""The ledger: numbers that are often stated about LLM inference, reproduced or refuted.

Each row is a claim in our own words, the figure that decides it, a verdict that follows from the figure, and the
condition. Files that begin with a_ hold what arithmetic decides, with b_ what running an algorithm decides, with c_
what only a measurement of speed or memory decides. ledger.py is the form of a row, workbench.py what measuring needs,
passes.py what several rows measure together; run.py goes through all of them.
"""
