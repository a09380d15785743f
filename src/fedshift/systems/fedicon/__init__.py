"""FedICON: contrast between views, in training and at test time (NeurIPS 2023)."""
