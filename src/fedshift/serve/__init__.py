"""A model that goes on adapting behind HTTP, and knows when it should not. The heart is ``service.py``."""
