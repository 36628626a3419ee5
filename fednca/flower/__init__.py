"""The same methods on real federations: a Flower app, and the only place that imports flwr."""
