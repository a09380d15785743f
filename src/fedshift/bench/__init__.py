"""Experiments, runs, results people can trust."""
