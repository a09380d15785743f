"""The five systems, a folder each: method, adapter and the parts that only they use."""
