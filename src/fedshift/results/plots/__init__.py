"""Pictures, as PNG."""
