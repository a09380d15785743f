"""Parts of ``benchmarks/serve.py``."""
