"""Parts that two or more methods or adapters share."""
