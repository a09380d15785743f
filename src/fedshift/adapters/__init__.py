"""Test-time adapters, one small file each; they work with every method that deploys what they need."""
