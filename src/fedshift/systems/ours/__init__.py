"""Ours: one composition for every shift that the five papers study.

``method.py`` is how clients and server train; ``adapter.py`` what a client does at test time: ``home_or_away.py`` where it
has labels (``home_weight.py`` follows the stream), ``prior_em.py`` where it has none.
"""
