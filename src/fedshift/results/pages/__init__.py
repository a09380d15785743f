"""Pages that a browser shows without anything else."""
