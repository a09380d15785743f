"""A run on disk: the files of a run folder, and the types of what stands in them."""
