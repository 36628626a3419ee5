"""Losses, metrics, thresholds, neural collapse, the Fisher diagonal: functions of tensors."""
