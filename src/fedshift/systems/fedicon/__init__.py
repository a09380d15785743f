"""FedICON: contrast between views, in training and at test time (NeurIPS 2023).

``method.py`` trains, ``projection.py`` are its two layers behind the features, ``adapter.py`` goes on with the contrast.
Views and the contrastive loss are in ``blocks/views.py`` and ``blocks/losses.py``.
"""
