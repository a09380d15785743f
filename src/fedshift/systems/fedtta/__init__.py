"""FedTTA, FedTTA++ and HeteroFedTTA: a loss learnt for adapting without labels (UPFL, 2023)."""
