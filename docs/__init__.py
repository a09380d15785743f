"""The documentation; ``generate.py`` and ``builder/`` make what nobody writes."""
