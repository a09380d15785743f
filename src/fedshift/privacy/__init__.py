"""What uploads go through: clipping, noise, secret sums."""
