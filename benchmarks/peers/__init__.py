"""The rows of benchmarks/rounds.py: other simulators, a plain loop and our engines, all doing the same work."""
