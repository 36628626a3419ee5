"""Engines: ways to train clients, add up their sums and judge models."""
