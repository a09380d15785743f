"""Beyond one machine: any method on Flower, every party's data on its own machine.

The server runs the same session as ``fedshift run`` (``session.py``); its engine (``engine.py``) sends packets
(``packet.py``) where others call functions. A party answers with the reference engine's work and keeps its local state on
its own disk (``party.py``, ``memory.py``). Contact with flwr: ``records.py``, ``node.py``, ``flower.py``, ``processes.py``.
"""
