"""Training methods, one small file each: paper, equations, deviations, then the difference from FedAvg."""
