"""Federated methods: the contract, the registry, and one file each."""

from fednca.methods.registry import create_method, find_method, method_names

__all__ = ["create_method", "find_method", "method_names"]
