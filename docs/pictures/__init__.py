"""Pictures, and what draws them."""
