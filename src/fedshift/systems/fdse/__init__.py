"""FDSE: domain-shift erasers and consensus (CVPR 2025).

``method.py`` is how clients and server train, ``eraser.py`` its layers, ``surgery.py`` how they come into a network,
``consensus.py`` the solver of the least-norm mixture of updates, ``adapter.py`` (``fdse-align``) what an unseen client does
without labels.
"""
