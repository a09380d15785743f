"""Sources, partitions, splits, shifts and streams: everything that is decided before training."""
