"""Networks, each a small frozen dataclass with ``make(shape, classes)``; no torchvision."""
