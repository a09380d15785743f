"""The sections of the report, a file each: pure functions from results to plain data, nothing where there is nothing."""
