"""FedTHE and FedTHE+: two heads, weighed for every test sample (ICLR 2023).

``method.py`` trains both heads and the descriptors, ``adapter.py`` (``the``) weighs them, ``adapter_plus.py``
(``the-plus``) tunes for each sample besides. Shared with others: ``blocks/descriptors.py`` and ``blocks/head_mixing.py``.
"""
