"""The parts of ``benchmarks/torture.py``."""
