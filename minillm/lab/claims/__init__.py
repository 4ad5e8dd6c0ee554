"""The ledger: numbers that are often stated about LLM inference, reproduced or refuted.

Each row is a claim in our own words, the figure that decides it, a verdict that follows from the figure, and the
condition. memory.py and rooflines.py hold what arithmetic decides, algorithms.py (loops and batches),
attention_claims.py, cache_claims.py, guessing_claims.py, quant_claims.py and kv_quant_claims.py what running an
algorithm decides, speed.py, step_parts.py, paging_claims.py, serving_claims.py, guessing_speed.py and
quantized_speed.py what only a measurement decides. ledger.py is the form; run.py goes through the rows.
"""
