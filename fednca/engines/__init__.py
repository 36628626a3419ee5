"""Ways to carry out what the loop asks of clients."""
