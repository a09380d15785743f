"""FDSE: domain-shift erasers and consensus (CVPR 2025)."""
