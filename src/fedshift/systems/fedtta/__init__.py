"""FedTTA, FedTTA++ and HeteroFedTTA: a loss learnt for adapting without labels (UPFL, 2023).

``method.py`` trains model and loss, ``learned_loss.py`` is that loss, ``adapter.py`` (``fedtta``; FedTTA++ with more steps)
steps on it at test time, ``hetero.py`` is the method for clients with any networks.
"""
