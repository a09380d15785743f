"""FedCiR: client-invariant representations (IEEE TMC 2024).

``method.py`` has the loss and the class Gaussians; the server's generator is in ``blocks/generator.py`` (FedGen has it too),
the stochastic representation in ``blocks/stochastic_encoder.py`` (FedSR's too). It has no adapter of its own.
"""
