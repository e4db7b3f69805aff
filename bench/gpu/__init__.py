"""Parts of ``gpu_check.py``: record, steps around the benchmark, timing, one module per operator."""
