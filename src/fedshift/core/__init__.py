"""The whole idea, readable in one sitting: trees, networks as functions, methods, adapters, randomness, plans."""
