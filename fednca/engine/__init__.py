"""Engines execute the rounds of a federation; methods know nothing of them."""
