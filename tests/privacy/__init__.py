"""What uploads go through."""
