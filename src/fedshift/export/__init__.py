"""One client's model for use elsewhere: an artefact, or a network with everything inside."""

from __future__ import annotations

from fedshift.export.exporting import Exported, export

__all__ = ["Exported", "export"]
