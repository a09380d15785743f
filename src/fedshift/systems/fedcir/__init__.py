"""FedCiR: client-invariant representations (IEEE TMC 2024)."""
