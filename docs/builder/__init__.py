"""What ``mkdocs`` is helped with: pages from registries and docstrings, equations, notebooks, the API."""
