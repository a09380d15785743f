"""FedTHE and FedTHE+: two heads, weighed for every test sample (ICLR 2023)."""
